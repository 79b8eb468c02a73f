"""The base class of callbacks, which run between the steps of a run, and the conditions to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import EXIT_CODE_NOT_SAVED
from megatron_ext.train.exit_codes import EXIT_CODE_RESIZED, EXIT_CODE_SIGNAL
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

Losses = Sequence[Mapping[str, float]]
"""For each validation set, its losses by name; {} on ranks without the last pipeline stage."""


@dataclass
class Decision:
    """The actions that follow a step; callbacks request them in `Callback.decide`.

    Attributes:
        save: whether to save a checkpoint of this iteration. The last iteration is always saved.
        stop: why the run ends; None if it continues.
        exit_code: exit code of the process if ``stop`` is set.
        superseded: iterations whose checkpoints may be deleted once this iteration is saved.
    """

    save: bool = False
    stop: str | None = None
    exit_code: int = 0
    superseded: tuple[int, ...] = ()


class Callback:
    """An action between steps; a subclass overrides the methods that it needs.

    All ranks call each method together. Methods that a subclass does not override are never called.
    `loop.callbacks_of` lists the callbacks of a run in their order; `Task.callbacks` adds those of
    a task.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self) -> None:
        """Run once before the first step."""

    def before_step(self) -> None:
        """Run before each step; ``run.progress.iteration`` counts the steps done."""

    def after_update(self, result: StepResult) -> None:
        """Run right after each update of the parameters, within the measured time of the step."""

    def after_step(self) -> None:
        """Run after each step and its report, outside of the measured time of the step."""

    def before_evaluation(self) -> None:
        """Run before the validation split is evaluated between steps."""

    def after_evaluation(self, losses: Losses) -> None:
        """Run after the validation split has been evaluated between steps."""

    def decide(self, decision: Decision) -> None:
        """Run after all `after_step` calls; may request a save or a stop in ``decision``."""

    def after_save(self) -> None:
        """Run at the end of each step; if the step saves a checkpoint, after that."""

    def on_train_end(self) -> None:
        """Run once after the last step, even if the run ends early."""


def due(iteration: int, interval: int | None) -> bool:
    """Return whether ``iteration`` is a multiple of ``interval``; False for None or 0."""
    return interval is not None and interval > 0 and iteration % interval == 0


def overridden(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """Return the bound method ``name`` of each callback whose class overrides it."""
    default = getattr(Callback, name)
    return [getattr(each, name) for each in callbacks if getattr(type(each), name) is not default]


EXIT_INTERVAL = "exit interval"
"""The value of `Decision.stop` for ``--exit-interval``; any other reason to stop replaces it."""


class StopConditions(Callback):
    """Saves at ``--save-interval``; ends a run at a signal, a time limit or ``--exit-interval``."""

    @staticmethod
    def apply(run: Run) -> bool:
        """Return whether a flag of the run sets a save interval or a condition to stop."""
        interval = run.config.checkpoint.save_interval or run.config.training.exit_interval
        return bool(interval) or run.stop_requests.watches

    def decide(self, decision: Decision) -> None:
        run = self.run
        config = self.run.config
        request = run.stop_requests.check(run.device)
        if request is not None:
            decision.stop = request
            saves = config.checkpoint.save is not None
            codes = {
                "signal": EXIT_CODE_SIGNAL if saves else EXIT_CODE_NOT_SAVED,
                "resize": EXIT_CODE_RESIZED,
            }
            decision.exit_code = codes.get(request, 0)
        elif due(run.progress.iteration, config.training.exit_interval):
            decision.stop = decision.stop or EXIT_INTERVAL
        decision.save |= due(run.progress.iteration, config.checkpoint.save_interval)
