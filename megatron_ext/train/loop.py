"""The training loop: steps, the callbacks between them, and the metrics of an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from torch import Tensor

from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.callbacks.callback import Callback, Decision, StopConditions, overridden
from megatron_ext.train.callbacks.non_finite import NonFinite
from megatron_ext.train.reporting.records import IterationRecord
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs, StepResult, means_of
from megatron_ext.train.supervision import supervision_of
from megatron_ext.train.task import later

if TYPE_CHECKING:
    from megatron_ext.train.callbacks.evaluation import EarlyStopping

# Callbacks that only a flag asks for are imported when a run needs them.
_CALLBACKS = "megatron_ext.train.callbacks"
early_stopping_of = later(f"{_CALLBACKS}.evaluation:EarlyStopping")
evaluation_of = later(f"{_CALLBACKS}.evaluation:Evaluation")
garbage_collection_of = later(f"{_CALLBACKS}.optional:GarbageCollection")
invariants_of = later(f"{_CALLBACKS}.invariants:Invariants")
layer_norms_of = later(f"{_CALLBACKS}.layer_norms:LayerNorms")
profiler_of = later(f"{_CALLBACKS}.optional:StepProfiler")
save_watch_of = later(f"{_CALLBACKS}.optional:SaveWatch")
weight_average_of = later(f"{_CALLBACKS}.optional:WeightAverage")


def train(run: Run) -> int | None:
    """Train to the last iteration and return None; return an exit code if the run ends early."""
    metrics = IntervalMetrics(run)

    def save(superseded: Sequence[int] = (), *, is_last: bool = False) -> None:
        if run.saved_at != run.progress.iteration:
            metrics.settle()
            if run.save(superseded, is_last=is_last):
                run.saved_at = run.progress.iteration

    early_stopping = early_stopping_of(run) if run.config.training.evaluates else None
    if early_stopping is not None and early_stopping.exhausted:
        reason = early_stopping.exhausted
        run.reporters.say(f"nothing to do at iteration {run.progress.iteration} ({reason})")
        save(is_last=True)
        return 0
    if run.progress.iteration >= run.num_iterations:
        run.reporters.say(
            f"nothing to train: the run has {run.num_iterations} iterations, and the checkpoint is "
            f"of iteration {run.progress.iteration}"
        )
    callbacks = callbacks_of(run, early_stopping, metrics.settle)
    before_step = overridden(callbacks, "before_step")
    after_update = overridden(callbacks, "after_update")
    after_step = overridden(callbacks, "after_step")
    decide = overridden(callbacks, "decide")
    after_save = overridden(callbacks, "after_save")
    for callback in callbacks:
        callback.on_train_start()
    if _has_lost_a_save(run):
        save()
    decision = Decision()
    while run.progress.iteration < run.num_iterations and decision.stop is None:
        consumed = run.progress.consumed_train_samples
        if run.batch_size.changes and run.batch_size.update(consumed):
            save()
        for call in before_step:
            call()
        inputs, stats = next_inputs(run)
        result = run.runner.train(inputs, run.batch_size.global_batch_size)
        count_step(run, metrics, result, stats)
        for call in after_update:
            call(result)
        metrics.report_if_due()
        started = time.perf_counter()
        for call in after_step:
            call()
        decision = Decision()
        for call in decide:
            call(decision)
        if decision.save or decision.stop is not None:
            save(decision.superseded)
        for call in after_save:
            call()
        metrics.pause(time.perf_counter() - started)
    if decision.stop is not None:
        run.reporters.reason = decision.stop
        run.reporters.say(f"exiting at iteration {run.progress.iteration} ({decision.stop})")
    for callback in callbacks:
        callback.on_train_end()
    save(is_last=True)
    return None if decision.stop is None else decision.exit_code


def callbacks_of(
    run: Run, early_stopping: EarlyStopping | None, settle: Callable[[], None]
) -> list[Callback]:
    """Return the callbacks that a run's flags and task need, in the order in which they are called.

    ``early_stopping`` is None if the run does not evaluate. ``settle`` is a function that waits for
    the last update and counts it as applied or skipped.
    """
    training = run.config.training
    callbacks: list[Callback] = []
    if run.ema is not None:
        callbacks.append(weight_average_of(run))
    if training.profile and run.context.rank in training.profile_ranks:
        callbacks.append(profiler_of(run))
    if training.check_invariants is not None:
        callbacks.append(invariants_of(run))
    if run.config.logging.log_layer_norms_interval is not None:
        callbacks.append(layer_norms_of(run))
    if NonFinite.tells(run.config):
        callbacks.append(NonFinite(run))
    callbacks += supervision_of(run.config).callbacks(run, settle)
    if early_stopping is not None:
        callbacks.append(evaluation_of(run, callbacks))
    callbacks += [built for build in run.task.callbacks if (built := build(run)) is not None]
    if training.manual_gc:
        callbacks.append(garbage_collection_of(run))
    if StopConditions.apply(run):
        callbacks.append(StopConditions(run))
    if early_stopping is not None:
        callbacks.append(early_stopping)
    if run.saves is not None:
        # The last callback: whether a checkpoint is the best depends on whether others save it
        # anyway.
        callbacks.append(save_watch_of(run, run.saves))
    return callbacks


def _has_lost_a_save(run: Run) -> bool:
    """Return whether a run resumed from a snapshot in memory lacks a checkpoint of an earlier step.

    The checkpoint is lacking if a fault interrupted its save.
    """
    interval = run.config.checkpoint.save_interval
    return interval is not None and run.saved_at // interval < run.progress.iteration // interval


def next_inputs(run: Run) -> tuple[StepInputs, StepStats]:
    """Return this rank's micro-batches of the next step, and the step's statistics."""
    recorder = run.context.recorder
    recorder.step(run.progress.iteration + 1)
    source = run.train_source
    consumed = run.progress.consumed_train_samples
    with recorder.phase("data"):
        if source.seq_length_of is not None:
            run.seq_length = source.seq_length_of(consumed)
        num_microbatches = run.batch_size.num_microbatches
        if source.plan is not None:
            num_microbatches = source.num_microbatches(num_microbatches)
        stats = run.task.step_stats(run, num_microbatches)
        batches = source.next_step(num_microbatches, run.seq_length)
    return StepInputs(batches, num_microbatches, consumed, run.seq_length), stats


def count_step(run: Run, metrics: IntervalMetrics, result: StepResult, stats: StepStats) -> None:
    """Count a finished training step in the run's progress and in ``metrics``."""
    if result.flops is not None:
        stats = replace(stats, flops=result.flops)
    run.parameter_gather.switch_on()
    plan = run.train_source.plan
    run.progress.advance(stats, None if plan is None else plan.steps_per_epoch)
    metrics.add(result, stats)


