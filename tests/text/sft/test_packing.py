"""Packing against slow definitions, hand-made rows, and a log-normal mix of lengths."""

from itertools import chain, combinations, islice, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.samplers import Ints, shuffled
from megatron_ext.data.step_plan import Epochs, Row, StepPlan, StepSampler
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.rules import SECTIONS
from megatron_ext.text.sft.dataset import cost_model
from megatron_ext.text.sft.packing import (
    BudgetEpochs,
    CostModel,
    PackedEpochs,
    PaddedEpochs,
    balance,
    cost,
    pack,
    small_ends,
    token_budget,
)


def of_sizes(h: int, f: int, n: int, **more: Any) -> CostModel:
    """Return the cost of a dense model, of one layer without a head unless ``more`` says so."""
    sizes = {"kv_channels": h // n, "num_layers": 1, "padded_vocab_size": 0, **more}
    model = ModelConfig(hidden_size=h, ffn_hidden_size=f, num_attention_heads=n, **sizes)
    return cost_model(RunConfig(model=model, sections=tuple(kind() for kind in SECTIONS)))


MODEL = of_sizes(
    4096, 14336, 32, num_query_groups=8, swiglu=True, num_layers=32, padded_vocab_size=128256
)
RANKS = 4


def log_normal(count: int, median: float, sigma: float, longest: int) -> Ints:
    """Return lengths of instruction data: a log-normal, cut at the sequence length."""
    drawn = np.random.default_rng(7).lognormal(np.log(median), sigma, count)
    lengths: Ints = np.clip(drawn.astype(np.int64), 1, longest)
    return lengths


CHAT, LONG = log_normal(50_000, 600, 1.0, 8192), log_normal(50_000, 2000, 1.3, 32768)
MIXES = {"chat 8k": (CHAT, 8192), "long 32k": (LONG, 32768)}


def imbalances(lengths: Ints, plan: list[list[list[Row]]]) -> NDArray[np.float64]:
    """Return the highest cost of a rank over the mean, minus 1, for each step."""
    costs = [[sum(cost(lengths[row], MODEL) for row in rank) for rank in step] for step in plan]
    loads = np.array(costs, float)
    above: NDArray[np.float64] = loads.max(axis=1) / loads.mean(axis=1) - 1
    return above


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[Row]:
    rows: list[Row] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[sample] <= capacity:
                row.append(sample)
                break
        else:
            rows.append([sample])
    return rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_pack_is_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    assert pack(lengths, capacity) == first_fit_decreasing(lengths, capacity)


def test_pack_names_a_sample_that_does_not_fit() -> None:
    with pytest.raises(DataError, match=r"Sample 1 has 9 tokens, but a packed row holds 8; cut"):
        pack([3, 9], 8)
    with pytest.raises(DataError, match=r"Sample 2 has 0 tokens, but a packed sample needs at"):
        pack([3, 8, 0], 8)


def test_cost_counts_products_and_doubles_at_twelve_times_the_width_of_a_layer() -> None:
    model = of_sizes(64, 256, 4)
    alone = 768 * model.linear  # 12 h tokens without attention
    assert cost([768], model) == 2 * alone
    assert cost([384, 384], model) * 2 == 3 * alone  # half the pairs of positions
    assert cost([], model) == 0
    h, f, n, g, d, layers, v = 32, 80, 4, 2, 16, 3, 100
    sizes = {"num_query_groups": g, "kv_channels": d, "num_layers": layers}
    model = of_sizes(h, f, n, swiglu=True, padded_vocab_size=v, **sizes)
    shapes = [(h, n * d), (h, g * d), (h, g * d), (n * d, h), (h, f), (h, f), (f, h)]
    linear = layers * sum(a * b for a, b in shapes) + h * v
    per_pair = layers * n * d  # scores and values: 2 n d, of which the causal half
    assert model.linear * per_pair == model.quadratic * linear


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=6, max_size=6))
def test_balance_finds_the_best_of_all_deals(costs: list[int]) -> None:
    # Any three of six are one swap away from any other three or from the rest.
    halves = [sum(three) for three in combinations(costs, 3)]
    best = min(max(half, sum(costs) - half) for half in halves)
    ranks = balance(costs, 2)
    assert sorted(chain(*ranks)) == list(range(6)) and [len(rank) for rank in ranks] == [3, 3]
    assert max(sum(costs[i] for i in rank) for rank in ranks) <= best * 1.001


def test_balance_swaps_where_the_greedy_deal_is_uneven_and_refuses_uneven_rows() -> None:
    # Greedy deals 900 + 500 + 100 and 700 + 600 + 400; 500 and 600 change places.
    costs = [900, 700, 600, 500, 400, 100]
    loads = [sum(costs[i] for i in rank) for rank in balance(costs, 2)]
    assert loads == [1600, 1600]
    with pytest.raises(ConfigError, match=r"step \(6\) must be a positive multiple of .* \(4\)"):
        balance([1] * 6, 4)


def test_small_rows_come_first_and_last() -> None:
    weights = np.array([50, 10, 40, 20, 30])
    assert [int(weights[i]) for i in small_ends(range(5), weights)] == [10, 30, 50, 40, 20]


def test_a_step_depends_on_seed_epoch_and_number_only() -> None:
    lengths = MIXES["chat 8k"][0][:2000]
    first, resumed, other = (PackedEpochs(lengths, 8192, 16, RANKS, MODEL, s) for s in (1, 1, 2))
    run = [first.step(e, s) for e, s in product((0, 1), range(first.steps_per_epoch))]
    number = first.steps_per_epoch + 2
    assert resumed.step(1, 2) == run[number]
    assert resumed.step(0, 0) == run[0] == first.step(0, 0)
    assert other.step(0, 0) != run[0]
    assert run[first.steps_per_epoch] != run[0]


