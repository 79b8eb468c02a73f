"""The cost of Mamba-2 (`layers.mixers.mamba`)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.products import Linear
from megatron_ext.planning.stages import FP32
from megatron_ext.planning.weights import Weight
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.cost.mixer import Run
from megatron_ext.text.cost.recurrent import SLICES, Pace, Recurrent, normed

CHUNK = 64
"""Positions of a chunk."""
BLOCK = {False: 2**17, True: 2**28}
"""Decays between two positions that are computed at a time, on a CPU and on a GPU."""


@dataclass(frozen=True)
class Mamba(Recurrent):
    """The recurrence of Mamba-2 with its projections and gates.

    Attributes:
        groups: number of groups of heads that share B and C.
        size: numbers of the state for each channel of a head.
        bias: whether the convolution has a bias.
        limited: whether the length of steps has limits.
    """

    pace = Pace.of(
        products=((5, 0.0), (12, 0.0)), pointwise=((92, 4.0), (188, 12.0)), moved=(10.6, 25.7)
    )
    groups: int
    size: int
    bias: bool
    limited: bool

    @classmethod
    def of(cls, config: RunConfig) -> Mamba:
        sizes = config.section(MixerConfig)
        heads = sizes.num_mamba_heads(config)
        outputs = heads * sizes.mamba_head_dim
        limits = sizes.mamba_time_step_min, sizes.mamba_time_step_max
        return cls(
            h=config.model.hidden_size or 0,
            taps=sizes.mamba_conv_kernel_dim,
            heads=heads,
            channels=outputs + 2 * sizes.mamba_num_groups * sizes.mamba_state_dim,
            outputs=outputs,
            state=outputs * sizes.mamba_state_dim,
            transition=heads,
            groups=sizes.mamba_num_groups,
            size=sizes.mamba_state_dim,
            bias=sizes.mamba_conv_bias,
            limited=limits != (0.0, None),
        )

    @property
    def rows(self) -> int:
        """Return the outputs of ``in_proj``: the gate, what is convolved, and steps."""
        return self.outputs + self.channels + self.heads

    def matrices(self, tp: int) -> list[Linear]:
        return [Linear("in_proj", self.rows, self.h, rows=tp, bias=False), *super().matrices(tp)]

    @property
    def mixing(self) -> int:
        """Return half of the seven operations that Megatron-LM counts for a number of the state."""
        return 7 * self.state // 2

    def weights(self, run: Run, name: str) -> list[Weight]:
        x = run.sizes
        own = {
            "conv_weight": self.channels * self.taps,
            "dt_bias": self.heads,
            "A_log": self.heads,
            "D": self.heads,
        }
        if self.bias:
            own = {"conv_bias": self.channels, **own}
        return [
            *(self.split(run, f"{name}.{part}", numel) for part, numel in own.items()),
            *run.linear_weights(name, self.matrices(x.tp)),
            self.split(run, f"{name}.out_norm.weight", self.outputs),
        ]

    def chunk(self, run: Run) -> int:
        return min(CHUNK, self.length(run))

    def chunked(self, run: Run) -> float:
        length = self.chunk(run)
        added = self.state * (2 if run.sizes.cp > 1 else 1)
        scores = length * (self.groups * self.size + self.outputs)
        return float(added + self.state + scores)

    def recurrence(self, run: Run) -> int:
        x = run.sizes
        chunks = self.chunks(run) * self.sequences(run)
        tokens = self.padded(run)
        kept = tokens * self.channels // x.tp * x.width
        if tokens == x.tokens and self.groups > x.tp:
            # B and C are parts of what SiLU returns; the inputs of heads are copied out of it.
            kept += tokens * self.outputs // x.tp * x.width
        # Steps before softplus, and before limits; in chunks, the steps, the sums of logarithms of
        # decays, which have 8 bytes, and decays from the start of a chunk and to its end.
        steps = x.tokens * (1 + self.limited)
        steps += tokens * (7 if run.config.model.document_masks else 5)
        kept += steps * self.heads // x.tp * FP32
        # States before chunks, and the decay of each channel over a chunk.
        calls = 2 if x.cp > 1 else 1
        return int(kept + calls * chunks * (self.state + self.outputs) // x.tp * FP32)

    def gated(self, run: Run) -> int:
        """Return the bytes of the norm, the gates, their SiLU and what it multiplies.

        Without a cast, the gates are parts of what ``in_proj`` returns.
        """
        x = run.sizes
        gates = self.outputs if x.half else self.rows
        outputs = x.tokens if x.half else self.padded(run)
        numbers = x.tokens * (self.outputs + gates) + outputs * self.outputs
        norm = normed(run, x.tokens * self.groups // x.tp, self.outputs // self.groups)
        return int(norm + numbers // x.tp * FP32)

    def padded(self, run: Run) -> int:
        """Return the number of a rank's tokens, with those that fill its last chunks."""
        return self.chunks(run) * self.sequences(run) * self.chunk(run)

    def passed(self, run: Run) -> int:
        """Return the bytes kept of the states that slices hand on, and of all slices' message."""
        x = run.sizes
        if x.cp == 1:
            return 0
        slices = SLICES * x.cp
        elements = (slices - 1) * self.state + slices * (self.state + self.transition)
        return int(x.b * elements // x.tp * FP32)

    def working(self, run: Run) -> int:
        x = run.sizes
        length = self.chunk(run)
        heads = self.heads // x.tp
        chunks = self.chunks(run) * self.sequences(run)
        at_once = min(chunks, max(1, BLOCK[x.gpu] // (heads * length**2)))
        channels = self.outputs // x.tp
        decays = (3 * heads + 2 * self.groups // x.tp) * length**2
        states = chunks * self.state // x.tp
        inputs = x.tokens * self.channels // x.tp * x.width
        return int(inputs + FP32 * (at_once * (decays + 5 * length * channels) + states))
