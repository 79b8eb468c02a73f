"""Reports steps with NaN or infinite gradients: on which ranks, and in which parameter first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext import core
from megatron_ext.config.fault_tolerance import VALIDATE
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import named_parameters
from megatron_ext.optim.shards import shards_of
from megatron_ext.optim.update import UpdateResult, parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

_AXES = {"dp": "data", "cp": "context", "tp": "tensor", "pp": "pipeline"}


def places(ranks: Sequence[int], context: ParallelContext) -> str:
    """Return text such as "ranks 2, 3 (data 1, pipeline 0)": ranks and their common positions.

    A dimension is left out if its size is 1, or if the ranks differ in it.
    """
    positions = [context.layout.position(rank) for rank in ranks]
    sizes = {axis: len(context.layout.groups(axis)[0]) for axis in _AXES}
    shared = [
        f"{word} {positions[0][axis]}"
        for axis, word in _AXES.items()
        if sizes[axis] > 1 and len({position[axis] for position in positions}) == 1
    ]
    listed = ", ".join(map(str, ranks))
    where = f" ({', '.join(shared)})" if shared else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{where}"


def announce(run: Run, kind: str, sentence: str, **facts: Any) -> None:
    """Print ``sentence`` on the reporting rank, and append an event to the log in the save folder.

    Only the reporting rank does something, but other ranks may call this too. ``kind`` and
    ``facts`` are the kind and the fields of the event; see `disk.events`.
    """
    run.reporters.say(sentence)
    if run.context.is_reporting_rank:
        from megatron_ext.disk.events import append_event

        ranks = facts.get("ranks") or []
        rank = ranks[0] if len(ranks) == 1 else None
        append_event(run.config.checkpoint.save, kind, rank=rank, **facts)


@dataclass(frozen=True)
class NotFinite:
    """The losses and gradients of a step that are NaN or infinite on one rank.

    Attributes:
        parameters: names of parameters whose gradient is not finite, in the order of the model.
        loss: whether a loss of this rank's micro-batches is not finite.
    """

    rank: int
    parameters: list[str]
    loss: bool

    @property
    def has_any(self) -> bool:
        return bool(self.parameters) or self.loss


def not_finite_here(run: Run, losses: Sequence[Tensor]) -> NotFinite:
    """Find this rank's non-finite gradients of the last step, and its non-finite losses."""
    bad = [
        name
        for name, parameter in named_parameters(run.runner.trained_chunks)
        if not bool(torch.isfinite(parameter.main_grad).all())  # type: ignore[attr-defined]
    ]
    return NotFinite(run.context.rank, bad, not all(bool(x.isfinite().all()) for x in losses))


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
    with_gradients = [each for each in observations if each.parameters]
    cause = "loss" if any(each.loss for each in observations) else "gradient"
    if not with_gradients and cause == "gradient":
        sentence = f"its gradient norm is {norm}, though each gradient that it counts is finite"
        return {"sentence": sentence, "ranks": [], "parameter": None, "cause": "norm"}
    fewest = min((len(each.parameters) for each in with_gradients), default=0)
    nearest = [each for each in with_gradients if len(each.parameters) == fewest]
    ranks = [each.rank for each in (nearest or [each for each in observations if each.loss])]
    parameter = nearest[0].parameters[0] if nearest else None
    loss = "the loss too" if cause == "loss" else "the loss is finite"
    sentence = f"the loss is not finite on {places(ranks, context)}"
    if parameter is not None:
        replicas = context.layout.data_parallel_size * context.layout.context_parallel_size
        summed = " (in the sum over the replicas)" if replicas > 1 else ""
        sentence = f"the gradient of `{parameter}`{summed} first, on {places(ranks, context)}; "
        sentence += loss
    return {"sentence": sentence, "ranks": ranks, "parameter": parameter, "cause": cause}


class NonFinite(Callback):
    """Reports on which ranks, and in which parameter first, a skipped step was not finite.

    If the host decides whether to apply the update, as on a CPU, the report comes in the same step.
    If the GPU decides, the host learns of it one step later, when the gradients are gone; the
    report then relies on the norm of each gradient, which the update has stored.
    """

    @staticmethod
    def tells(config: RunConfig) -> bool:
        """Return whether a run reports non-finite steps by this callback.

        ``--rerun-mode validate_results`` repeats such steps and reports them itself. Under fp16
        nothing is reported, since scaled losses overflow now and then.
        """
        return config.fault_tolerance.rerun_mode != VALIDATE and not config.precision.fp16

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._names: list[list[str]] | None = None
        self._pending: tuple[int, StepResult] | None = None

    def after_update(self, result: StepResult) -> None:
        self._tell_late()
        iteration = self.run.progress.iteration
        if not self.run.runner.settled:
            self._pending = iteration, result
            if self._names is None:
                self._names = gradient_names(self.run)
        elif not result.update.applied and not math.isfinite(result.update.grad_norm):
            here = not_finite_here(self.run, list(result.losses.values()))
            self._tell(iteration, result.update, here)

    def on_train_end(self) -> None:
        self._tell_late()

    def _tell_late(self) -> None:
        """Report the previous step if it was not finite, which the host knows only now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration, result = pending
        update = result.update
        if update.applied or math.isfinite(update.grad_norm) or self._names is None:
            return
        bad = [
            name
            for names, sizes in zip(self._names, update.sizes, strict=True)
            for name, size in zip(names, sizes.tolist(), strict=True)
            if not math.isfinite(size)
        ]
        losses = [float(loss) for loss in result.losses.values()]
        here = NotFinite(self.run.context.rank, bad, not all(map(math.isfinite, losses)))
        self._tell(iteration, update, here)

    def _tell(self, iteration: int, update: UpdateResult, here: NotFinite) -> None:
        """Gather what the ranks observed in a skipped step, and print where it was not finite.

        All ranks over which the gradient norm is summed call this together. ``here`` is what this
        rank observed.
        """
        run = self.run
        group = parts_of(run.optimizer)[0].get_grad_stats_parallel_group()
        gathered: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(gathered, here, group=group)
        observations = [each for each in gathered if each.has_any]
        facts = describe(observations, update.grad_norm, run.context)
        sentence = f"iteration {iteration} is not finite: {facts.pop('sentence')}"
        announce(run, "non_finite", sentence, iteration=iteration, **facts)


def gradient_names(run: Run) -> list[list[str]]:
    """Return the names of the parameters whose gradients this rank adds to the global norm.

    The result has one list for each optimizer in a chain, in the order of `UpdateResult.sizes`.
    Call this after an update, while the optimizers still hold the gradients.
    """
    named = {id(p): name for name, p in named_parameters(run.runner.trained_chunks)}
    all_names = []
    for part in parts_of(run.optimizer):
        owner = {}
        for shard in shards_of(part):
            for attribute in ("grad", "decoupled_grad"):
                gradient = getattr(shard.main, attribute, None)
                if gradient is not None:
                    owner[id(gradient)] = named.get(id(shard.parameter), "a parameter")
        grads = core.gradients_for_norm(part)
        all_names.append([owner.get(id(gradient), "a parameter") for gradient in grads])
    return [names for names in all_names if names]
