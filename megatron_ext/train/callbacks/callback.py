"""The callbacks between the steps of a run, and the decisions that they may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

Losses = Sequence[Mapping[str, float]]
"""Losses of each validation set by name; empty mappings but on the last pipeline stage."""


@dataclass
class Decision:
    """The consequences of a step: whether to save a checkpoint, and whether the run ends.

    Attributes:
        save: a checkpoint of this iteration is to be saved; a run that ends is always saved.
        stop: the reason why the run ends, None if it goes on.
        exit_code: exit code of a run that ends.
        superseded: iterations of checkpoints that nothing keeps any more.
    """

    save: bool = False
    stop: str | None = None
    exit_code: int = 0
    superseded: tuple[int, ...] = ()


class Callback:
    """An action between steps; a subclass overrides the methods of the moments that concern it.

    All ranks call each method together, in the order of `loop.train`. A task names its own classes
    in `Task.callbacks`.

    Args:
        run: the run, before its first step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self) -> None:
        """Run once before the first step."""

    def before_step(self) -> None:
        """Run before each step; ``run.progress.iteration`` counts the steps done."""

    def after_update(self, result: StepResult) -> None:
        """Run at once after the update of the parameters, within the time of the step."""

    def after_step(self) -> None:
        """Run after the report of each step, outside of the time that is reported."""

    def before_evaluation(self) -> None:
        """Run before the validation split is evaluated between steps."""

    def after_evaluation(self, losses: Losses) -> None:
        """Run after the validation split has been evaluated between steps."""

    def decide(self, decision: Decision) -> None:
        """Ask for a checkpoint or for the end of the run, after all callbacks of a step."""

    def on_train_end(self) -> None:
        """Run once after the last step, also of a run that ends early."""


def due(iteration: int, interval: int | None) -> bool:
    """Return whether something that is done every so many steps is done after this one."""
    return interval is not None and interval > 0 and iteration % interval == 0
