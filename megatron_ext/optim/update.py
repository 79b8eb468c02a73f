"""An optimizer update that is skipped if a gradient is not finite.

The test uses the global gradient norm, which is the same on all model-parallel ranks; megatron-core
checks for infinities only under fp16. With a fused Adam (torch's or `FusedAdam`) the device decides
whether to skip, and the host reads this later. A skipped step consumes its samples and counts as
an iteration, but does not advance the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext import core
from megatron_ext.device.streams import HostCopy
from megatron_ext.optim.adam import ADAMS, Custom


class UpdateResult:
    """The result of an optimizer update, in scalar tensors on the device that the host reads later.

    The first read of `applied`, `grad_norm` or `num_zeros` waits for this update, but not for work
    launched after it.

    Attributes:
        flag: bool ``[]`` on the device; the host reads it as `applied`.
        norm: float64 ``[]`` on the device; the host reads it as `grad_norm`.
        zeros: float64 ``[]`` on the device, None if not counted; the host reads it as `num_zeros`.
        sizes: one tensor ``[n]`` for each optimizer in a chain from which this rank contributes
            gradients to the norm, with a size for each of these n gradients. A size is the sum of
            squares on a CPU, and the norm on a GPU; it is not finite if the gradient is not.
    """

    sizes: Sequence[Tensor] = ()

    def __init__(self, flag: Tensor, norm: Tensor, zeros: Tensor | None = None) -> None:
        self.flag = flag
        self.norm = norm
        self.zeros = zeros
        numbers = [flag.type_as(norm), norm, *([] if zeros is None else [zeros])]
        self._copy = HostCopy(torch.stack(numbers))

    @cached_property
    def _numbers(self) -> list[float]:
        return self._copy.read()

    @property
    def is_read(self) -> bool:
        """Return whether the host has already read the result."""
        return "_numbers" in self.__dict__

    @property
    def applied(self) -> bool:
        """Return whether the weights were updated; False if the step was skipped."""
        return bool(self._numbers[0])

    @property
    def grad_norm(self) -> float:
        """Return the global L2 norm of the gradients before clipping.

        It may be infinite or NaN if the step was skipped.
        """
        return self._numbers[1]

    @property
    def num_zeros(self) -> float | None:
        """Return the number of zero gradients; None if not counted or if the step was skipped."""
        return self._numbers[2] if self.zeros is not None and self.applied else None


@torch.no_grad()
def update_parameters(
    optimizer: MegatronOptimizer,
    clip_grad: float,
    gradient_scale: Tensor | None = None,
    approve: Callable[[Tensor], Tensor] | None = None,
) -> UpdateResult:
    """Clip and apply the gradients of all chunks, or skip the step if their norm is not finite.

    The gradients must have been reduced over the data-parallel ranks.

    Args:
        clip_grad: the largest allowed global norm; 0 switches clipping off.
        gradient_scale: factor ``[]`` of all gradients; None for 1. Norm and update use the scaled
            gradients, but these are not stored. Give it only if `all_decide_on_device`.
        approve: takes the norm and returns whether the update may be applied, bool ``[]``; None
            allows every update. It is called in every step on all ranks, before anything changes,
            so it may communicate.
    """
    # This unscales fp16 gradients, and says whether they overflowed.
    if optimizer.prepare_grads():
        _share_loss_scale(optimizer)
        norm = torch.tensor(math.inf, dtype=torch.float64, device=torch.cuda.current_device())
        if approve is not None:
            # It may communicate, so all ranks call it even if the step is skipped anyway.
            approve(norm)
        overflow = UpdateResult(torch.isfinite(norm), norm)
        assert not overflow.applied
        return overflow
    sizes: list[Tensor] = []
    norm = global_grad_norm(optimizer, sizes)
    if gradient_scale is not None:
        norm = norm * gradient_scale
    zeros = count_zeros(optimizer) if optimizer.config.log_num_zeros_in_grad else None
    finite = torch.isfinite(norm)
    update = UpdateResult(finite if approve is None else finite & approve(norm), norm, zeros)
    update.sizes = sizes
    if decides_on_device(optimizer):
        _update_where_finite(optimizer, update, clip_grad, gradient_scale)
    elif update.applied:
        if clip_grad > 0.0:
            for part in _with_parameters(optimizer):
                exact = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                if own := part.get_parameters():
                    norms = clip_grad, update.grad_norm
                    clip_grad_by_total_norm_fp32(own, *norms, use_decoupled_grad=exact)
        optimizer.step_with_ready_grads()
    return update


def _share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Copy the loss scale of an optimizer whose gradients overflowed to all others of its chain.

    megatron-core would lower the scale of that optimizer only, but it multiplies the loss by the
    scale of the first optimizer.
    """
    parts = [part for part in parts_of(optimizer) if getattr(part, "grad_scaler", None)]
    scales = [p.grad_scaler.state_dict() for p in parts if p.found_inf.item() > 0]
    for part in parts if scales else ():
        part.grad_scaler.load_state_dict(scales[0])


