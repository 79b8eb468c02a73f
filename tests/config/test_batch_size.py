"""Growing batches and run lengths equal counts made by hand."""

from typing import Any

import pytest

from megatron_ext.config.batch_schedule import parse_batch_schedule
from megatron_ext.config.batch_size import BatchSize, number_of_iterations, samples_after
from megatron_ext.config.training import TrainingConfig


def _training(**values: Any) -> TrainingConfig:
    return TrainingConfig(**{"global_batch_size": 16, "micro_batch_size": 2, **values})


def _errors(replicas: int, **values: Any) -> list[str]:
    return list(_training(train_iters=1, **values).errors(replicas))


def test_constant() -> None:
    size = BatchSize(_training(), 8, 2)
    assert (size.global_batch_size, size.num_microbatches) == (16, 4)
    assert not size.update(1000)


def _seen(size: BatchSize, *consumed: int) -> list[tuple[int, int]]:
    seen = []
    for samples in consumed:
        size.update(samples)
        seen.append((size.global_batch_size, size.num_microbatches))
    return seen


def test_ramp_up_grows_by_its_increment_or_is_refused() -> None:
    # From 4 to 16 by 4 over 24 samples: one increment for every 8 samples.
    training = _training(rampup_batch_size=[4, 4, 24], train_samples=60)
    seen = _seen(BatchSize(training, 8, 1), 0, 7, 8, 16, 23, 25)
    assert [batch for batch, _ in seen] == [4, 4, 8, 12, 12, 16]
    # Batches 4, 4, 8, 12 reach 28 samples; then 16 each: 28 + 2 * 16 = 60.
    assert number_of_iterations(training, 8, 1) == 6
    # Samples that end with a step of the ramp, and one sample before its end.
    ends = [(4, 1), (8, 2), (16, 3), (28, 4), (27, 3), (15, 2)]
    for samples, steps in ends:
        shorter = _training(rampup_batch_size=[4, 4, 24], train_samples=samples)
        assert number_of_iterations(shorter, 8, 1) == steps, samples
    assert number_of_iterations(_training(train_samples=60), 8, 1) == 3
    assert number_of_iterations(_training(train_iters=7), 8, 1) == 7
    assert _errors(4, rampup_batch_size=[4, 4, 24]) == [
        "`--rampup-batch-size` reaches the global batch size 4, which must be at least "
        "micro-batch size × data-parallel size (8); use a larger one."
    ]
    assert _errors(2, rampup_batch_size=[4, 6, 24]) == [
        "`--rampup-batch-size` reaches the global batch size 10, which must be divisible by "
        "micro-batch size × data-parallel size (4); use other sizes, or give "
        "`--decrease-batch-size-if-needed`."
    ]
    assert _errors(2, rampup_batch_size=[4, 4, 24]) == []
    # The steps of the ramp are equally long, even if that is no whole number: here 8 1/3 samples.
    uneven = BatchSize(_training(rampup_batch_size=[4, 4, 25]), 8, 1)
    assert [batch for batch, _ in _seen(uneven, 8, 9, 16, 17, 26)] == [4, 8, 8, 12, 16]
    # Without samples the ramp is over after the first step.
    at_once = _training(rampup_batch_size=[4, 4, 0], train_samples=60)
    size = BatchSize(at_once, 8, 1)
    assert size.changes
    assert _seen(size, 0, 4) == [(4, 2), (16, 8)]
    assert number_of_iterations(at_once, 8, 1) == 1 + (60 - 4) // 16


def test_samples_of_steps_grow_with_the_batch() -> None:
    # Batches of 4, 4, 8 and 12 samples, then 16 each.
    training = _training(rampup_batch_size=[4, 4, 24])
    sums = [samples_after(steps, training, 8, 1) for steps in range(7)]
    assert sums == [0, 4, 8, 16, 28, 44, 60]
    # The same steps, counted from where one of them ends.
    assert samples_after(2, training, 8, 1, consumed=8) == 8 + 12
    assert samples_after(3, training, 8, 1, consumed=28) == 3 * 16
    assert samples_after(3, _training(), 8, 2, consumed=5) == 3 * 16
    assert not BatchSize(_training(), 8, 2).changes


def test_sizes_are_rounded_down_to_what_ranks_can_share() -> None:
    rounding = {"rampup_batch_size": [5, 11, 20], "decrease_batch_size_if_needed": True}
    assert _seen(BatchSize(_training(**rounding), 8, 2), 0, 21) == [(4, 1), (16, 4)]
    (error,) = _errors(4, **rounding)
    assert "`--rampup-batch-size` reaches the global batch size 5, which must be at least" in error
    (error,) = _errors(4, step_batch_size_schedule="0:4 96:16")
    assert "`--step-batch-size-schedule` reaches the global batch size 4, which must be" in error


def test_a_schedule_of_steps_counts_tokens() -> None:
    # Sequences of 8 tokens: batch 4 from 0, 8 from 12 samples on, 16 from 250 samples on. A
    # sequence counts for a size if it holds the first of its tokens.
    size = BatchSize(_training(step_batch_size_schedule="0:4 103:8, 2k:16"), 8, 1)
    seen = _seen(size, 0, 11, 12, 249, 250, 10**6)
    assert seen == [(4, 2), (4, 2), (8, 4), (8, 4), (16, 8), (16, 8)]
    # 3 steps of 4 reach 12 samples, 30 steps of 8 reach 252, then 16 each.
    training = _training(step_batch_size_schedule="0:4 96:8 2000:16", train_samples=252 + 32)
    assert number_of_iterations(training, 8, 1) == 3 + 30 + 2


def test_numbers_of_a_schedule_have_suffixes() -> None:
    steps = parse_batch_schedule("0:1K 2k:3 4M:5 0.5b:6 7T:8")
    assert steps == [(0, 1000), (2000, 3), (4 * 10**6, 5), (5 * 10**8, 6), (7 * 10**12, 8)]
    assert parse_batch_schedule("0:4 2.01K:8") == [(0, 4), (2010, 8)]


def test_epochs_become_steps_and_the_schedule_decides_the_last_size() -> None:
    epochs = TrainingConfig(train_epochs=3).in_steps(7)
    assert (epochs.train_iters, epochs.train_epochs) == (21, None)
    assert TrainingConfig(train_iters=4).in_steps(7).train_iters == 4
    resolved = TrainingConfig(micro_batch_size=3, step_batch_size_schedule="0:4 96:8").resolved(2)
    assert resolved.global_batch_size == 8
    assert TrainingConfig(micro_batch_size=3).resolved(2).global_batch_size == 6


@pytest.mark.parametrize(
    "text", ["8:4", "0:4 0:8", "0:4 0.5:8", "0:4 2.0105K:8", "0:4 x:8", "4", "0:0", ""]
)
def test_malformed_schedules(text: str) -> None:
    with pytest.raises(ValueError):
        parse_batch_schedule(text)
