"""Cross-entropy over all logits."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.record import record


def parallel_cross_entropy(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    record("parallel_cross_entropy", label_smoothing=label_smoothing, reduce_loss=reduce_loss)
    flat = torch.nn.functional.cross_entropy(
        _input.float().flatten(0, 1), target.flatten(), reduction="none"
    )
    return flat.view(target.shape)
