"""The average of the weights that a run keeps beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import BELOW_ONE, COUNT

if TYPE_CHECKING:
    from megatron_ext.config.training import TrainingConfig


STREAMING_START = 200
"""First averaged step of LongLive (arXiv:2509.22622)."""


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average: ``average = decay * average + (1 - decay) * weights``."""

    ema_decay: float | None = flag(
        None,
        "keep an average of the weights that retains this share at each update, 0 for none",
        bounds=BELOW_ONE,
        advice="use 0.9999",
    )
    ema_start: int | None = flag(
        None,
        "first step that is averaged, until then it is the weights; default: 1, with --task "
        "streaming 200",
        bounds=COUNT,
    )
    ema_update_every: int = flag(
        1,
        "average only after each so-manyth training step of the model, with the same decay; with "
        "--task streaming steps of the generator",
        unit="steps",
        bounds=COUNT,
    )
    eval_ema: bool = flag(False, "evaluate with the averaged weights too")
    for_sampling: bool = False
    """A run that only samples, with the averaged weights."""

    def resolved(self, *, streams: bool) -> EmaConfig:
        """With the first step, where there is an average."""
        if not self.ema_decay or self.ema_start is not None:
            return self
        return dataclasses.replace(self, ema_start=STREAMING_START if streams else 1)

    def keeps_average(self, *, trains: bool) -> bool:
        """Whether the run holds averaged weights: to go on with, or only to evaluate."""
        return bool(self.ema_decay) if trains else self.eval_ema or self.for_sampling

    def errors(self, training: TrainingConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        if not self.ema_decay and self.ema_start not in (None, 1):
            found.append(
                f"`--ema-start` ({self.ema_start}) needs `--ema-decay`; give one such as 0.9999."
            )
        every = self.ema_update_every
        if every > 1 and not self.ema_decay:
            found.append(
                f"`--ema-update-every` ({every}) needs `--ema-decay`; give one such as 0.9999."
            )
        if self.eval_ema and not self.keeps_average(trains=not training.skip_train):
            found.append("`--eval-ema` needs `--ema-decay`; give one such as 0.9999.")
        if self.eval_ema and not training.evaluates:
            found.append(
                "`--eval-ema` needs evaluation, but `--eval-iters` is 0; give a number of batches."
            )
        return found
