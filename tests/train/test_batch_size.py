"""How many samples the splits of a run need, and the counters of its progress."""

from dataclasses import replace

import pytest

from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.train.batch_size import Progress, StepStats, split_sizes
from tests.training_runs import SMALL, config_of, without

LENGTH = 32
WORDS = [*without(SMALL, "--train-iters", "--eval-interval", "--eval-iters")]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        # One evaluation more than intervals, for the one after the last step.
        ("--train-iters 7 --eval-interval 3 --eval-iters 2", [28, 24, 8]),
        ("--train-iters 6 --eval-interval 3 --eval-iters 2", [24, 24, 8]),
        ("--train-samples 27 --eval-interval 3 --eval-iters 2", [27, 24, 8]),
        ("--train-iters 7 --eval-interval 3 --eval-iters 0", [28, 0, 0]),
        ("--train-iters 7 --eval-interval 3 --eval-iters 2 --skip-train", [28, 8, 8]),
        ("--train-iters 7 --eval-interval 3 --eval-iters 2 --full-validation", [28, None, 8]),
    ],
)
def test_the_samples_of_each_split(words: str, sizes: list[int | None]) -> None:
    config = config_of([*WORDS, *words.split()])
    assert split_sizes(config.training, LENGTH, 1) == sizes


def test_progress_adds_up_and_survives_a_file() -> None:
    progress = Progress(best_checkpoints=[BestCheckpoint(2, 1.5, True)])
    for _ in range(3):
        progress.advance(StepStats(4, 128, 2.5), 2)
    assert (progress.iteration, progress.consumed_train_samples) == (3, 12)
    assert (progress.floating_point_operations, progress.epoch) == (7.5, 1.5)
    progress.count_average(0.5)
    progress.count_average(0.5)
    assert (progress.average_updates, progress.average_start) == (2, 0.25)
    assert Progress.from_dict({**progress.to_dict(), "of_a_newer_version": 1}) == progress
    plain = Progress()
    plain.advance(StepStats(4, 128, 2.5), None)
    assert plain.epoch is None


def test_an_older_checkpoint_has_averaged_in_each_step_from_a_share_that_is_not_known() -> None:
    old = {"iteration": 5, "consumed_train_samples": 20}
    progress = Progress.from_dict(old)
    assert (progress.average_updates, progress.average_start) == (5, None)
    progress.count_average(0.5)
    assert (progress.average_updates, progress.average_start) == (6, None)
    assert progress.average_note is None
    # Before its first step nothing has been averaged.
    fresh = Progress.from_dict({"iteration": 0})
    assert (fresh.average_updates, fresh.average_start) == (0, 1.0)
    known = Progress.from_dict({**old, "average_updates": 3, "average_start": 0.5})
    assert (known.average_updates, known.average_start) == (3, 0.5)


@pytest.mark.parametrize(
    ("updates", "share", "said"),
    [(0, 1.0, None), (2, 0.25, "25.0% of the"), (9, 0.001, "0.1% of the"), (9, 0.00099, None)],
)
def test_when_an_average_is_still_its_start(updates: int, share: float, said: str | None) -> None:
    progress = replace(Progress(), average_updates=updates, average_start=share)
    note = progress.average_note
    if said is None:
        assert note is None
    else:
        assert note is not None and note.startswith(said)
        assert note.endswith(f"{updates} update(s) before")
