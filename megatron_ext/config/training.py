"""Flags of the training loop (length, batch sizes, evaluation, exit) and of the loss."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    LONG_COUNT,
    LONG_NATURAL,
    NATURAL,
    SIZE,
    WEIGHT,
    Changeable,
    Range,
    derived,
    flag,
    said_flag,
)
from megatron_ext.errors import STOP_SIGNALS, FlagError, exclusive


@dataclass(frozen=True)
class TrainingConfig(Changeable):
    """Flags of the training loop, with Megatron-LM's meanings unless a help text says otherwise."""

    micro_batch_size: int | None = flag(
        None, "sequences of one forward pass on one rank", SIZE, names="--batch-size"
    )
    global_batch_size: int | None = said_flag(
        None, "sequences of one step; default: micro-batch size × data-parallel size", SIZE
    )
    rampup_batch_size: list[int] | None = said_flag(
        None, "start, increment and samples of a growing global batch", LONG_NATURAL, nargs=3
    )
    step_batch_size_schedule: str | None = said_flag(
        None, 'batch sizes from token counts on, such as "0:768 250B:1536"', joins=True
    )
    decrease_batch_size_if_needed: bool = flag(False, "round a batch down to what ranks can share")
    train_iters: int | None = flag(None, "length of the run in steps", COUNT, "steps")
    train_samples: int | None = flag(None, "length of the run in samples", LONG_COUNT, "samples")
    train_epochs: int | None = flag(
        None, "length of the run in epochs, where the task's data has them", COUNT, "epochs"
    )
    exit_interval: int | None = flag(
        None, "end the run after each multiple of this many steps", COUNT, "steps"
    )
    exit_duration_in_mins: float | None = flag(
        None, "save and end the run after this duration", Range(0, 1e9, above=True), "minutes"
    )
    exit_signal_handler: bool = flag(False, "save and stop at the exit signal")
    exit_signal: str = flag("SIGTERM", "the signal of --exit-signal-handler")
    skip_train: bool = flag(False, "only evaluate, without training")
    seed: int = said_flag(1234, "seed of weights, dropout and data order", COUNT)
    data_parallel_random_init: bool = said_flag(False, "draw different weights on each replica")
    deterministic_mode: bool = flag(False, "refuse operations that are not repeatable")
    calculate_per_token_loss: bool = said_flag(
        True,
        "divide by the tokens of the global batch (the default here); "
        "--no-calculate-per-token-loss takes the mean of micro-batch means, as Megatron-LM does",
    )
    check_invariants: int | None = flag(
        None,
        "compare what ranks must share, and look for stale gradients, every so many steps",
        COUNT,
        "iterations",
        names="--check-weight-hash-across-dp-replicas-interval",
    )
    manual_gc: bool = flag(False, "collect Python's garbage at the same steps on all ranks")
    manual_gc_interval: int = flag(
        0, "with --manual-gc, steps between collections; 0 never collects", NATURAL, "steps"
    )
    manual_gc_eval: bool = flag(True, "with --manual-gc, also collect around each evaluation")
    empty_unused_memory_level: int = flag(
        0,
        "give cached memory back: 1 after each step, 2 also before the update",
        NATURAL,
        choices=(0, 1, 2),
    )
    eval_iters: int = flag(
        100,
        "batches of one evaluation",
        NATURAL,
        "steps",
        advice="use 0 for no evaluation, or `--full-validation` for all of the validation data",
    )
    eval_interval: int = flag(
        1000, "evaluate after each multiple of this many steps", COUNT, "steps"
    )
    full_validation: bool = flag(False, "evaluate the whole validation split")
    early_stop_patience: int | None = flag(
        None,
        "stop after so many evaluations in a row whose validation loss is no lower",
        COUNT,
        "evaluations",
    )
    early_stop_min_delta: float = flag(
        0.0,
        "least decrease of the validation loss that counts for --early-stop-patience",
        Range(0, 1e9),
    )
    profile: bool = flag(False, "record some steps with torch's profiler")
    profile_step_start: int = flag(10, "with --profile, the first recorded step", NATURAL)
    profile_step_end: int = flag(12, "with --profile, the step after the last recorded one", COUNT)
    profile_ranks: list[int] = flag(
        [0], "with --profile, the ranks that record", NATURAL, nargs="+"
    )
    num_workers: int = flag(2, "processes that load data", Range(0, 256), "processes")
    micro_batch_range: tuple[int, int] | None = derived()
    """Smallest and largest micro-batch size, in samples, if the data decides it; else None."""

    @property
    def evaluates(self) -> bool:
        """Return whether the run evaluates the validation split."""
        return self.full_validation or self.eval_iters > 0

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Return micro-batch size and global batch size; both must be set."""
        assert self.micro_batch_size is not None and self.global_batch_size is not None
        return self.micro_batch_size, self.global_batch_size

    def resolved(self, data_parallel_size: int) -> TrainingConfig:
        """Return a copy with the global batch size filled in if it is unset.

        The filled-in size is the last one of the batch-size schedule; without a schedule, it is one
        micro-batch on each data-parallel rank.
        """
        batch = self.global_batch_size
        if batch is None and self.step_batch_size_schedule is not None:
            from megatron_ext.config.batch_schedule import last_batch_size

            batch = last_batch_size(self.step_batch_size_schedule)
        if batch is None and self.micro_batch_size is not None:
            batch = self.micro_batch_size * data_parallel_size
        return dataclasses.replace(self, global_batch_size=batch)

    def in_steps(self, steps_per_epoch: int) -> TrainingConfig:
        """Return a copy with ``train_epochs``, if set, converted to ``train_iters``."""
        if self.train_epochs is None:
            return self
        steps = self.train_epochs * steps_per_epoch
        return dataclasses.replace(self, train_iters=steps, train_epochs=None)

    def microbatches(self, batch: int, replicas: int) -> int | None:
        """Return how many micro-batches each data-parallel rank has in a step of ``batch`` samples.

        The result is None if the number would be 0 or not whole. With
        ``--decrease-batch-size-if-needed``, a number that is not whole is rounded down instead.
        """
        number, rest = divmod(batch, (self.micro_batch_size or 1) * replicas)
        return number if number and (not rest or self.decrease_batch_size_if_needed) else None

    def microbatch_counts(self, replicas: int) -> list[int]:
        """Return, ascending, the numbers of micro-batches that a step of the run can have.

        Each number is that of one data-parallel replica; ``replicas`` is how many there are.
        """
        counts = {self.microbatches(size, replicas) for size in self._sizes()}
        return sorted(count for count in counts if count is not None)

    def _sizes(self) -> list[int]:
        """Return, in ascending order, the global batch sizes that the flags ask for during the run.

        ``--decrease-batch-size-if-needed`` may still round them down.
        """
        _, batch = self.batch_sizes
        sizes = {batch}
        if self.step_batch_size_schedule is not None:
            from megatron_ext.config.batch_schedule import parse_batch_schedule

            sizes |= {size for _, size in parse_batch_schedule(self.step_batch_size_schedule)}
        elif self.rampup_batch_size is not None:
            start, increment, _ = self.rampup_batch_size
            sizes |= set(range(start, batch, increment))
        return sorted(sizes)

    def errors(self, data_parallel_size: int) -> Iterator[FlagError]:
        """Yield an error for each fault in the flags of training."""
        yield from self._length_errors()
        yield from self._batch_errors(data_parallel_size)
        patience = self.early_stop_patience
        delta = self.early_stop_min_delta
        if patience is None and delta:
            yield FlagError(
                "--early-stop-min-delta", delta, "needs `--early-stop-patience`", "give both"
            )
        if patience is not None and not self.evaluates:
            yield FlagError(
                "--early-stop-patience",
                patience,
                "needs evaluation, but `--eval-iters` is 0",
                "give a number of batches, or `--full-validation`",
            )
        interval = self.manual_gc_interval
        if interval and not self.manual_gc:
            yield FlagError("--manual-gc-interval", interval, "needs `--manual-gc`", "give both")
        if not self.manual_gc_eval and not self.manual_gc:
            yield FlagError("--no-manual-gc-eval", None, "needs `--manual-gc`", "give both")
        usable = [number.name for number in STOP_SIGNALS]
        if self.exit_signal not in signal.Signals.__members__:
            yield FlagError("--exit-signal", self.exit_signal, "is no signal", "use SIGTERM")
        elif self.exit_signal in ("SIGKILL", "SIGSTOP"):
            yield FlagError(
                "--exit-signal",
                self.exit_signal,
                "must be one that a process can catch",
                "use SIGTERM",
            )
        elif self.exit_signal not in usable:
            yield FlagError(
                "--exit-signal",
                self.exit_signal,
                "must be a signal that is sent to end a program, as others mean something else to "
                "its processes",
                f"use {', '.join(usable[:-1])} or {usable[-1]}",
            )

    def notes(self) -> list[str]:
        """Return a note for each flag from which nothing follows in a run of this length."""
        steps = self.train_iters
        patience = self.early_stop_patience
        if steps is None or self.skip_train:
            return []
        notes = []
        if self.profile and self.profile_step_start >= steps:
            notes.append(
                f"`--profile` records nothing: the run has {steps} steps, and recording starts "
                f"after step {self.profile_step_start} (`--profile-step-start`)."
            )
        count = steps // self.eval_interval if self.eval_interval else 0
        if patience is not None and count <= patience:
            notes.append(
                f"`--early-stop-patience` ({patience}) never ends the run: its {steps} steps have "
                f"{count} evaluations (`--eval-interval` {self.eval_interval}), and the first one "
                "sets the loss to fall below."
            )
        return notes

    def _length_errors(self) -> Iterator[FlagError]:
        lengths = {x: getattr(self, f"train_{x}") for x in ("iters", "samples", "epochs")}
        given = [(f"--train-{x}", value) for x, value in lengths.items() if value is not None]
        if len(given) > 1:
            yield exclusive(*given)
        if not given and not self.skip_train:
            yield FlagError(
                "--train-iters",
                None,
                "is missing",
                "give it, or `--train-epochs` for data that is passed through in epochs",
            )

    def _batch_errors(self, replicas: int) -> Iterator[FlagError]:
        micro = self.micro_batch_size
        batch = self.global_batch_size
        if micro is None:
            yield FlagError("--micro-batch-size", None, "is missing", "1 always works")
            return
        share = micro * replicas
        if batch is not None and self.microbatches(batch, replicas) is None:
            lower = batch // share * share
            upper = -(-batch // share) * share
            yield FlagError(
                "--global-batch-size",
                batch,
                f"must be divisible by micro-batch size × data-parallel size ({micro} × "
                f"{replicas} = {share})",
                f"use {f'{lower} or ' if lower else ''}{upper}",
            )
            return
        if self.step_batch_size_schedule is None and self.rampup_batch_size is None:
            return
        from megatron_ext.config.batch_schedule import change_errors

        changes = list(change_errors(self.step_batch_size_schedule, self.rampup_batch_size, batch))
        yield from changes
        if batch is not None and not changes:
            yield from self._reached_errors(share, replicas)

    def _reached_errors(self, share: int, replicas: int) -> Iterator[FlagError]:
        """Yield an error for the smallest global batch size of the run that ranks cannot divide.

        ``share`` is the micro-batch size times ``replicas``, the number of data-parallel replicas.
        """
        flag = "--rampup-batch-size" if self.rampup_batch_size else "--step-batch-size-schedule"
        unfit = [x for x in self._sizes() if self.microbatches(x, replicas) is None]
        for size in unfit[:1]:
            bound = "at least"
            remedy = "use a larger one"
            if size >= share:
                bound = "divisible by"
                remedy = "use other sizes, or give `--decrease-batch-size-if-needed`"
            yield FlagError(
                flag,
                None,
                f"reaches the global batch size {size}, which must be {bound} micro-batch size × "
                f"data-parallel size ({share})",
                remedy,
            )


REDUCTIONS = ("token", "sample", "square")
CROSS_ENTROPY = "cross-entropy"
"""The value of ``--loss`` that chooses cross-entropy, also where a program's default differs."""


