"""The batch size of each step, and what follows from it: the iterations and samples of a run."""

from __future__ import annotations

from megatron_ext.config.training import TrainingConfig


class BatchSize:
    """The batch size of the current step: constant, or changing with the consumed samples.

    Attributes:
        samples_per_microbatch: the micro-batch size times the data-parallel size.
        num_microbatches: the micro-batches of the current step on each data-parallel rank.
        global_batch_size: the samples of the current step on all ranks.
        changes: whether the size changes during the run.
    """

    num_microbatches = 0
    global_batch_size = 0

    def __init__(
        self, training: TrainingConfig, seq_length: int | None, data_parallel_size: int
    ) -> None:
        micro_batch_size, self._final = training.batch_sizes
        self.samples_per_microbatch = micro_batch_size * data_parallel_size
        self._training = training
        self._replicas = data_parallel_size
        self._ramp = training.rampup_batch_size
        self._ramp_end = -1
        self._steps: list[tuple[int, int]] = []
        if training.step_batch_size_schedule is not None:
            from megatron_ext.config.batch_schedule import parse_batch_schedule

            steps = parse_batch_schedule(training.step_batch_size_schedule)
            self._steps = [(tokens // (seq_length or 1), batch) for tokens, batch in steps]
            self._ramp_end = self._steps[-1][0] - 1
        elif self._ramp is not None:
            self._ramp_end = self._ramp[2]
        self.changes = self._ramp_end >= 0
        self.update(0)

    def update(self, consumed_samples: int) -> bool:
        """Set the batch size of the step that begins after ``consumed_samples`` samples.

        Return whether the number of micro-batches has changed.
        """
        before = self.num_microbatches
        number = self._training.microbatches(self._size_at(consumed_samples), self._replicas)
        assert number is not None, "the flags were checked before"
        self.num_microbatches = number
        self.global_batch_size = number * self.samples_per_microbatch
        return number != before

    def _size_at(self, consumed_samples: int) -> int:
        """Return the global batch size that the flags set after ``consumed_samples`` samples."""
        if self._steps:
            return max(step for step in self._steps if step[0] <= consumed_samples)[1]
        if self._ramp is None or consumed_samples > self._ramp_end:
            return self._final
        start, increment, samples = self._ramp
        # A float, as in Megatron-LM, which decides the step at which a size begins.
        each = samples / ((self._final - start) // increment)
        return start + (int(consumed_samples / each) * increment if each else 0)

    def is_final(self, consumed_samples: int) -> bool:
        """Return whether the batch size no longer changes after ``consumed_samples`` samples."""
        return consumed_samples > self._ramp_end


def number_of_iterations(
    training: TrainingConfig, seq_length: int | None, data_parallel_size: int
) -> int:
    """Return the number of training iterations.

    With ``--train-samples`` it is computed from the batch size of each step; otherwise it is
    ``--train-iters``, or 0 if that flag is unset too. Only a batch-size schedule in tokens needs
    ``seq_length``.
    """
    if training.train_samples is None:
        return training.train_iters or 0
    size = BatchSize(training, seq_length, data_parallel_size)
    iterations = consumed = 0
    while not size.is_final(consumed):
        if consumed + size.global_batch_size > training.train_samples:
            return iterations
        consumed += size.global_batch_size
        iterations += 1
        size.update(consumed)
    return iterations + (training.train_samples - consumed) // size.global_batch_size


def samples_after(
    iterations: int,
    training: TrainingConfig,
    seq_length: int | None,
    data_parallel_size: int,
    *,
    consumed: int = 0,
) -> int:
    """Return how many samples the next ``iterations`` steps use, after ``consumed`` samples.

    The flags in ``training`` may give the steps different batch sizes. Only a batch-size schedule
    in tokens needs ``seq_length``.
    """
    size = BatchSize(training, seq_length, data_parallel_size)
    size.update(consumed)
    steps = 0
    before = consumed
    while steps < iterations and not size.is_final(consumed):
        consumed += size.global_batch_size
        steps += 1
        size.update(consumed)
    return consumed - before + (iterations - steps) * size.global_batch_size
