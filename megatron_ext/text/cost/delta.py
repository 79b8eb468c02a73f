"""The cost of gated DeltaNet and Kimi Delta Attention (`layers.mixers.delta_mixer`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.products import Linear
from megatron_ext.planning.stages import FP32
from megatron_ext.planning.weights import Weight
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.cost.mixer import Run
from megatron_ext.text.cost.recurrent import Pace, Recurrent, normed

SEGMENT = 8
"""Chunks after which a state is kept for the backward pass."""


@dataclass(frozen=True)
class Delta(Recurrent):
    """A mixer that follows the gated delta rule.

    Attributes:
        key_heads: number of heads of queries and keys.
        key, value: channels of a head's key and value.
    """

    key_heads: int
    key: int
    value: int

    @classmethod
    def of(cls, config: RunConfig) -> Delta:
        sizes = config.section(MixerConfig)
        key_heads = sizes.linear_num_key_heads
        heads = sizes.linear_num_value_heads
        key = sizes.linear_key_head_dim
        value = sizes.linear_value_head_dim
        return cls(
            h=config.model.hidden_size or 0,
            taps=sizes.linear_conv_kernel_dim,
            heads=heads,
            channels=2 * key_heads * key + heads * value,
            outputs=heads * value,
            state=heads * key * value,
            transition=heads * key * key,
            key_heads=key_heads,
            key=key,
            value=value,
        )

    @property
    @abstractmethod
    def decays(self) -> int:
        """Return the number of log decays of a token, in all heads."""

    @property
    def mixing(self) -> int:
        """Return the multiplications of the convolution, and four of states by vectors."""
        return self.taps * self.channels + 4 * self.heads * self.value**2

    def weights(self, run: Run, name: str) -> list[Weight]:
        x = run.sizes
        return [
            self.split(run, f"{name}.conv_weight", self.channels * self.taps),
            self.split(run, f"{name}.dt_bias", self.decays),
            self.split(run, f"{name}.A_log", self.heads),
            Weight(f"{name}.out_norm.weight", self.value),
            *run.linear_weights(name, self.matrices(x.tp)),
        ]

    def chunk(self, run: Run) -> int:
        covering = 1 << (self.length(run) - 1).bit_length()
        return min(64 if run.sizes.gpu else 32, covering)

    def chunked(self, run: Run) -> float:
        length = self.chunk(run)
        # The inverse, and products with values and with states, by which also queries are
        # multiplied; before them the products of keys with keys and with queries.
        solved = solving(length)
        between = self.within(length)
        per_head = solved + 2 * length * self.value + 3 * self.key * self.value
        total = between + self.heads * per_head
        if run.sizes.cp > 1:
            # The summary of a slice has no queries, and a unit matrix beside the values.
            width = self.key + self.value
            total += between / 2 + self.heads * (solved + (length + 2 * self.key) * width)
        return total

    @abstractmethod
    def within(self, length: int) -> float:
        """Return the multiplications per token of the products of keys, and of queries with keys.

        ``length`` is the number of positions of a chunk.
        """

    def recurrence(self, run: Run) -> int:
        x = run.sizes
        tokens = x.tokens
        units = 2 * self.key_heads // x.tp
        # Queries and keys before and after they get unit length, in float32, and their lengths.
        # Without a cast, they are parts of what SiLU returns, all of which is kept.
        before = units * self.key if x.half else self.channels // x.tp
        kept = tokens * FP32 * (before + units * self.key + units)
        if not self.views(run):
            kept += tokens * self.outputs // x.tp * x.width
        elif x.half:
            kept += tokens * self.channels // x.tp * x.width
        # The steps before and after softplus, the log decays, and beta. Frozen rates keep no steps.
        kept += tokens * FP32 * ((2 + run.trains) * self.decays + self.heads) // x.tp
        segments = -(-self.chunks(run) // SEGMENT)
        kept += segments * self.sequences(run) * self.state // x.tp * FP32
        if x.cp > 1:
            wide = self.state + self.transition
            kept += segments * self.sequences(run) * wide // x.tp * FP32
        return int(kept)

    def working(self, run: Run) -> int:
        length = self.chunk(run)
        heads = self.heads // run.sizes.tp * self.sequences(run)
        if not run.sizes.gpu:
            heads = min(heads, max(8, 1024 // self.key))
        chunks = min(SEGMENT, self.chunks(run))
        tensors = 10 * length + self.decayed(length) * self.key + 5 * self.value
        states = (chunks + 1) * self.key * self.value
        inputs = run.sizes.tokens * self.channels // run.sizes.tp
        return int(FP32 * (inputs + heads * (chunks * length * tensors + states)))

    def decayed(self, length: int) -> int:
        """Return how many tensors of the size of a chunk's keys the backward pass holds at once."""
        return 6

    def views(self, run: Run) -> bool:
        """Return whether the values of heads lie in what is convolved as the recurrence takes them.

        Otherwise they are copied.
        """
        return self.heads == self.key_heads or self.key_heads == run.sizes.tp

    def gated(self, run: Run) -> int:
        """Return the bytes of the norm, its result, and the activated gates."""
        x = run.sizes
        rows = x.tokens * self.heads // x.tp
        return int(normed(run, rows, self.value) + 2 * rows * self.value * FP32)