def decides_on_device(optimizer: MegatronOptimizer) -> bool:
    """Return whether the device, not the host, decides to skip an update, as with a fused Adam."""
    return all(
        not getattr(part.optimizer, "host_decides", False)
        and isinstance(part.optimizer, ADAMS)
        and not isinstance(part.optimizer, Custom)
        and all(group["fused"] for group in part.optimizer.param_groups)
        for part in _with_parameters(optimizer)
    )


def all_decide_on_device(optimizer: MegatronOptimizer) -> bool:
    """Return whether `decides_on_device` holds on every rank; all ranks call this together.

    A rank without trained parameters counts as deciding on its device.
    """
    answer = torch.tensor(int(decides_on_device(optimizer)), device=torch.cuda.current_device())
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
    return bool(answer)


def _update_where_finite(
    optimizer: MegatronOptimizer,
    update: UpdateResult,
    clip_grad: float,
    gradient_scale: Tensor | None,
) -> None:
    """Let a fused kernel scale, clip and apply the gradients, or skip the update.

    ``update`` holds the norm, and the flag that says whether to apply the gradients. For the other
    arguments see `update_parameters`. As under torch's GradScaler, the kernel reads two attributes
    of the optimizer: ``grad_scale``, the divisor of the gradients, and ``found_inf``, 1 to skip.
    """
    inner = [part.optimizer for part in _with_parameters(optimizer)]
    divisor = None
    if clip_grad > 0.0:
        # The 1e-6 is torch's; the clamp keeps a norm below the limit from being raised.
        divisor = ((update.norm + 1e-6) / clip_grad).clamp(min=1.0)
    if gradient_scale is not None:
        divisor = (1.0 if divisor is None else divisor) / gradient_scale.double()
    for each in inner:
        each.found_inf = update.flag.logical_not().float()
        each.grad_scale = None if divisor is None else divisor.float()
    if inner and all(getattr(each, "make_kernel", None) is not None for each in inner):
        for each in inner:
            each.step()
        _gather_weights(optimizer)
    else:
        optimizer.step_with_ready_grads()
    for each in inner:
        del each.found_inf, each.grad_scale


def _gather_weights(optimizer: MegatronOptimizer) -> None:
    """Gather the updated 16-bit weights over the data-parallel ranks.

    Do nothing under ``--overlap-param-gather``, where the forward pass gathers. This is for updates
    that bypass megatron-core's `step_with_ready_grads`, which would gather the weights itself.
    """
    distributed = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
    for chunk in dict.fromkeys(chunk for part in distributed for chunk in part.model_chunks):
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


