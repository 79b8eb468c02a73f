"""RMSNorm of queries and keys over the full width of all heads, whose heads are dealt to ranks.

``y = x / sqrt(mean(x^2) + eps) * weight`` with the mean over all h features (arXiv:1910.07467), so
that its sum of squares is summed over the tensor-parallel ranks. The sum enters the outputs of all
of them, so its gradient is summed as well.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.models.compiled import compiled


class FullWidthRMSNorm(MegatronModule):  # type: ignore[misc]
    """The scales of this rank's heads, ``[h / tp]``; cut, so their gradients need no reduction.

    Args:
        config: of the run.
        tp_group: ranks among which the heads are dealt.
    """

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.width = config.hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // tp_group.size()))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Norm.

        Args:
            x: ``[s, b, n, d]`` of this rank's heads; None gives the scales, for functions that norm
                by themselves, once data parallelism has gathered them.
            bias: to be added to it before, ``[n * d]``.

        Returns:
            As ``x``.
        """
        if x is None:
            return self.weight
        eps = self.config.layernorm_epsilon
        if self.tp_group.size() == 1:
            return _whole_norm(x, bias, self.weight, self.width, eps)
        total = summed(_squares(x, bias), self.tp_group)
        return _scaled(x, bias, total, self.weight, self.width, eps)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The shard of the scales."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return state


def squares(x: Tensor) -> Tensor:
    """Sums of squares of ``[..., n, d]`` in at least float32, ``[...]``."""
    return x.to(_exact(x)).square().sum(dim=(-2, -1))


def scaled(x: Tensor, total: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
    """Norm ``[..., n, d]`` by the sums of squares of all ranks' ``width`` features, ``[...]``."""
    scale = torch.rsqrt(total / width + eps)
    return (x.to(_exact(x)) * scale[..., None, None]).to(x.dtype) * weight.view(x.shape[-2:])


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@compiled
def _whole_norm(x: Tensor, bias: Tensor | None, weight: Tensor, width: int, eps: float) -> Tensor:
    whole = _with_bias(x, bias)
    return scaled(whole, squares(whole), weight, width, eps)


@compiled
def _squares(x: Tensor, bias: Tensor | None) -> Tensor:
    return squares(_with_bias(x, bias))


@compiled
def _scaled(
    x: Tensor, bias: Tensor | None, total: Tensor, weight: Tensor, width: int, eps: float
) -> Tensor:
    return scaled(_with_bias(x, bias), total, weight, width, eps)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.view(x.shape[-2:])


def summed(sums: Tensor, group: ProcessGroup) -> Tensor:
    """Sums of squares over the ranks; they enter the outputs of all, and so do their gradients."""
    total: Tensor = copy_to_tensor_model_parallel_region(
        reduce_from_tensor_model_parallel_region(sums, group=group), group=group
    )
    return total
