"""RMSNorm over the channels of all heads, of which each tensor-parallel rank holds some."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.initialization import device_of


def exact(x: Tensor) -> torch.dtype:
    """Return the dtype of ``x``, or float32 if that holds more."""
    return torch.promote_types(x.dtype, torch.float32)


def squares(x: Tensor) -> Tensor:
    """Return sums of squares over the last two axes of ``[..., n, d]``, in at least float32."""
    return x.to(exact(x)).square().sum(dim=(-2, -1))


def summed(sums: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce ``sums`` over ``group``; in the backward pass all-reduce the gradient too.

    Each rank uses the total for its own heads only, so the gradients of all ranks must be added.
    """
    total: Tensor = copy_to_tensor_model_parallel_region(
        reduce_from_tensor_model_parallel_region(sums, group=group), group=group
    )
    return total


class HeadsWeight:
    """Mixin of a module whose ``weight`` has one entry for each channel of this rank's heads."""

    weight: torch.nn.Parameter
    tp_group: ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state: the weight, split over the tensor-parallel ranks."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return state


class HeadsNorm(HeadsWeight, torch.nn.Module):
    """RMSNorm (arXiv:1910.07467) over the channels of all heads, of which each rank holds some.

    Args:
        heads: number of heads on all ranks together.
    """

    def __init__(self, config: TransformerConfig, heads: int, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.tp_group = tp_group
        self.count = heads * config.kv_channels
        device = device_of(config)
        fill = torch.zeros if self.zero_centered else torch.ones
        own = self.count // tp_group.size()
        self.weight = torch.nn.Parameter(fill(own, dtype=config.params_dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Return the normalized heads; they are ``[s, b, n, d]``, n of them on this rank."""
        x = heads.to(exact(heads))  # once, so that its gradients add up before they are rounded
        total = squares(x)
        if self.tp_group.size() > 1:
            total = summed(total, self.tp_group)
        scale = torch.rsqrt(total / self.count + self.eps)[..., None, None]
        gain = self.weight.to(x.dtype).view(heads.shape[-2:])
        if self.zero_centered:
            gain = gain + 1
        return (x * scale * gain).to(heads.dtype)
