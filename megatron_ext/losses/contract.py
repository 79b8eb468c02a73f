"""The one loss contract: a loss returns ``(sum, count, report)`` and only one place divides.

megatron-core's schedules also take a pair of values and fractional counts, and then train with
silently wrong gradients or die; this contract refuses both where the loss is made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError

Report = Mapping[str, Tensor]
LossFunction = Callable[..., tuple[Tensor, Tensor, Report]]
"""Takes the output of the last stage, and ``non_loss_data=True`` where a task collects such."""


@dataclass(frozen=True)
class StepCounts:
    """Targets of one training step over all micro-batches, data- and context-parallel ranks.

    Attributes:
        main: number of main targets N, by which the step divides its gradients, scalar float32.
        weight: sum D of their weights, N where these are 0 or 1, scalar float32.
        mtp: sum of the weights of each multi-token-prediction depth, ``[K]`` float32.
        num_microbatches: of each data-parallel rank.
    """

    main: Tensor
    weight: Tensor
    mtp: Tensor
    num_microbatches: int


def pair(total: Tensor, count: Tensor) -> Tensor:
    """A report entry ``[sum, count]``, cut from the graph and from later in-place divisions."""
    return torch.stack([total.detach().float().clone(), count.detach().float().clone()])


def checked(loss: LossFunction) -> LossFunction:
    """Wrap a loss function so that a break of the contract is refused by name.

    Raises:
        ConfigError: not three values, a count that is not an integer tensor, or a report entry
            that is not ``[sum, count]``.
    """

    @functools.wraps(loss)
    def wrapper(output: Tensor, non_loss_data: bool = False) -> Any:
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

    return wrapper


def non_loss_data_of(loss: LossFunction, output: Tensor) -> Any:
    """Return what a loss gives with ``non_loss_data=True``.

    Raises:
        ConfigError: a loss without that argument.
    """
    parameters = inspect.signature(loss).parameters.values()
    if not any(p.name == "non_loss_data" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"The loss `{_name(loss)}` has no argument `non_loss_data`, with which it is to return "
            "what the task's `process_non_loss_data` takes; add `non_loss_data=False`."
        )
    return loss(output, non_loss_data=True)


def _name(loss: LossFunction) -> str:
    """What to call a loss in an error; a partial is called by its function.

    Only for errors: printing a partial prints its tensors, which on a GPU waits for them.
    """
    loss = inspect.unwrap(loss)
    function = getattr(loss, "func", loss)
    return str(getattr(function, "__name__", type(function).__name__))
