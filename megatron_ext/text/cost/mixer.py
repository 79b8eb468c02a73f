"""The cost of a sequence mixer other than attention: the base class `Mixer`.

The subclass of a mixer is in a file of its own, which only runs with such layers import.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.config.layers import ATTENTION, mixer_of
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.products import Linear
from megatron_ext.planning.stages import LayerBytes
from megatron_ext.text.config.hybrid import depth_kind, layer_kinds

if TYPE_CHECKING:
    from megatron_ext.planning.kernels import Phase
    from megatron_ext.planning.weights import Weight

Run = Any
"""A `text.cost.network.GptNetwork`, whose classes import this module."""

CLASSES = {
    "M": "mamba:Mamba",
    "G": "delta:GatedDeltaNet",
    "K": "delta:KimiDelta",
    "D": "sparse:SparseAttention",
}
"""The module and the class of each mixer, by its letter (see `config.layers`)."""


def mixers_of(config: RunConfig) -> dict[str, Mixer]:
    """Return the sequence mixers of a model other than attention, by their letters."""
    kinds = {*layer_kinds(config), depth_kind(config)}
    letters = {mixer_of(kind) for kind in kinds} - {ATTENTION, ""}
    found: dict[str, Mixer] = {}
    for letter in sorted(letters):
        module, _, name = CLASSES[letter].partition(":")
        kind = getattr(importlib.import_module(f"megatron_ext.text.cost.{module}"), name)
        found[letter] = kind.of(config)
    return found


class Mixer(ABC):
    """The cost of the sequence mixer of a layer, from the sizes in a configuration.

    Numbers of elements and bytes are those of one rank and one micro-batch.

    Attributes:
        attends: whether it is attention whose core can be recomputed by itself.
    """

    attends: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, config: RunConfig) -> Mixer:
        """Return the mixer of a resolved configuration."""

    @abstractmethod
    def matrices(self, tp: int) -> list[Linear]:
        """Return its linear layers on ``tp`` tensor-parallel ranks, in the module's order."""

    @property
    def products(self) -> int:
        """Return the multiplications per token of its linear layers."""
        return sum(linear.products for linear in self.matrices(1))

    @property
    @abstractmethod
    def mixing(self) -> int:
        """Return the multiplications per token of its other products, as Megatron-LM counts."""

    @abstractmethod
    def weights(self, run: Run, name: str) -> list[Weight]:
        """Return its parameters in the module's order; ``name`` is the module's path."""

    @abstractmethod
    def inputs(self, run: Run) -> dict[str, int]:
        """Return the number of elements in the inputs of its linear layers, by their names.

        Layers with one input count it once. An input that autograd keeps for another operation,
        too, is left out.
        """

    def deferred(self, run: Run) -> int:
        """Return the elements in the inputs and outputs of its linear layers.

        A zero-bubble schedule keeps the inputs and the gradients of the outputs.
        """
        x = run.sizes
        total = sum(self.inputs(run).values())
        for linear in self.matrices(x.tp):
            summed = linear.columns > 1 or not linear.is_split
            total += (x.residual_tokens if summed else x.tokens) * linear.outputs // linear.rows
        return total

    @abstractmethod
    def kept(self, run: Run) -> LayerBytes:
        """Return the memory between the normalized input, which is left out, and the output."""

    def gathers(self, run: Run) -> float:
        """Return the bytes that a rank sends to gather the input over tensor-parallel ranks."""
        return float(run.gather())

    @abstractmethod
    def context(self, run: Run) -> float:
        """Return the bytes that a rank sends for context parallelism in the forward pass."""

    @abstractmethod
    def kernels(self, run: Run) -> dict[tuple[str, Phase], int]:
        """Return the number of its GPU kernels by class and phase, without norm and addition."""

    @abstractmethod
    def moved(self, run: Run) -> tuple[float, float]:
        """Return the bytes that its pointwise kernels read and write, forward and backward."""

    def chunk_flops(self, run: Run) -> float:
        """Return the operations of the forward pass on a rank that `mixing` does not count."""
        return 0.0

    def hosted(self, run: Run, part: str) -> tuple[int, int]:
        """Return the bytes that a part of ``--offload-modules`` moves: at least, and at most."""
        return 0, 0

    def described(self, run: Run) -> dict[str, float | None]:
        """Return the bytes of its "state" of a sequence and the positions of its "chunk".

        Both are for a plan, and left out by a mixer without them.
        """
        return {}
