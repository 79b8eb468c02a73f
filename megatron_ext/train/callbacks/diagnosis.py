"""Finds out on which ranks, and in which parameter first, a step went wrong, and announces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.disk.events import append_event
from megatron_ext.layers.chunks import named_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run

_AXES = {"dp": "data", "cp": "context", "tp": "tensor", "pp": "pipeline"}
_SHOWN = 16
"""Most ranks that a sentence lists."""


def places(ranks: Sequence[int], context: ParallelContext) -> str:
    """Return text such as "ranks 2, 3 (data 1, pipeline 0)": ranks and their common positions.

    Of more than `_SHOWN` ranks only the first are listed. A dimension is left out if its size is 1,
    or if the ranks differ in it.
    """
    positions = [context.layout.position(rank) for rank in ranks]
    sizes = context.layout.sizes()
    shared = [
        f"{word} {positions[0][axis]}"
        for axis, word in _AXES.items()
        if sizes[axis] > 1 and len({position[axis] for position in positions}) == 1
    ]
    listed = ", ".join(map(str, ranks[:_SHOWN]))
    if len(ranks) > _SHOWN:
        listed = f"{listed} and {len(ranks) - _SHOWN:,} more"
    where = f" ({', '.join(shared)})" if shared else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{where}"


def announce(run: Run, kind: str, sentence: str, **facts: Any) -> None:
    """Print ``sentence`` on the reporting rank, and append an event to the log in the save folder.

    Only the reporting rank does something, but other ranks may call this too. ``kind`` and
    ``facts`` are the kind and the fields of the event; see `disk.events`.
    """
    run.reporters.say(sentence)
    if run.context.is_reporting_rank:
        ranks = facts.get("ranks") or []
        rank = ranks[0] if len(ranks) == 1 else None
        append_event(run.config.checkpoint.save, kind, rank=rank, **facts)


@dataclass(frozen=True)
class NotFinite:
    """The losses and gradients of a step that are NaN or infinite on one rank.

    Attributes:
        num_parameters: number of parameters whose gradient is not finite.
        parameter: name of the first of them in the order of the model. It is None if there is none,
            or if another rank has observed this, and is not the one of which `everyones` tells it.
        loss: whether a loss of the rank's micro-batches is not finite.
    """

    rank: int
    num_parameters: int
    parameter: str | None
    loss: bool

    @classmethod
    def of(cls, rank: int, parameters: Sequence[str], *, loss: bool) -> NotFinite:
        """Return what a rank observed: the names of its bad parameters, and whether its loss is."""
        return cls(rank, len(parameters), parameters[0] if parameters else None, loss)


def not_finite_here(run: Run, losses: Sequence[Tensor]) -> NotFinite:
    """Find this rank's non-finite gradients of the last step, and its non-finite losses."""
    bad = [
        name
        for name, parameter in named_parameters(run.runner.trained_chunks)
        if not bool(torch.isfinite(parameter.main_grad).all())  # type: ignore[attr-defined]
    ]
    loss = not all(bool(x.isfinite().all()) for x in losses)
    return NotFinite.of(run.context.rank, bad, loss=loss)


def everyones(
    here: NotFinite, device: torch.device, group: ProcessGroup | None = None
) -> list[NotFinite]:
    """Return what the ranks of a group observed, without those that observed nothing.

    All ranks of the group (None: of the run) call this together. Each sends two numbers, and one
    sends a name: the first of those with the fewest bad parameters, as `describe` needs it.
    """
    own = torch.tensor([here.num_parameters, int(here.loss)], device=device)
    numbers = own.new_empty(2 * torch.distributed.get_world_size(group))
    torch.distributed.all_gather_into_tensor(numbers, own, group=group)
    counts, losses = numbers.view(-1, 2).t().tolist()
    name: list[str | None] = [here.parameter]
    nearest = None
    if any(counts):
        nearest = counts.index(min(count for count in counts if count))
        torch.distributed.broadcast_object_list(name, group_src=nearest, group=group, device=device)
    ranks = torch.distributed.get_process_group_ranks(group)
    return [
        NotFinite(rank, count, name[0] if place == nearest else None, bool(loss))
        for place, (rank, count, loss) in enumerate(zip(ranks, counts, losses, strict=True))
        if count or loss
    ]


def describe(
    observations: Sequence[NotFinite], norm: float, context: ParallelContext
) -> dict[str, Any]:
    """Return facts about a step that was not finite, from what the ranks observed.

    ``norm`` is the step's gradient norm. The keys are "sentence", "ranks" (where the fault probably
    arose), "parameter" (the first bad one, or None) and "cause": "loss", "gradient", or "norm" if
    only the sum of squares overflowed. A non-finite value spreads to the gradients of other
    parameters, so the ranks with the fewest bad parameters are assumed to be where it arose. The
    data-parallel replica that produced it is unknown, since the gradients have already been summed.
    """
    with_gradients = [each for each in observations if each.num_parameters]
    cause = "loss" if any(each.loss for each in observations) else "gradient"
    if not with_gradients and cause == "gradient":
        sentence = f"its gradient norm is {norm}, though each gradient that it counts is finite"
        return {"sentence": sentence, "ranks": [], "parameter": None, "cause": "norm"}
    fewest = min((each.num_parameters for each in with_gradients), default=0)
    nearest = [each for each in with_gradients if each.num_parameters == fewest]
    ranks = [each.rank for each in (nearest or [each for each in observations if each.loss])]
    parameter = nearest[0].parameter if nearest else None
    loss = "the loss too" if cause == "loss" else "the loss is finite"
    sentence = f"the loss is not finite on {places(ranks, context)}"
    if parameter is not None:
        replicas = context.layout.data_parallel_size * context.layout.context_parallel_size
        summed = " (in the sum over the replicas)" if replicas > 1 else ""
        sentence = f"the gradient of `{parameter}`{summed} first, on {places(ranks, context)}; "
        sentence += loss
    return {"sentence": sentence, "ranks": ranks, "parameter": parameter, "cause": cause}
