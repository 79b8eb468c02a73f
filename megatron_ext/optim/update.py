"""One optimizer update that a non-finite gradient cannot spoil.

megatron-core checks for infinities only under fp16; in bf16 and fp32 one NaN would turn every
weight into NaN. Here the global gradient norm, which all model-parallel ranks agree on, decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


@dataclass(frozen=True)
class UpdateResult:
    """What an update did.

    Attributes:
        applied: False when the step was skipped for a non-finite gradient.
        grad_norm: global L2 norm before clipping; NaN or infinite when the step was skipped.
        num_zeros: zeros in the gradient, where they are counted.
    """

    applied: bool
    grad_norm: float
    num_zeros: float | None


@torch.no_grad()
def update_parameters(optimizer: MegatronOptimizer, clip_grad: float) -> UpdateResult:
    """Clip and apply the gradients of all chunks, or skip the step.

    Args:
        optimizer: megatron-core's optimizer, its gradients reduced and normalized.
        clip_grad: largest allowed global norm; 0 switches clipping off.
    """
    found_inf = optimizer.prepare_grads()
    if found_inf:
        return UpdateResult(applied=False, grad_norm=math.inf, num_zeros=None)
    grad_norm = float(optimizer.get_grad_norm() or 0.0)
    if not math.isfinite(grad_norm):
        return UpdateResult(applied=False, grad_norm=grad_norm, num_zeros=None)
    if clip_grad > 0.0:
        _clip(optimizer, clip_grad, grad_norm)
    num_zeros = None
    if optimizer.config.log_num_zeros_in_grad:
        num_zeros = float(optimizer.count_zeros())
    applied = bool(optimizer.step_with_ready_grads())
    return UpdateResult(applied, grad_norm, num_zeros)


def _clip(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
