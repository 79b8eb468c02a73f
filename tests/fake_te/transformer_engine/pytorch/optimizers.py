"""Adam with the arguments of the fused one, and the functions of gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.record import record


class FusedAdam(torch.optim.AdamW):
    """AdamW by torch."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
    ) -> None:
        record("FusedAdam", adam_w_mode=adam_w_mode)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD(torch.optim.SGD):
    """SGD by torch."""


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Any], *args: Any
) -> Any:
    """Apply an operation to lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, tensor_lists: Sequence[Any], per_tensor: bool = False
) -> tuple[Tensor, None]:
    """Norm of all tensors together."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def multi_tensor_scale(
    chunk_size: int, noop: Tensor, tensor_lists: Sequence[Any], scale: float
) -> None:
    """Copy the first list, scaled, over the second."""
    for source, target in zip(tensor_lists[0], tensor_lists[1], strict=True):
        target.copy_(source * scale)
