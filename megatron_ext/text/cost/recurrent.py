"""Counts what recurrent sequence mixers share: convolution, chunks, states and messages.

A mixer of `layers.mixers` computes its recurrence in chunks of the sequence: products of matrices
within a chunk, and states where chunks meet. The formulas are those of its torch form, which keeps
more than Triton kernels that may take its place on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from megatron_ext.planning.kernels import Phase
from megatron_ext.planning.products import MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import FP32, LayerBytes, in_order
from megatron_ext.planning.weights import Weight
from megatron_ext.text.cost.mixer import Mixer, Run

SLICES = 2
"""Slices of a sequence that a context-parallel rank holds."""


@dataclass(frozen=True)
class Pace:
    """The kernels of a mixer's torch form on a GPU, without those of its linear layers.

    Attributes:
        kernels: by class and phase, how many there are once, and how many for each chunk, which are
            computed one after the other.
        moved: bytes that pointwise kernels read and write in the forward and in the backward pass,
            per byte that is kept: nothing is compiled, and the backward pass computes the chunks
            again.
    """

    kernels: dict[tuple[str, Phase], tuple[float, float]]
    moved: tuple[float, float]

    @classmethod
    def of(
        cls,
        products: tuple[tuple[float, float], tuple[float, float]],
        pointwise: tuple[tuple[float, float], tuple[float, float]],
        moved: tuple[float, float],
    ) -> Pace:
        """Return the pace from kernels of products and others, each forward and backward."""
        classes = {"attention": products, "pointwise": pointwise}
        phases = Phase.FORWARD, Phase.INPUT
        kernels = {
            (name, phase): count
            for name, counts in classes.items()
            for phase, count in zip(phases, counts, strict=True)
        }
        return cls(kernels, moved)


@dataclass(frozen=True)
class Recurrent(Mixer):
    """A mixer whose positions hand a state on, after a short convolution of its inputs.

    Attributes:
        h: channels of the hidden state.
        taps: positions that the convolution sees.
        heads: number of heads that have a state.
        channels: number of channels that are convolved.
        outputs: channels of all heads' outputs.
        state: elements of the states of all heads, for one sequence.
        transition: elements of what a slice of a sequence multiplies these states by.
    """

    h: int
    taps: int
    heads: int
    channels: int
    outputs: int
    state: int
    transition: int

    @abstractmethod
    def chunk(self, run: Run) -> int:
        """Return the number of positions of a chunk."""

    @abstractmethod
    def chunked(self, run: Run) -> float:
        """Return the multiplications per token of chunks in the forward pass, in all heads."""

    @abstractmethod
    def recurrence(self, run: Run) -> int:
        """Return the bytes kept from the convolved channels to the heads' outputs."""

    @abstractmethod
    def gated(self, run: Run) -> int:
        """Return the bytes kept from the heads' outputs to the input of the last projection."""

    @abstractmethod
    def working(self, run: Run) -> int:
        """Return the bytes that the backward pass of the recurrence needs beside what is kept.

        They are those of some chunks, which are computed at a time, and the gradients of inputs.
        """

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """Return the kernels of its torch form."""

    def matrices(self, tp: int) -> list[Linear]:
        """Return its linear layers: the last projection comes first."""
        return [Linear("out_proj", self.h, self.outputs, columns=tp, bias=False)]

    def split(self, run: Run, name: str, numel: int) -> Weight:
        """Return a parameter of ``numel`` elements, whose heads tensor parallelism splits."""
        return Weight(name, numel // run.sizes.tp, run.sizes.tp)

    def length(self, run: Run) -> int:
        """Return the number of positions of a sequence, or of a slice of it, on a rank."""
        x = run.sizes
        return int(x.s // (SLICES * x.cp) if x.cp > 1 else x.s)

    def sequences(self, run: Run) -> int:
        """Return the number of sequences, or slices of them, on a rank."""
        x = run.sizes
        return int(SLICES * x.b if x.cp > 1 else x.b)

    def chunks(self, run: Run) -> int:
        """Return the number of chunks of a sequence, or of a slice of it, on a rank."""
        return -(-self.length(run) // self.chunk(run))

    def inputs(self, run: Run) -> dict[str, int]:
        x = run.sizes
        return {
            "in_proj": x.residual_tokens * x.h,
            "out_proj": x.tokens * self.outputs // x.tp,
        }

    def kept(self, run: Run) -> LayerBytes:
        x = run.sizes
        out = x.tokens * self.outputs // x.tp
        convolved = x.tokens * self.channels // x.tp
        rows = max(linear.outputs // linear.rows for linear in self.matrices(x.tp))
        # Going back, the gradients of what is projected stand beside those of the convolution.
        first = x.tokens * rows * x.width + convolved * FP32
        return in_order(
            LayerBytes(self.convolution(run), max(first, rows * self.h * x.width)),
            LayerBytes(
                self.recurrence(run) + self.passed(run),
                # Beside it, there are gradients of the outputs and of their gates.
                self.working(run) + out * (x.width + FP32),
            ),
            LayerBytes(self.gated(run), 2 * out * FP32),
            LayerBytes(out * x.width, out * x.width),
        )

    def convolution(self, run: Run) -> int:
        """Return the bytes that the convolution and the SiLU after it keep, without its result.

        To train its weight, the convolution keeps its inputs in float32, with those before the
        first position, and copies of them without the inputs of other documents. SiLU keeps its
        own input.
        """
        x = run.sizes
        wide = self.channels // x.tp * FP32
        kept = 0
        if run.trains:
            kept += (x.tokens + (self.taps - 1) * self.sequences(run)) * wide
            if run.config.model.document_masks:
                kept += (self.taps - 1) * x.tokens * wide
        return int(kept + x.tokens * self.channels // x.tp * x.width)

    def passed(self, run: Run) -> int:
        """Return the bytes kept of the states that slices of a sequence hand on.

        The rank with the last slice computes the states of all slices before it.
        """
        x = run.sizes
        if x.cp == 1:
            return 0
        slices = SLICES * x.cp - 1
        elements = slices * self.state + (slices - 1) * self.transition
        return int(x.b * elements // x.tp * FP32)

    def context(self, run: Run) -> float:
        x = run.sizes
        state = (self.state + self.transition) // x.tp * FP32
        before = (self.taps - 1) * self.channels // x.tp * x.width
        return float((x.cp - 1) * self.sequences(run) * (state + before))

    def chunk_flops(self, run: Run) -> float:
        more = self.chunked(run) - self.mixing
        return float(max(0.0, MULTIPLY_AND_ADD * more * run.sizes.tokens / run.sizes.tp))

    def moved(self, run: Run) -> tuple[float, float]:
        kept = self.kept(run).kept
        forward, backward = self.pace.moved
        return forward * kept, backward * kept

    def kernels(self, run: Run) -> dict[tuple[str, Phase], int]:
        linears = len(self.matrices(1))
        chunks = self.chunks(run)
        # The summary of a slice goes through the chunks, too.
        passes = 2 if run.sizes.cp > 1 else 1
        pace = self.pace
        counted = {
            which: round(once + passes * per_chunk * chunks)
            for which, (once, per_chunk) in pace.kernels.items()
        }
        return {
            ("linear", Phase.FORWARD): linears,
            ("linear", Phase.INPUT): linears,
            ("linear", Phase.WEIGHT): linears,
            **counted,
        }

    def described(self, run: Run) -> dict[str, float | None]:
        return {
            "state": self.state // run.sizes.tp * FP32,
            "chunk": self.chunk(run),
        }


def normed(run: Run, rows: int, size: int) -> int:
    """Return the bytes that a norm of ``[rows, size]`` in float32 keeps, with its input.

    To train its weight, a CPU keeps what is multiplied by it, too.
    """
    trained = run.updates("decoder.layers.0.self_attention.out_norm.weight")
    return FP32 * rows * (size + 1 + (size if trained and not run.sizes.gpu else 0))