def _with_parameters(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers inside a chained optimizer that have parameters."""
    return [x for x in parts_of(optimizer) if not getattr(x, "is_stub_optimizer", False)]


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers inside a chained optimizer; for any other or None, ``[optimizer]``."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def global_grad_norm(optimizer: MegatronOptimizer, sizes: list[Tensor] | None = None) -> Tensor:
    """Return the L2 norm of all gradients, float64 ``[]``; all ranks call this together.

    Each gradient counts once, even if several ranks hold a copy, such as those of norm layers under
    tensor parallelism. But if any copy is not finite, neither is the result. The ranks' sums of
    squares are added in double precision.

    Args:
        sizes: a list to which this rank's `UpdateResult.sizes` are appended, if they are wanted.
    """

    def sum_of_squares(grads: list[Tensor]) -> Tensor:
        own_sizes = _sizes(grads)
        if sizes is not None:
            sizes.append(own_sizes)
        return _sum_of_squares(own_sizes)

    return _over_ranks(optimizer, sum_of_squares, _nothing_if_finite).sqrt()


def _nothing_if_finite(part: MegatronOptimizer, counted: list[Tensor]) -> Tensor | float:
    """Return 0 if the gradients of ``part`` on this rank outside ``counted`` are finite, else NaN.

    Other ranks count those gradients in the norm. This rank adds the result to its own sum, which
    becomes NaN if its copy of such a gradient is damaged. The result is float64 ``[]``, or the
    number 0.0 if there are no such gradients.
    """
    ids = {id(grad) for grad in counted}
    gradients = [
        grad
        for parameter in part.get_parameters()
        for name in ("grad", "decoupled_grad")
        if (grad := getattr(parameter, name, None)) is not None and id(grad) not in ids
    ]
    return _sizes(gradients).double().sum() * 0.0 if gradients else 0.0


def count_zeros(optimizer: MegatronOptimizer) -> Tensor:
    """Return the number of zeros in all gradients, float64 ``[]``; all ranks call this together.

    Each gradient counts once, even if several ranks hold a copy.
    """

    def zeros(grads: list[Tensor]) -> Tensor:
        return torch.stack([grad.numel() - torch.count_nonzero(grad) for grad in grads]).sum()

    return _over_ranks(optimizer, zeros)


def _over_ranks(
    optimizer: MegatronOptimizer,
    statistic: Callable[[list[Tensor]], Tensor],
    uncounted: Callable[[MegatronOptimizer, list[Tensor]], Tensor | float] | None = None,
) -> Tensor:
    """Return the sum of a statistic of the gradients over all optimizers and ranks, float64 ``[]``.

    If several ranks hold a copy of a gradient, only one of them counts it. All ranks call this
    together.

    Args:
        statistic: takes the gradients that this rank counts in one optimizer; returns their part of
            the sum.
        uncounted: takes an optimizer and the gradients that this rank counts in it; returns a term
            to add for the gradients that it does not count. None adds nothing.
    """
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for part in parts_of(optimizer):
        grads = core.gradients_for_norm(part)
        own = torch.zeros_like(total)
        if grads:
            own += statistic(grads)
        if uncounted is not None:
            own += uncounted(part, grads)
        torch.distributed.all_reduce(own, group=part.get_grad_stats_parallel_group())
        total += own
    return total


def _sizes(grads: list[Tensor]) -> Tensor:
    """Return a measure of each gradient's size, ``[n]``.

    On a CPU it is the sum of squares in float64, on a GPU the norm in float32.
    """
    if grads[0].is_cuda:
        return torch.stack(torch._foreach_norm(grads))
    return torch.stack([_square(grad) for grad in grads])


def _sum_of_squares(sizes: Tensor) -> Tensor:
    """Return the sum of squares of all gradients, float64 ``[]``.

    ``sizes`` is the result of `_sizes` for these gradients.
    """
    if sizes.is_cuda:
        total: Tensor = torch.linalg.vector_norm(sizes)
        return total.double().square()
    return sum(sizes.unbind(0), sizes.new_zeros((), dtype=torch.float64))


def _square(grad: torch.Tensor, piece: int = 1024) -> torch.Tensor:
    """Return a gradient's sum of squares, float64, to a relative error of about 1e-9.

    Single precision is used only for sums over ``piece`` elements.
    """
    flat = grad.reshape(-1)
    whole = flat.numel() // piece * piece
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, piece), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    total: torch.Tensor = norms.double().square().sum() + rest.double().square()
    return total


class ParameterGather:
    """Removes the hooks of ``--overlap-param-gather``, and puts them back.

    With the hooks, the forward pass of a training step gathers the updated parameters. Whatever
    reads or changes parameters between steps, such as an evaluation or a snapshot, needs them
    gathered before. The hooks are also off in the first step: there is no update to gather yet, and
    a gather would spread an error in one rank's initial or loaded weights to all ranks.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        transformer_config: TransformerConfig,
        *,
        overlap: bool,
    ) -> None:
        self._chunks = chunks
        self._transformer_config = transformer_config
        self._sync_func = transformer_config.param_sync_func
        self._overlap = self._on = overlap

    def switch_off(self, *, gather: bool) -> None:
        """Remove the gather hooks; with ``gather``, gather the latest parameters now."""
        if self._on:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=gather)
            self._transformer_config.param_sync_func = None
            self._on = False

    def switch_on(self) -> None:
        """Put the gather hooks back, if the run uses ``--overlap-param-gather``."""
        if self._overlap and not self._on:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
            self._transformer_config.param_sync_func = self._sync_func
            self._on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gather the latest parameters, and keep the gather hooks off inside the block."""
        was_on = self._on
        self.switch_off(gather=True)
        try:
            yield
        finally:
            if was_on:
                self.switch_on()
