"""Length of the run, batches, evaluation, and how it ends."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from megatron_ext.config.flags import (
    COUNT,
    LONG_COUNT,
    LONG_NATURAL,
    NATURAL,
    SIZE,
    IfChanged,
    Range,
    flag,
)


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop; names and defaults are Megatron-LM's unless said."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    micro_batch_size: int | None = flag(
        None, "sequences of one forward pass on one rank", names=("--batch-size",), bounds=SIZE
    )
    global_batch_size: int | None = flag(
        None,
        "sequences of one step; default: micro-batch size × data-parallel size",
        bounds=SIZE,
        if_changed="say",
    )
    rampup_batch_size: list[int] | None = flag(
        None,
        "start, increment and samples of a growing global batch",
        nargs=3,
        bounds=LONG_NATURAL,
        if_changed="say",
    )
    step_batch_size_schedule: str | None = flag(
        None, 'batch sizes from token counts on, such as "0:768 250B:1536"', if_changed="say"
    )
    decrease_batch_size_if_needed: bool = flag(
        False, "round a batch down to what the ranks can share"
    )
    train_iters: int | None = flag(None, "length of the run in steps", unit="steps", bounds=COUNT)
    train_samples: int | None = flag(
        None, "length of the run in samples", unit="samples", bounds=LONG_COUNT
    )
    train_epochs: int | None = flag(
        None,
        "length of the run in passes through the data, where the task's data has epochs",
        unit="epochs",
        bounds=COUNT,
    )
    exit_interval: int | None = flag(
        None, "end the run after each multiple of this many steps", unit="steps", bounds=COUNT
    )
    exit_duration_in_mins: float | None = flag(
        None,
        "save and end the run after this duration",
        unit="minutes",
        bounds=Range(0, 1e9, above=True),
    )
    exit_signal_handler: bool = flag(False, "save and stop at the exit signal")
    exit_signal: str = flag("SIGTERM", "the signal of --exit-signal-handler")
    skip_train: bool = flag(False, "only evaluate, without training")
    seed: int = flag(
        1234, "seed of weights, dropout and data order", bounds=COUNT, if_changed="say"
    )
    data_parallel_random_init: bool = flag(
        False, "draw different weights on each replica", if_changed="say"
    )
    deterministic_mode: bool = flag(False, "refuse operations that are not repeatable")
    calculate_per_token_loss: bool = flag(
        True,
        "divide by the tokens of the global batch (the default here); "
        "--no-calculate-per-token-loss takes the mean of micro-batch means, as Megatron-LM does",
        if_changed="say",
    )
    check_invariants: int | None = flag(
        None,
        "compare what ranks must share, and look for stale gradients, after each multiple of "
        "this many steps",
        unit="iterations",
        names=("--check-weight-hash-across-dp-replicas-interval",),
        bounds=COUNT,
    )
    manual_gc: bool = flag(False, "collect Python's garbage at the same steps on all ranks")
    manual_gc_interval: int = flag(
        0,
        "with --manual-gc, steps between collections; 0 never collects",
        unit="steps",
        bounds=NATURAL,
    )
    manual_gc_eval: bool = flag(True, "with --manual-gc, also collect around each evaluation")
    empty_unused_memory_level: int = flag(
        0,
        "give cached memory back: 1 after each step, 2 also before the update",
        choices=(0, 1, 2),
        gpu_only="a CPU keeps no memory cache",
        bounds=NATURAL,
    )
    eval_iters: int = flag(100, "batches of one evaluation", unit="steps", bounds=NATURAL)
    eval_interval: int = flag(
        1000, "evaluate after each multiple of this many steps", unit="steps", bounds=COUNT
    )
    full_validation: bool = flag(False, "evaluate the whole validation split")
    early_stop_patience: int | None = flag(
        None,
        "stop after so many evaluations in a row whose validation loss is no lower",
        unit="evaluations",
        bounds=COUNT,
    )
    early_stop_min_delta: float = flag(
        0.0,
        "the least decrease of the validation loss that counts for --early-stop-patience",
        bounds=Range(0, 1e9),
    )
    profile: bool = flag(False, "record some steps with torch's profiler")
    profile_step_start: int = flag(10, "with --profile, the first recorded step", bounds=NATURAL)
    profile_step_end: int = flag(
        12, "with --profile, the step after the last recorded one", bounds=COUNT
    )
    profile_ranks: list[int] = flag(
        [0], "with --profile, the ranks that record", nargs="+", bounds=NATURAL
    )
    num_workers: int = flag(
        2, "processes that load data", unit="processes", bounds=Range(0, 256), if_changed="allow"
    )

    @property
    def exit_signal_number(self) -> int:
        """Return the number of `exit_signal`."""
        return int(signal.Signals[self.exit_signal])

    @property
    def evaluates(self) -> bool:
        """Return whether validation is asked for."""
        return self.full_validation or self.eval_iters > 0

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Return micro-batch size and global batch size, for a configuration without errors."""
        assert self.micro_batch_size is not None
        assert self.global_batch_size is not None
        return self.micro_batch_size, self.global_batch_size

    def resolved(self, data_parallel_size: int) -> TrainingConfig:
        """Return the section with the batch size settled."""
        batch = self.global_batch_size
        steps = _schedule_or_none(self.step_batch_size_schedule)
        if batch is None and steps:
            batch = steps[-1][1]
        if batch is None and self.micro_batch_size is not None:
            batch = self.micro_batch_size * data_parallel_size
        return dataclasses.replace(self, global_batch_size=batch)

    def in_steps(self, steps_per_epoch: int) -> TrainingConfig:
        """Give the length of the run in steps, where it is given in epochs of so many steps."""
        if self.train_epochs is None:
            return self
        steps = self.train_epochs * steps_per_epoch
        return dataclasses.replace(self, train_iters=steps, train_epochs=None)

    def microbatch_counts(self, replicas: int) -> list[int]:
        """Return the numbers of micro-batches that steps of the run may have, in rising order."""
        micro, batch = self.batch_sizes
        sizes = {batch}
        if self.step_batch_size_schedule is not None:
            sizes |= {size for _, size in parse_batch_schedule(self.step_batch_size_schedule)}
        elif self.rampup_batch_size is not None:
            start, increment, _ = self.rampup_batch_size
            sizes |= set(range(start, batch, increment))
        return sorted({size // (micro * replicas) for size in sizes})

    def errors(self, data_parallel_size: int) -> list[str]:
        """Return a sentence for everything that cannot be run."""
        found = [*self._length_errors(), *self._batch_errors(data_parallel_size)]
        found += [*self._early_stop_errors(), *self._garbage_errors()]
        if self.exit_signal not in signal.Signals.__members__:
            found.append(f"`--exit-signal` ({self.exit_signal}) is no signal; use SIGTERM.")
        elif self.exit_signal in ("SIGKILL", "SIGSTOP"):
            found.append(
                f"`--exit-signal` ({self.exit_signal}) must be one that a process can catch; use "
                "SIGTERM."
            )
        return found

    def _garbage_errors(self) -> list[str]:
        interval = self.manual_gc_interval
        if self.manual_gc:
            return []
        found = []
        if interval:
            found.append(f"`--manual-gc-interval` ({interval}) needs `--manual-gc`; give both.")
        if not self.manual_gc_eval:
            found.append("`--no-manual-gc-eval` needs `--manual-gc`; give both.")
        return found

    def _early_stop_errors(self) -> list[str]:
        patience, delta = self.early_stop_patience, self.early_stop_min_delta
        if patience is None:
            if delta:
                return [
                    f"`--early-stop-min-delta` ({delta}) needs `--early-stop-patience`; give both."
                ]
            return []
        found = []
        if not self.evaluates:
            found.append(
                f"`--early-stop-patience` ({patience}) needs evaluation, but `--eval-iters` is 0; "
                "give a number of batches, or `--full-validation`."
            )
        return found

    def _length_errors(self) -> list[str]:
        lengths = {
            "--train-iters": self.train_iters,
            "--train-samples": self.train_samples,
            "--train-epochs": self.train_epochs,
        }
        given = [f"`{name}` ({value})" for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            return [f"{' and '.join(given)} exclude each other; give one."]
        if not given and not self.skip_train:
            return ["`--train-iters` is missing; give it or `--train-samples`."]
        return []

    def _batch_errors(self, replicas: int) -> list[str]:
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro is None:
            return ["`--micro-batch-size` is missing; 1 always works."]
        share = micro * replicas
        if batch is not None and batch % share and not self.decrease_batch_size_if_needed:
            lower, upper = batch // share * share, -(-batch // share) * share
            advice = f"{lower} or {upper}" if lower else f"{upper}"
            return [
                f"`--global-batch-size` ({batch}) must be divisible by micro-batch size × "
                f"data-parallel size ({micro} × {replicas} = {share}); use {advice}."
            ]
        if self.step_batch_size_schedule is not None:
            return self._schedule_errors()
        if self.rampup_batch_size is not None and batch is not None:
            return self._rampup_errors(batch)
        return []

    def _schedule_errors(self) -> list[str]:
        text = self.step_batch_size_schedule
        steps = _schedule_or_none(text)
        if self.rampup_batch_size is not None:
            return [
                "`--step-batch-size-schedule` and `--rampup-batch-size` exclude each other; give "
                "one."
            ]
        if steps is None:
            return [
                f"`--step-batch-size-schedule` ({text}) must list TOKENS:BATCH_SIZE with rising "
                'tokens from 0 on; use "0:768 250B:1536".'
            ]
        if self.global_batch_size != steps[-1][1]:
            return [
                f"`--global-batch-size` ({self.global_batch_size}) must be the last batch size of "
                f"`--step-batch-size-schedule` ({steps[-1][1]}); leave it out."
            ]
        return []

    def _rampup_errors(self, batch: int) -> list[str]:
        start, increment, samples = self.rampup_batch_size or (0, 0, 0)
        if start < 1 or increment < 1 or samples < 0 or start > batch:
            return [
                f"`--rampup-batch-size` ({start} {increment} {samples}) must start between 1 and "
                f"`--global-batch-size` ({batch}) and grow by at least 1."
            ]
        if start == batch or (batch - start) % increment:
            return [
                f"`--rampup-batch-size` ({start} {increment} {samples}) must reach "
                f"`--global-batch-size` ({batch}) in whole increments; use an increment that "
                f"divides {batch - start or batch}."
            ]
        return []


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Read ``"0:768 250B:1536"`` as pairs of tokens and batch size, by tokens.

    Raises:
        ValueError: malformed, not starting at 0, or tokens that do not rise.
    """

    def number(word: str) -> int:
        scale = _SUFFIXES.get(word[-1:].upper())
        return int(float(word[:-1]) * scale) if scale else int(float(word))

    steps = []
    for entry in text.replace(",", " ").split():
        tokens, colon, batch = entry.partition(":")
        if not colon:
            raise ValueError(entry)
        steps.append((number(tokens), number(batch)))
    tokens_rise = all(a[0] < b[0] for a, b in pairwise(steps))
    if not steps or steps[0][0] != 0 or not tokens_rise or min(b for _, b in steps) < 1:
        raise ValueError(text)
    return steps


def _schedule_or_none(text: str | None) -> list[tuple[int, int]] | None:
    try:
        return None if text is None else parse_batch_schedule(text)
    except (ValueError, OverflowError):
        return None