def test_epochs_exchange_equal_samples_and_end_with_the_row_that_is_not_full() -> None:
    epochs = PackedEpochs([4] * 20, 8, 10, 1, MODEL, 1)
    pairs = [{frozenset(row) for row in epochs.step(epoch, 0)[0]} for epoch in (0, 1)]
    assert pairs[0] != pairs[1]
    for seed in range(5):
        epochs = PackedEpochs([8] * 7 + [1], 8, 2, 2, MODEL, seed)
        assert [7] in chain(*epochs.step(0, 3))


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    assert shuffled(8, 1234, 0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]
    assert sorted(shuffled(1000, 3, 1).tolist()) == list(range(1000))


@pytest.mark.parametrize("mix", MIXES)
def test_rows_are_filled(mix: str) -> None:
    lengths, capacity = MIXES[mix]
    assert lengths.sum() / (len(pack(lengths, capacity)) * capacity) >= 0.97


@pytest.mark.parametrize("rows_per_rank", [4, 8, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_ranks_are_even_in_every_step_but_the_last(mix: str, rows_per_rank: int) -> None:
    """Four rows for each rank are even on average."""
    lengths, capacity = MIXES[mix]
    epochs = PackedEpochs(lengths, capacity, rows_per_rank * RANKS, RANKS, MODEL, 5)
    found = imbalances(lengths, [epochs.step(0, s) for s in range(epochs.steps_per_epoch - 1)])
    assert (found.mean() if rows_per_rank == 4 else found.max()) <= 0.02


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 5))
def test_budget_gives_all_ranks_as_many_micro_batches(lengths: list[int], ranks: int) -> None:
    plan = token_budget(lengths, 64, ranks, MODEL)
    assert len({len(rank) for rank in plan}) == 1 and len(plan) == ranks
    batches = [batch for rank in plan for batch in rank]
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= 64


def test_budget_falls_back_to_packed_rows_where_even_ones_are_too_long() -> None:
    # Dealt by cost: 6 + 3 and 4 + 4 + 3, which is 11 of at most 10 tokens.
    lengths = [6, 4, 4, 3, 3]
    (rank,) = token_budget(lengths, 10, 1, CostModel(1, 0))
    assert sorted(sorted(lengths[i] for i in batch) for batch in rank) == [[3, 3, 4], [4, 6]]


@pytest.mark.parametrize("mix", MIXES)
def test_budget_deals_even_costs(mix: str) -> None:
    lengths, budget = MIXES[mix]
    steps = shuffled(len(lengths), 3)[: 80 * 256].reshape(80, 256)
    plans = [
        [[[int(step[i]) for i in batch] for batch in rank] for rank in plan]
        for step in steps
        for plan in [token_budget(lengths[step], budget, RANKS, MODEL)]
    ]
    found = imbalances(lengths, plans)
    micro_batches = np.array([len(plan[0]) for plan in plans])
    needed = np.array([-(-int(lengths[step].sum()) // (RANKS * budget)) for step in steps])
    assert found.max() <= 0.02
    assert (micro_batches - needed).max() <= 1


QUADRATIC = CostModel(100, 1)
LENGTHS = np.random.default_rng(1).integers(1, 60, 50)
CAPACITY = 64


def epochs(kind: str, ranks: int, seed: int | None) -> Epochs:
    if kind == "padded":
        return PaddedEpochs(LENGTHS.size, 8, ranks, 2, seed)
    if kind == "packed":
        return PackedEpochs(LENGTHS, CAPACITY, 8, ranks, QUADRATIC, seed)
    return BudgetEpochs(LENGTHS, CAPACITY, 8, ranks, QUADRATIC, seed, multiple=3)


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
        rest = microbatches(first, 20 - first)
        assert whole[len(whole) - len(rest) :] == rest


def test_micro_batches_have_rows() -> None:
    plan = StepPlan(epochs("packed", 2, 7), 2)
    rows = epochs("packed", 2, 7).step(0, 1)
    assert plan.num_microbatches(1) == 2
    for rank in range(2):
        flat = [list(row) for batch in plan.microbatches(1, rank) for row in batch]
        assert flat == rows[rank]
        assert [len(batch) for batch in plan.microbatches(1, rank)] == [2, 2]


def test_a_share_that_fills_its_budget_exactly_is_kept() -> None:
    """Dealing by cost fills two micro-batches of eight; first-fit would make 5 + 3 of one."""
    lengths = [5, 4, 2, 3, 1, 1]
    (rows,) = token_budget(lengths, 8, 1, CostModel(1, 0))
    assert sorted(sorted(lengths[i] for i in row) for row in rows) == [[1, 2, 5], [1, 3, 4]]


def test_the_row_that_packing_opened_last_stays_last() -> None:
    """Five rows in steps of two: the last step has the row of the 5 alone."""
    lengths = [9, 8, 7, 6, 5, 4, 1]
    plan = PackedEpochs(lengths, 10, 2, 1, CostModel(1, 0), 3)
    for epoch in range(8):
        rows = [[lengths[i] for i in row] for row in plan.step(epoch, 2)[0] if row]
        assert rows == [[5]]


def test_ranks_are_even_to_a_thousandth() -> None:
    """Dealt costliest first, one rank has 15,700 and the other 15,500; a swap makes them even."""
    costs = [5500, 5700, 4800, 5400, 5400, 4400]
    assert [sum(costs[row] for row in rank) for rank in balance(costs, 2)] == [15_600] * 2
