"""Detects steps whose loss or gradient norm spikes, and can leave them out.

A value is a spike if it is above the median of recent values by more than a number of standard
deviations. The standard deviation is estimated as 1.4826 times the median absolute deviation, which
is robust to spikes among the values (Rousseeuw and Croux, "Alternatives to the Median Absolute
Deviation", 1993). Returning to a state before the spike and continuing with later samples is PaLM's
remedy (arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.device.streams import HostCopy
from megatron_ext.extras.resilience.rewind import Rewind
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.callbacks.diagnosis import announce
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult, mean_of

FLOORS = {"loss": 0.02, "grad_norm": 0.1}
"""Least standard deviation to assume for loss and gradient norm, as a fraction of the median."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""


def limit(values: Sequence[float], factor: float, floor: float) -> float:
    """Return the limit above which a new value is a spike; infinity if ``values`` is empty.

    Args:
        values: the recent values.
        factor: number of standard deviations from the median to the limit.
        floor: least standard deviation that is assumed, relative to the median.
    """
    if not values:
        return math.inf
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return median + factor * max(_NORMAL * deviation, floor * abs(median))


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is above its limit; the keys are those of `FLOORS`."""

    values: dict[str, float]
    limits: dict[str, float]

    @property
    def leaped(self) -> list[str]:
        return [name for name, value in self.values.items() if value > self.limits[name]]

    def __str__(self) -> str:
        return " and ".join(
            f"its {name.replace('grad_norm', 'gradient norm')} is {self.values[name]:.6g}, above "
            f"{self.limits[name]:.6g}"
            for name in self.leaped
        )


class Spikes(Callback):
    """Reports spikes. With ``--on-spike skip`` or ``rewind``, a spike's update is not applied.

    With ``rewind`` the run then also returns to the newest checkpoint (`rewind`). So it leaves out
    the samples of the spike and of all steps since the checkpoint, which have led to the spike.

    Recent values are part of the saved progress, so that a resumed run decides in the same way.
    Values of spikes are kept as well: a level that stays high becomes normal after half of
    ``--spike-window`` steps. On a GPU, ``--on-spike log`` reads the values of a step during the
    next step, whereas ``skip`` and ``rewind`` make each step wait for its values.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        flags = run.config.fault_tolerance
        self._action = flags.on_spike
        self._window = flags.spike_window
        self._factor = flags.spike_factor
        self._first_sample = 0
        self._read: list[float] | None = None
        self._pending: tuple[int, int, int, HostCopy] | None = None
        self._rewind: Rewind | None = None
        self._goes_back = False
        if self._action in ("skip", "rewind"):
            run.runner.approvals.append(self._approve)

    def on_train_start(self) -> None:
        if self._action == "rewind":
            self._rewind = Rewind(self.run)

    def before_step(self) -> None:
        self._first_sample = self.run.progress.consumed_train_samples
        self._read = None

    def _approve(self, totals: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """Approve the step's update, bool ``[]``, unless it is a spike (`StepRunner.approvals`)."""
        first = next(iter(totals.values()), None)
        self._read = self._shared(None if first is None else mean_of(first), norm).read()
        spike = self._spike_in(self._read)
        return torch.full((), spike is None, dtype=torch.bool, device=norm.device)

    def _shared(self, loss: Tensor | None, norm: Tensor) -> HostCopy:
        """Return a copy of a step's loss and gradient norm on the host, equal on every rank.

        ``loss`` is None on all pipeline stages but the last, which sends the loss to the others.
        All ranks call this together.
        """
        context = self.run.context
        values = torch.stack([norm if loss is None else loss.to(norm), norm])
        if context.pgs.pp.size() > 1:
            last = context.last_stage_pp_rank
            torch.distributed.broadcast(values, group=context.pgs.pp, group_src=last)
        return HostCopy(values)

    def _spike_in(self, read: Sequence[float]) -> Spike | None:
        """Return the spike in a step's loss and gradient norm (``read``); None if there is none.

        Also return None if there are too few values of earlier steps, or a value is not finite.
        """
        recent = self.run.progress.recent_values
        if len(recent) < self._window // 2 or not all(map(math.isfinite, read)):
            return None
        series = dict(zip(FLOORS, zip(*recent, strict=True), strict=True))
        limits = {name: limit(series[name], self._factor, FLOORS[name]) for name in FLOORS}
        spike = Spike(dict(zip(FLOORS, read, strict=True)), limits)
        return spike if spike.leaped else None

    def after_update(self, result: StepResult) -> None:
        progress = self.run.progress
        here = progress.iteration, self._first_sample, progress.consumed_train_samples
        if self._read is not None:
            self._judge(*here, self._read)
            return
        self._judge_pending()
        loss = next(iter(result.losses.values()), None)
        self._pending = (*here, self._shared(loss, result.update.norm))
        if self.run.runner.settled:
            self._judge_pending()

    def after_step(self) -> None:
        goes_back, self._goes_back = self._goes_back, False
        if not goes_back or self._rewind is None:
            return
        run = self.run
        iteration = run.progress.iteration
        restored = self._rewind.go_back()
        if restored is None:
            run.reporters.say(f"iteration {iteration}: there is no checkpoint to go back to yet")
            return
        run.rewinds.append((iteration, restored))
        announce(
            run, "rewind",
            f"iteration {iteration}: the state is that of iteration {restored} again, and the run "
            f"goes on with sample {run.progress.consumed_train_samples}",
            iteration=iteration, restored_iteration=restored,
        )  # fmt: skip

    def on_train_end(self) -> None:
        self._judge_pending()

    def _judge_pending(self) -> None:
        """Judge the previous step, whose values have arrived by now."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._judge(*pending[:3], pending[3].read())

    def _judge(self, iteration: int, first: int, end: int, read: list[float]) -> None:
        """Store a step's loss and gradient norm (``read``), and report it if it is a spike.

        The step consumed the samples ``first`` to ``end`` - 1.
        """
        spike = self._spike_in(read)
        recent = self.run.progress.recent_values
        if all(map(math.isfinite, read)):
            recent.append(read)
            del recent[: -self._window]
        if spike is None:
            return
        self._goes_back = True
        sentence = f"iteration {iteration}, samples {first} to {end - 1}: {spike}"
        applied = self._action == "log"
        announce(
            self.run,
            "spike",
            sentence if applied else f"{sentence}; its update is not applied",
            iteration=iteration,
            first_sample=first,
            last_sample=end - 1,
            leaped=spike.leaped,
            action=self._action,
            limits=spike.limits,
            **spike.values,
        )