def solving(length: int) -> float:
    """Return the multiplications per token that invert the matrix of a chunk of this length.

    Blocks of 1, 2, 4 and so on are joined in pairs by two products of their size.
    """
    halves = (1 << level for level in range(length.bit_length() - 1))
    return sum(float(half**2) for half in halves)


class GatedDeltaNet(Delta):
    """The cost of `layers.mixers.gated_delta_net`."""

    pace = Pace.of(
        products=((0, 6.75), (0, 11.6)), pointwise=((58, 8.5), (100, 21.4)), moved=(9.5, 28.0)
    )

    @property
    def decays(self) -> int:
        return self.heads

    def matrices(self, tp: int) -> list[Linear]:
        rows = self.channels + self.outputs + 2 * self.heads
        return [*super().matrices(tp), Linear("in_proj", rows, self.h, rows=tp, bias=False)]

    def within(self, length: int) -> float:
        return 2 * length * self.key * self.key_heads

    def gated(self, run: Run) -> int:
        """Return what the base class does, and the bytes of the gates in float32.

        Without a cast and a copy, they are parts of what ``in_proj`` returns.
        """
        x = run.sizes
        channels = self.outputs
        if not x.half and self.views(run):
            channels = self.channels + self.outputs + 2 * self.heads
        return int(super().gated(run) + x.tokens * channels // x.tp * FP32)


class KimiDelta(Delta):
    """The cost of `layers.mixers.kimi_delta`."""

    pace = Pace.of(
        products=((0, 8.0), (0, 15.5)), pointwise=((55, 16.0), (107, 45.8)), moved=(13.0, 35.0)
    )

    @property
    def decays(self) -> int:
        return self.heads * self.key

    def matrices(self, tp: int) -> list[Linear]:
        keys = self.heads * self.key
        low = self.value
        return [
            *super().matrices(tp),
            Linear("in_proj", self.channels + self.heads, self.h, rows=tp, bias=False),
            Linear("f_a_proj", low, self.h, bias=False),
            Linear("f_b_proj", keys, low, rows=tp, bias=False),
            Linear("g_a_proj", low, self.h, bias=False),
            Linear("g_b_proj", self.outputs, low, rows=tp, bias=False),
        ]

    def within(self, length: int) -> float:
        # Half of the pairs, and the whole blocks of 1, 2, 4 and so on between two halves.
        return (length - 1) * self.key * self.heads

    def decayed(self, length: int) -> int:
        # Decays from and to the middle of blocks of 2, 4, 8 and so on.
        return super().decayed(length) + length.bit_length() - 1

    def inputs(self, run: Run) -> dict[str, int]:
        small = run.sizes.residual_tokens * self.value
        return {**super().inputs(run), "f_b_proj": small, "g_b_proj": small}

    def gated(self, run: Run) -> int:
        """Return what the base class does, and the inputs of the second low-rank projections."""
        x = run.sizes
        return int(super().gated(run) + 2 * x.residual_tokens * self.value * x.width)