def memory_of(device: torch.device) -> dict[str, float]:
    """Return the allocated and the reserved bytes of a GPU; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": float(torch.cuda.memory_allocated(device)),
        "reserved": float(torch.cuda.memory_reserved(device)),
    }


@dataclass
class Sums:
    """Sums of the losses, samples, tokens, FLOPs and seconds of several steps.

    Attributes:
        losses: a tensor ``[2]`` for each loss, by name: the sum of the loss over steps (for each
            step its mean), and the number of these steps. Only steps that updated the parameters
            and had targets for this loss are included.
        skipped: steps without an update.
        nans: skipped steps whose loss was not finite.
        seconds: time of the steps, without ``pause``; 0 except in the copy that `ended` returns.
        pause: seconds since ``start`` that were spent on other things, such as evaluations.
        start: when these sums began, on the clock `time.perf_counter`.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    nans: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    pause: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult, stats: StepStats) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += stats.samples
        self.tokens += stats.tokens
        self.flops += stats.flops
        for name, loss in result.losses.items():
            counted = torch.stack([loss, (result.counts[name] > 0).type_as(loss)])
            counted = torch.where(result.update.flag, counted, 0.0)
            self.losses[name] = self.losses.get(name, torch.zeros_like(counted)) + counted

    def ended(self) -> Sums:
        """Return a copy whose ``seconds`` is the time from ``start`` to now, without ``pause``."""
        return replace(self, seconds=time.perf_counter() - self.start - self.pause)

    def with_steps_of(self, other: Sums) -> Sums:
        """Return new sums that count the steps of this object and those of ``other``."""
        names = ("steps", "skipped", "nans", "samples", "tokens", "flops", "seconds")
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        losses = dict(other.losses)
        for name, value in self.losses.items():
            losses[name] = losses.get(name, torch.zeros_like(value)) + value
        return replace(self, losses=losses, **both)


