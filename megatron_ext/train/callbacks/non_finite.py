"""Reports steps with NaN or infinite gradients: on which ranks, and in which parameter first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_ext import core
from megatron_ext.config.fault_tolerance import VALIDATE
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import named_parameters
from megatron_ext.optim.update import UpdateResult, parts_of
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

if TYPE_CHECKING:
    from megatron_ext.train.callbacks.diagnosis import NotFinite


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
            from megatron_ext.train.callbacks.diagnosis import not_finite_here

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
        from megatron_ext.train.callbacks.diagnosis import NotFinite

        bad = [
            name
            for names, sizes in zip(self._names, update.sizes, strict=True)
            for name, size in zip(names, sizes.tolist(), strict=True)
            if not math.isfinite(size)
        ]
        losses = [float(loss) for loss in result.losses.values()]
        loss = not all(map(math.isfinite, losses))
        self._tell(iteration, update, NotFinite.of(self.run.context.rank, bad, loss=loss))

    def _tell(self, iteration: int, update: UpdateResult, here: NotFinite) -> None:
        """Gather what the ranks observed in a skipped step, and print where it was not finite.

        All ranks over which the gradient norm is summed call this together. ``here`` is what this
        rank observed.
        """
        from megatron_ext.train.callbacks.diagnosis import announce, describe, everyones

        run = self.run
        group = parts_of(run.optimizer)[0].get_grad_stats_parallel_group()
        observations = everyones(here, run.device, group)
        facts = describe(observations, update.grad_norm, run.context)
        sentence = f"iteration {iteration} is not finite: {facts.pop('sentence')}"
        announce(run, "non_finite", sentence, iteration=iteration, **facts)


def gradient_names(run: Run) -> list[list[str]]:
    """Return the names of the parameters whose gradients this rank adds to the global norm.

    The result has one list for each optimizer in a chain, in the order of `UpdateResult.sizes`.
    Call this after an update, while the optimizers still hold the gradients.
    """
    from megatron_ext.optim.shards import shards_of

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
