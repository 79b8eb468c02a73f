"""One optimizer update that a non-finite gradient cannot spoil.

megatron-core checks for infinities only under fp16; in bf16 and fp32 one NaN would turn every
weight into NaN. Here the global gradient norm, which all model-parallel ranks agree on, decides.

A skipped step uses up its samples and counts as an iteration, but the learning rate stays where it
is: like Megatron-LM, the schedule counts updates only, so that no part of a warm-up is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    grad_norm = global_grad_norm(optimizer)
    if not math.isfinite(grad_norm):
        return UpdateResult(applied=False, grad_norm=grad_norm, num_zeros=None)
    if clip_grad > 0.0:
        _clip(optimizer, clip_grad, grad_norm)
    num_zeros = None
    if optimizer.config.log_num_zeros_in_grad:
        num_zeros = float(optimizer.count_zeros())
    applied = bool(optimizer.step_with_ready_grads())
    return UpdateResult(applied, grad_norm, num_zeros)


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers of a chain: one for the dense parameters, one for the experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def global_grad_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of all gradients, each counted once; all ranks call this together.

    Squares are summed in short pieces, and the pieces in double precision. All in single precision,
    as megatron-core sums them, the result depends on how the ranks cut the gradients: 2e-6 between
    one and eight ranks for a model of 0.4 million parameters.
    """
    squares = []
    for part in parts_of(optimizer):
        grads = part.get_main_grads_for_grad_norm()
        device = grads[0].device if grads else torch.device("cuda", torch.cuda.current_device())
        square = torch.zeros((), dtype=torch.float64, device=device)
        for grad in grads:
            square += _square(grad)
        torch.distributed.all_reduce(square, group=part.get_grad_stats_parallel_group())
        squares.append(square)
    # The only place of a step that waits for the device, once for all parts.
    return math.sqrt(float(sum(squares)))


def _square(grad: torch.Tensor, piece: int = 1024) -> torch.Tensor:
    """Sum of squares, exact to about 1e-9: short pieces in single precision, their sum in double.

    Three times faster on a CPU than converting the gradient to double precision.
    """
    flat = grad.reshape(-1)
    whole = flat.numel() // piece * piece
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, piece), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    total: torch.Tensor = norms.double().square().sum() + rest.double().square()
    return total


def _clip(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    for part in parts_of(optimizer):
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