class IntervalMetrics:
    """Sums of losses, samples, tokens and time over the steps between two reports."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_tracker = run.config.logging.has_tracker
        self._unsettled: tuple[int, StepResult] | None = None
        self._last: StepResult | None = None
        self._last_samples = 0
        self._since_report = Sums()
        self._since_track = Sums()
        self._first: Sums | None = None
        self._logits: dict[str, float] = {}

    def add(self, result: StepResult, stats: StepStats) -> None:
        """Add one step's losses and statistics to the sums."""
        self._count_last()
        self._last = result
        self._last_samples = stats.samples
        self._since_report.add(result, stats)
        if self._has_tracker:
            self._since_track.add(result, stats)
        self._unsettled = self._run.progress.iteration, result
        if self._run.runner.settled:
            self._count_last()

    def settle(self) -> None:
        """Wait for the last update; advance the learning rate, or count the step as skipped."""
        self._run.runner.settle()
        self._count_last()

    def _count_last(self) -> None:
        """If the last step was skipped, announce and count it; count a non-finite loss as well."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or unsettled[1].update.applied:
            return
        iteration, result = unsettled
        nan = self._loss_is_not_finite(result)
        for sums in (self._since_report, self._since_track):
            sums.skipped += 1
            sums.nans += nan
        self._run.progress.skipped_iterations += 1
        self._run.progress.nan_iterations += nan
        self._run.reporters.say(
            f"iteration {iteration} was skipped: its gradient norm is {result.update.grad_norm} "
            f"({self._run.progress.skipped_iterations} skipped so far)"
        )

    def _loss_is_not_finite(self, result: StepResult) -> bool:
        """Return whether a loss of a skipped step is not finite; all ranks call this together.

        Only the last pipeline stage has the model's losses, but all stages get the result, since
        rank 0 stores the number of such steps in checkpoints.
        """
        here = any(not math.isfinite(float(loss)) for loss in result.losses.values())
        anywhere = torch.tensor(here, dtype=torch.int32, device=self._run.device)
        group = self._run.context.pgs.pp
        torch.distributed.all_reduce(anywhere, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(anywhere)

    def pause(self, seconds: float) -> None:
        """Exclude ``seconds``, which were not spent on steps, from the measured step time."""
        self._since_report.pause += seconds
        self._since_track.pause += seconds

    def report_if_due(self) -> None:
        """Report every ``--log-interval`` steps, and after iteration 1.

        As in Megatron-LM, trackers get the values of one step every ``--tensorboard-log-interval``
        steps.
        """
        iteration = self._run.progress.iteration
        logging = self._run.config.logging
        tracked = self._has_tracker and iteration % logging.tensorboard_log_interval == 0
        due = iteration == 1 or iteration % logging.log_interval == 0
        if not (due or tracked):
            return
        self.settle()
        norm = self._run.params_norm() if logging.log_params_norm else None
        followed = self._run.runner.attention_logits
        self._logits = {} if followed is None else followed.by_layer()
        if tracked:
            self._run.reporters.on_step(self._own_record(norm))
        if due:
            self._report(norm)

    def _report(self, params_norm: float | None) -> None:
        """Report the steps since the last report.

        As in Megatron-LM, the first step of a run has a report of its own, but the printed line of
        the second report includes it again. ``params_norm`` is None without ``--log-params-norm``.
        """
        sums = self._since_report.ended()
        first = self._first
        self._since_report = Sums()
        self._first = sums if self._run.progress.iteration == 1 else None
        record = self._record(sums, self._mean_losses(sums), params_norm)
        if first is not None:
            both = sums.with_steps_of(first)
            printed = self._record(both, self._mean_losses(both), params_norm)
            record = replace(record, printed=printed)
        self._run.reporters.on_iteration(record)

    def _own_record(self, params_norm: float | None) -> IterationRecord:
        """Return the record of the last step for trackers.

        The losses are of that step alone; time, samples, tokens and FLOPs are means over the steps
        since the previous such record.
        """
        assert self._last is not None
        sums = self._since_track.ended()
        self._since_track = Sums()
        losses = self._last.losses
        counts = self._last.counts
        first = next(iter(losses), None)
        own = {k: float(v) for k, v in losses.items() if k == first or float(counts[k]) > 0}
        return self._record(sums, own, params_norm)

    def _mean_losses(self, sums: Sums) -> dict[str, float]:
        assert self._last is not None
        if sums.skipped == sums.steps:
            # The sum is finite if only the gradients were not, as after an overflow of a loss
            # scale.
            return {name: float(loss) for name, loss in self._last.losses.items()}
        return means_of(sums.losses)

    def _record(
        self, sums: Sums, losses: dict[str, float], params_norm: float | None
    ) -> IterationRecord:
        run = self._run
        last = self._last
        assert last is not None and run.optimizer is not None
        rate = get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
        return IterationRecord(
            iteration=run.progress.iteration,
            num_iterations=run.num_iterations,
            consumed_samples=run.progress.consumed_train_samples,
            seconds=max(sums.seconds, 1e-9) / sums.steps,
            # Megatron-LM stores its learning rate in a float32 tensor; round likewise.
            learning_rate=float(np.float32(rate)),
            global_batch_size=self._last_samples,
            losses=losses,
            loss_scale=float(run.optimizer.get_loss_scale()),
            grad_norm=last.update.grad_norm,
            samples=sums.samples / sums.steps,
            sample_name=run.task.sample_name,
            tokens=sums.tokens / sums.steps,
            flops=sums.flops / sums.steps,
            world_size=run.context.layout.world_size,
            skipped=sums.skipped,
            nans=sums.nans,
            total_skipped=run.progress.skipped_iterations,
            num_zeros=last.update.num_zeros,
            params_norm=params_norm,
            attention_logits=self._logits,
            peak_flops=run.peak_flops,
            memory=memory_of(run.device),
            epoch=run.progress.epoch,
            failed_saves=0 if run.saves is None else run.saves.num_failed,
        )
