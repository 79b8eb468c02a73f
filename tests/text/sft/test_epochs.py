"""Plans of steps: every conversation once in an epoch, the same on every rank, at any step."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.samplers import Epochs, StepPlan, StepSampler
from megatron_ext.errors import DataError
from megatron_ext.text.sft.epochs import BudgetEpochs, PackedEpochs, PaddedEpochs
from megatron_ext.text.sft.packing import CostModel

MODEL = CostModel(100, 1)
LENGTHS = np.random.default_rng(1).integers(1, 60, 50)
CAPACITY = 64


def epochs(kind: str, ranks: int, seed: int | None) -> Epochs:
    if kind == "padded":
        return PaddedEpochs(LENGTHS.size, 8, ranks, 2, seed)
    if kind == "packed":
        return PackedEpochs(LENGTHS, CAPACITY, 8, ranks, MODEL, seed)
    return BudgetEpochs(LENGTHS, CAPACITY, 8, ranks, MODEL, seed, multiple=3)


KINDS = ["padded", "packed", "token-budget"]


def samples(step: list[list[list[int]]]) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(step)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [7, None])
def test_an_epoch_holds_every_sample_once(kind: str, ranks: int, seed: int | None) -> None:
    plan = epochs(kind, ranks, seed)
    orders = []
    for epoch in (0, 1):
        steps = [plan.step(epoch, step) for step in range(plan.steps_per_epoch)]
        orders.append([sorted(samples(step)) for step in steps])
        assert sorted(chain.from_iterable(orders[-1])) == list(range(LENGTHS.size))
        for step in steps:
            assert len(step) == ranks
            assert len({len(rank) for rank in step}) == 1
            for row in chain.from_iterable(step):
                assert LENGTHS[row].sum() <= CAPACITY
    assert (orders[0] == orders[1]) == (seed is None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_holds_the_same_samples_on_any_number_of_ranks(kind: str) -> None:
    plans = [epochs(kind, ranks, 7) for ranks in (1, 2, 4)]
    for step in range(plans[0].steps_per_epoch):
        assert len({tuple(sorted(samples(plan.step(3, step)))) for plan in plans}) == 1


@pytest.mark.parametrize(("kind", "rows"), [("padded", 8), ("packed", 8), ("token-budget", None)])
def test_rows_of_a_step(kind: str, rows: int | None) -> None:
    plan = epochs(kind, 2, 7)
    for step in range(plan.steps_per_epoch):
        count = len(plan.step(0, step)[0])
        assert count % 3 == 0 if rows is None else count == rows // 2
    with pytest.raises(DataError, match=r"Step \d+ must be one of the \d+ steps of an epoch"):
        plan.step(0, plan.steps_per_epoch)


def test_a_budget_counts_conversations() -> None:
    plan = epochs("token-budget", 2, 7)
    sizes = [len(samples(plan.step(0, step))) for step in range(plan.steps_per_epoch)]
    assert sizes == [8] * 6 + [2]


def test_padded_rows_are_dealt_as_other_samples_are() -> None:
    """Micro-batch k of rank r has the samples from (k * ranks + r) * size on."""
    one = PaddedEpochs(16, 8, 1, 2, 7).step(0, 1)[0]
    for rank, rows in enumerate(PaddedEpochs(16, 8, 2, 2, 7).step(0, 1)):
        assert rows == [one[(k * 2 + rank) * 2 + i] for k in range(2) for i in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_goes_on_at_any_step(kind: str) -> None:
    def microbatches(first: int, count: int) -> list[Any]:
        plan = StepPlan(epochs(kind, 2, 7), 1)
        number = sum(plan.num_microbatches(first + i) for i in range(count))
        return list(islice(iter(StepSampler(plan, 1, first)), number))

    whole = microbatches(0, 20)
    for first in (0, 3, 9, 17):
        assert whole[len(whole) - len(microbatches(first, 20 - first)) :] == microbatches(
            first, 20 - first
        )


def test_micro_batches_have_rows() -> None:
    plan = StepPlan(epochs("packed", 2, 7), 2)
    rows = epochs("packed", 2, 7).step(0, 1)
    assert plan.num_microbatches(1) == 2
    for rank in range(2):
        flat = [list(row) for batch in plan.microbatches(1, rank) for row in batch]
        assert flat == rows[rank]
        assert [len(batch) for batch in plan.microbatches(1, rank)] == [2, 2]
