"""RMSNorm of queries and keys over the full width of all heads, whose heads are dealt to ranks.

``y = x / sqrt(mean(x^2) + eps) * weight`` with the mean over all h features (arXiv:1910.07467), so
that its sum of squares is summed over the tensor-parallel ranks. The sum enters the outputs of all
of them, so its gradient is summed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, n, d]`` of this rank's heads, to the same in the dtype of ``x``."""
        return normalized([x], [self])[0]

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


def normalized(tensors: Sequence[Tensor], norms: Sequence[FullWidthRMSNorm]) -> list[Tensor]:
    """Norms of several tensors of one shape, with one reduction for all of them.

    Args:
        tensors: each ``[s, b, n, d]``, this rank's heads.
        norms: one for each.
    """
    exact = torch.promote_types(tensors[0].dtype, torch.float32)
    wide = [x.to(exact) for x in tensors]
    squares = torch.stack([x.square().sum(dim=(-2, -1)) for x in wide])
    group = norms[0].tp_group
    total = copy_to_tensor_model_parallel_region(
        reduce_from_tensor_model_parallel_region(squares, group=group), group=group
    )
    scales = torch.rsqrt(total / norms[0].width + norms[0].config.layernorm_epsilon)
    return [
        (x * scale[..., None, None]).to(given.dtype) * norm.weight.view(x.shape[-2:])
        for x, given, scale, norm in zip(wide, tensors, scales, norms, strict=True)
    ]
