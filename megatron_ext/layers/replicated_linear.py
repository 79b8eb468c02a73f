"""A linear layer that is whole on every tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReplicatedLinear(torch.nn.Linear):
    """A torch.nn.Linear, whole on every tensor-parallel rank, that may hold an adapter.

    Each rank multiplies the rows that it holds, and parameters marked ``sequence_parallel`` have
    gradients of these rows alone.
    """

    communicates = False
    tp_group: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora: Any = None
        """Adapter, set by `layers.lora`; None without one."""

    @property
    def sequence_parallel(self) -> bool:
        """Return whether the ranks hold different rows."""
        return getattr(self.weight, "sequence_parallel", False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, changed by an adapter."""
        output = super().forward(input)
        return output if self.lora is None else self.lora(self, input, output)

    def without_adapter(self, x: Tensor) -> Tensor:
        """Return the output for ``x`` as it is without an adapter."""
        return super().forward(x)