MAX_ROWS = 1024
"""The largest number of tokens in a float32 block of logits by default."""
MIN_FUSED_ROWS = 4096
"""The number of tokens below which a block of 16-bit logits is not cut further by default."""


# The same few numbers of tokens come again in every micro-batch.
@lru_cache
def default_rows(num_tokens: int) -> int:
    """Return the tokens in a float32 block of logits: an eighth of all, at most `MAX_ROWS`."""
    return min(-(-num_tokens // 8), MAX_ROWS)


@lru_cache
def fused_rows(num_tokens: int, hidden_size: int) -> int:
    """Return the number C of tokens in a block on a GPU, where its logits stay in 16 bits.

    C is 2 h for hidden size h, but at least `MIN_FUSED_ROWS`, and never more than half of all
    tokens.

    For v rows of the head on this rank, adding a block's part to the weight's float32 gradient
    takes 2 C h v operations and moves 8 h v bytes: C / 4 operations per byte. An H200 does about
    200 operations in the time of moving one byte. At C = 2 h the logits of a block take as much
    memory as the weight's gradient; for h below 2048 they take 8192 v bytes, 1.05 GB for v =
    128,256.
    """
    return min(-(-num_tokens // 2), max(2 * hidden_size, MIN_FUSED_ROWS))


@dataclass(frozen=True)
class LossConfig:
    """Flags of the loss: cross-entropy and its reduction, or a loss of the user's own."""

    cross_entropy_impl: str | None = flag(
        None,
        "chunked never holds the logits of more than a block of tokens (the default); eager holds "
        "all of them, as Megatron-LM does; te is Transformer Engine's kernel over all of them",
        choices="chunked eager te",
        if_changed="allow",
    )
    cross_entropy_chunk_size: int | None = flag(
        None,
        "tokens of a chunk; by default an eighth of a micro-batch's, 1024 at most, and for "
        "cross-entropy of 16-bit logits on a GPU half, 4096 or twice the hidden size at most",
        COUNT,
        "tokens",
        if_changed="allow",
    )
    ignore_index: int = flag(
        -100,
        "labels that equal this id weigh nothing in the loss, in training and evaluation",
        Range(-100),
    )
    loss_reduction: str = flag(
        "token",
        "what weighs alike in the global batch: each token, each sample, or each sample by the "
        "square root of its tokens",
        choices=REDUCTIONS,
    )
    label_smoothing: float = flag(0.0, "share of each target spread over the vocabulary", BELOW_ONE)
    z_loss_coeff: float = flag(
        0.0, "weight of the squared log-sum-exp of the logits (PaLM's z-loss)", WEIGHT
    )
    loss: str | None = flag(
        None,
        "a loss of your own: module:LossConfigClass or file.py:LossConfigClass; or "
        "cross-entropy, in a program that has another by default",
        from_checkpoint=False,
    )
    loss_args: list[str] = flag(
        [], "fields of --loss, such as gamma=2.0", nargs="+", from_checkpoint=False
    )

    def resolved(self, *, fused: bool, fusion_impl: str) -> LossConfig:
        """Return a copy with ``cross_entropy_impl`` filled in, and ``loss`` None if cross-entropy.

        An unset implementation becomes "chunked"; but if ``fused`` asks for a fused cross-entropy
        and there is no custom loss, it becomes "te" if ``fusion_impl`` is "te", else "eager".
        """
        loss = None if self.loss == CROSS_ENTROPY else self.loss
        impl = self.cross_entropy_impl or "chunked"
        if self.cross_entropy_impl is None and fused and loss is None:
            impl = "te" if fusion_impl == "te" else "eager"
        return dataclasses.replace(self, cross_entropy_impl=impl, loss=loss)

    def errors(self, *, per_token: bool, has_te: bool) -> Iterator[FlagError]:
        """Yield an error for each fault in the flags of the loss.

        Args:
            per_token: whether gradients are divided by the number of targets of the global batch.
            has_te: whether Transformer Engine is available.
        """
        if self.ignore_index < 0 and self.ignore_index != -100:
            yield FlagError(
                "--ignore-index",
                self.ignore_index,
                "must be a token id, 0 or more, or -100 for none",
                "give the id whose labels are to weigh nothing",
            )
        if self.loss_reduction != "token" and not per_token:
            yield FlagError(
                f"--loss-reduction {self.loss_reduction}",
                None,
                "is calibrated over the global batch, which `--no-calculate-per-token-loss` gives "
                "up",
                "leave one of them out",
            )
        if self.loss_args and self.loss is None:
            yield FlagError("--loss-args", None, "needs `--loss`", "name the loss that takes them")
        impl = self.cross_entropy_impl
        instead = f"or give `--loss {CROSS_ENTROPY}`"
        parts = {"--label-smoothing": self.label_smoothing, "--z-loss-coeff": self.z_loss_coeff}
        for name, value in parts.items():
            if value and self.loss is not None:
                yield FlagError(
                    name,
                    value,
                    f"is a part of cross-entropy, which `--loss` ({self.loss}) replaces",
                    f"leave it out, {instead}",
                )
        if impl == "te" and not has_te:
            yield FlagError(
                "--cross-entropy-impl te",
                None,
                "needs Transformer Engine and a GPU, and one of them was not found",
                "use chunked",
            )
        chunk_size = self.cross_entropy_chunk_size is not None
        given = {"--cross-entropy-chunk-size": chunk_size, **parts, "--loss": self.loss is not None}
        for name in (name for name, value in given.items() if value and impl != "chunked"):
            yield FlagError(
                name,
                None,
                f"needs `--cross-entropy-impl chunked`, but it is {impl}",
                "leave out `--cross-entropy-impl` and "
                f"`--cross-entropy-loss-fusion`{f', {instead}' if name == '--loss' else ''}",
            )
