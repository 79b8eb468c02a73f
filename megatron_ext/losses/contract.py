"""The loss contract: what every loss function of a run must return.

A loss returns ``(sum, count, report)``: the sum of its token losses, the integer number of targets,
and log entries. The training step divides by the count. megatron-core's schedules also accept two
values or a fractional count, but then crash or silently compute wrong gradients; `call_loss`
refuses both. `weighted_token_loss` turns per-token losses into a result that obeys the contract.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.auxiliary_loss import MTPTargets

Report = Mapping[str, Tensor]
LossFunction = Callable[..., tuple[Tensor, Tensor, Report]]
"""A function from the last stage's output to the sum of losses, number of targets, and log entries.

With ``non_loss_data=True`` it returns data for `Task.process_non_loss_data` instead, if the task
collects such data.
"""


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step's targets over all micro-batches, data- and context-parallel ranks.

    Attributes:
        main: scalar, number N of the main loss's targets. The step divides its gradients by N.
        weight: scalar float32, sum of these targets' weights; equal to N if all weights are 0 or 1.
        mtp: ``[K]`` float32, sum of the weights of each of K multi-token-prediction depths.
        num_microbatches: micro-batches of the step on each data-parallel rank.
    """

    main: Tensor
    weight: Tensor
    mtp: Tensor
    num_microbatches: int


def pair(total: Tensor, count: Tensor) -> Tensor:
    """Return a log entry of a report, a new float32 tensor ``[sum, count]`` without gradient."""
    return torch.stack([total.detach().float().clone(), count.detach().float().clone()])


def call_loss(loss: LossFunction, output: Tensor, *, non_loss_data: bool = False) -> Any:
    """Call a loss, check its result, and return ``(sum, count, report)``.

    With ``non_loss_data`` return instead, unchecked, what the loss collects for
    `Task.process_non_loss_data`: the result of ``loss(output, non_loss_data=True)``.

    Raises:
        ConfigError: the result breaks the contract (see the module), or ``non_loss_data`` is set
            but the loss has no such argument.
    """
    if non_loss_data:
        return non_loss_data_of(loss, output)
    result = loss(output)
    if not isinstance(result, tuple) or len(result) != 3:
        size = len(result) if isinstance(result, tuple) else 1
        raise ConfigError(
            f"The loss `{_name(loss)}` returned {size} value(s), but a loss must return three: "
            "(sum, count, report); return the sum over tokens and let the step divide."
        )
    total, count, report = result
    if not isinstance(count, Tensor) or count.is_floating_point():
        raise ConfigError(
            f"The loss `{_name(loss)}` returned a count of type "
            f"{getattr(count, 'dtype', type(count))}, but the count must be an "
            "integer tensor; put fractional weights into the sum."
        )
    for key, value in report.items():
        if value.numel() != 2:
            raise ConfigError(
                f"The loss `{_name(loss)}` reports `{key}` with {value.numel()} value(s), but "
                "an entry must be [sum, count]; use `losses.contract.pair`."
            )
    return total, count, {key: value.detach().clone() for key, value in report.items()}


def checked(loss: LossFunction) -> LossFunction:
    """Wrap a loss function for megatron-core, so that it is called through `call_loss`."""
    return functools.partial(call_loss, loss)


def non_loss_data_of(loss: LossFunction, output: Tensor) -> Any:
    """Return ``loss(output, non_loss_data=True)``, the data for `Task.process_non_loss_data`.

    Raises:
        ConfigError: the loss has no argument ``non_loss_data``.
    """
    parameters = inspect.signature(loss).parameters.values()
    if not any(p.name == "non_loss_data" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"The loss `{_name(loss)}` has no argument `non_loss_data`, with which it is to return "
            "what the task's `process_non_loss_data` takes; add `non_loss_data=False`."
        )
    return loss(output, non_loss_data=True)


def _name(loss: LossFunction) -> str:
    """Return the name of a loss for an error message; for a partial, its function's name.

    The repr of a partial would print its tensors, which waits for the GPU.
    """
    loss = inspect.unwrap(loss)
    function = getattr(loss, "func", loss)
    return str(getattr(function, "__name__", type(function).__name__))


def share_of_step(
    weights: Tensor,
    counts: StepCounts | None,
    *,
    per_token: bool,
    usual_weight: Tensor | None = None,
) -> Tensor | float:
    """Return the factor by which to multiply a micro-batch's weighted sum of token losses.

    The step divides its gradients by the number of targets N, but the weighted sum should be
    divided by the sum D of the token weights. So the factor is N / D, which is 1 if all weights are
    0 or 1.

    Args:
        weights: token weights of this micro-batch, ``[b, s/cp]``.
        counts: the counts of the whole step; None (in evaluation) gives the factor 1.
        per_token: whether the loss is one mean over the step's tokens, with N and D of the whole
            step. Otherwise it is a mean of micro-batch means, with N and D of ``weights``.
        usual_weight: replaces D if ``per_token`` is False: the mean of the sums of weights of the
            micro-batch's context-parallel ranks. With this common D, the mean of the ranks' losses
            is the weighted mean over the whole micro-batch.
    """
    if counts is None:
        return 1.0
    if per_token:
        return counts.main / counts.weight.clamp(min=1e-30)
    weight = weights.sum() if usual_weight is None else usual_weight
    return torch.count_nonzero(weights) / weight.clamp(min=1e-30)


def weighted_token_loss(
    losses: Tensor,
    *,
    weights: Tensor,
    share: Tensor | float = 1.0,
    mtp_targets: MTPTargets | None = None,
) -> tuple[Tensor, Tensor, Report]:
    """Return the weighted sum of per-token losses, the number of targets, and what to log.

    Losses and weights are ``[b, s]``; a weight is 0 where there is no target. ``share`` (from
    `share_of_step`) multiplies the returned sum, but not the logged one. The losses of
    multi-token prediction that the forward pass has stored in ``mtp_targets`` are logged as well.
    """
    weights = weights.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * weights)
    report = {"lm loss": pair(total, weights.sum()), **mtp_report(mtp_targets)}
    return total * share, number_of_targets(weights), report


def number_of_targets(weights: Tensor) -> Tensor:
    """Return the number of tokens with nonzero weight, an integer scalar."""
    return torch.count_nonzero(weights).int()


def mtp_report(targets: MTPTargets | None) -> Report:
    """Return the log entries of the multi-token-prediction depths; empty if ``targets`` is None."""
    entries = () if targets is None else targets.reports
    return {f"mtp_{depth} loss": entry for depth, entry in enumerate(entries, start=1)}
