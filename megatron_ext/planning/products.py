"""The linear layers of a model, and the operations of products with their weights."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPLY_AND_ADD = 2
"""Floating-point operations of one multiply-add."""

FORWARD_AND_BACKWARD = 3
"""Matrix products in training per forward product: itself, and one for each factor's gradient."""


@dataclass(frozen=True)
class Linear:
    """A linear layer sharded over ranks, with an optional bias.

    Attributes:
        outputs, inputs: features of the whole layer.
        rows, columns: numbers of ranks over which its outputs and its inputs are sharded.
        copies: number of ranks that each hold another layer of this kind: the expert-parallel size
            for experts, else 1.
        expert: whether it belongs to experts.
        gated: whether the outputs are a gate and what it multiplies.
    """

    name: str
    outputs: int
    inputs: int
    rows: int = 1
    columns: int = 1
    bias: bool = True
    copies: int = 1
    expert: bool = False
    gated: bool = False

    @property
    def is_split(self) -> bool:
        """Return whether its outputs or its inputs are sharded."""
        return self.rows * self.columns > 1

    @property
    def products(self) -> int:
        """Return the multiplications per token in the whole layer, on all ranks together."""
        return self.outputs * self.inputs
