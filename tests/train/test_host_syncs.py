"""A step would wait for a GPU in one place, once; a host that learns late counts the same."""

import inspect
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from megatron_ext.optim.builder import choose_kernels
from megatron_ext.train.loop import IntervalMetrics
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.host_syncs import READ, host_syncs
from tests.ranks import ParallelContext, ranks
from tests.runs_from_inside import build, one_step, spoil_steps
from tests.training_runs import TINY, mock_data, train

FLAGS = [*TINY, *mock_data(), "--train-iters", "100"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"


def places_of_a_step(run: Run) -> list[str]:
    """Return the places of the third step, before which 8-bit scales get histories.

    The device decides on updates, as a GPU does. The host then reads what the step before did: by
    then that step is over, and the passes of this one wait for the device.
    """
    choose_kernels(run.optimizer, fused=True)
    window = IntervalMetrics(run)
    for _ in range(2):
        one_step(run, window)
    batches = run.train_source.next_step(run.batch_size.num_microbatches)
    with host_syncs() as places:
        one_step(run, window, batches)
    assert not run.runner.settled
    window.settle()
    return places


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16 --ema-decay 0.9 --label-smoothing 0.1 --z-loss-coeff 1e-4",
        "--cross-entropy-impl eager --no-calculate-per-token-loss --log-num-zeros-in-grad",
        "--mtp-num-layers 1 --reset-attention-mask --eod-mask-loss",
        "--bf16 --ffn-hidden-size 192 --fp8-format hybrid",
    ],
)
@ranks()
def test_a_step_asks_for_the_update_before_it_alone(context: ParallelContext, words: str) -> None:
    assert places_of_a_step(build([*FLAGS, *words.split()], context)) == [READ]


@ranks()
def test_a_host_that_decides_asks_for_the_norm(context: ParallelContext) -> None:
    """An optimizer that cannot skip an update by itself needs it."""
    run = build([*FLAGS, *"--optimizer sgd --no-use-distributed-optimizer".split()], context)
    with host_syncs() as places:
        one_step(run, IntervalMetrics(run))
    assert places == [READ]
    assert run.runner.settled


@ranks()
def test_megatron_cores_schedule_also_asks_for_the_tokens(context: ParallelContext) -> None:
    run = build([*FLAGS, "--pipeline-schedule", "core-1f1b"], context)
    tokens = "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads"
    # Newer releases divide by a number that is at least 1, and need not ask.
    asks = "if num_tokens > 0" in inspect.getsource(finalize_model_grads)
    assert places_of_a_step(run) == ([tokens, READ] if asks else [READ])


@ranks()
def test_experts_ask_for_their_loads(context: ParallelContext) -> None:
    """megatron-core's dispatcher must know how many tokens each expert gets, layer by layer.

    So must the experts of a CPU, which multiply one after the other.
    """
    places = places_of_a_step(build([*FLAGS, *EXPERTS.split()], context))
    assert places.count(READ) == 1
    rest = {place.rpartition(":")[0] for place in places if place != READ}
    rest.discard("megatron_ext/layers/experts.py")
    assert all(path.startswith("megatron/core/transformer/moe/") for path in rest)


def test_the_recorder_sees_what_would_wait() -> None:
    x = torch.arange(4.0)
    from megatron_ext.optim.update import _square

    with host_syncs() as places:
        _square(x)
        assert places == []
    for ask in (float, bool, int):
        assert _seen_in_package(ask) == 1
    for method in ("tolist", "numpy", "cpu", "nonzero"):
        assert _seen_in_package(methodcaller(method)) == 1
    assert _seen_in_package(lambda x: torch.tensor(1, device=x.device)) == 1
    assert _seen_in_package(lambda x: x[x > 0]) == 1


def _seen_in_package(ask: object) -> int:
    """Count the places noted when a function of this package hands a tensor to ``ask``."""
    namespace: dict[str, object] = {}
    code = compile("def run(ask, x):\n    ask(x)\n", "/any/megatron_ext/here.py", "exec")
    exec(code, namespace)
    with host_syncs() as places:
        namespace["run"](ask, torch.ones(()))  # type: ignore[operator]
    return places.count("megatron_ext/here.py:run")


SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 7 --lr-warmup-iters 4 --log-interval 3".split(),
    *"--ema-decay 0.8 --ema-start 2 --eval-iters 1 --eval-interval 5".split(),
]
BAD = (2, 5, 6)
TIMED = ("seconds", "per_second", "tflops", "mfu", "time", "throughput")


def _prepare(run: Run, *, late: bool) -> None:
    choose_kernels(run.optimizer, fused=True)  # type: ignore[arg-type]
    spoil_steps(run, BAD)
    step = run.runner.train

    def train_and_ask(*arguments: Any) -> Any:
        result = step(*arguments)
        run.runner.settle()
        assert run.runner.settled
        return result

    if not late:
        run.runner.train = train_and_ask  # type: ignore[method-assign]


def _rows(folder: Path, words: str, num_ranks: int, *, late: bool) -> list[dict[str, Any]]:
    prepare = partial(_prepare, late=late)
    flags = [*SMALL, "--save-interval", "4", *words.split()]
    rows = train(flags, folder, num_ranks, prepare=prepare)
    return [{k: v for k, v in row.items() if not any(x in k for x in TIMED)} for row in rows]


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [pytest.param(1, "", marks=pytest.mark.slow), (2, "--bf16 --pipeline-model-parallel-size 2")],
)
def test_nothing_shows_that_it_learned_late(num_ranks: int, words: str, tmp_path: Path) -> None:
    found = {late: _rows(tmp_path / str(late), words, num_ranks, late=late) for late in (0, 1)}
    assert found[0] == found[1]
    skipped = [row["total_skipped_iterations"] for row in found[1] if row["kind"] == "train"]
    assert skipped == [0, 1, 3]
    for step in (4, 7):
        tensors = [
            whole_tensors(tmp_path / str(late) / f"iter_{step:07d}", tmp_path / f"{late}.pt")
            for late in (0, 1)
        ]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            assert torch.equal(tensor, tensors[1][name]), name


@ranks()
def test_the_rate_of_each_step_counts_the_updates_before_it(context: ParallelContext) -> None:
    run = build(SMALL, context)
    optimizer = run.optimizer
    choose_kernels(optimizer, fused=True)
    spoil_steps(run, BAD)
    window = IntervalMetrics(run)
    rates = []
    step_with_ready_grads = optimizer.step_with_ready_grads

    def noted() -> bool:
        rates.append(optimizer.param_groups[0]["lr"])
        return bool(step_with_ready_grads())

    optimizer.step_with_ready_grads = noted  # type: ignore[method-assign]
    for step in range(7):
        one_step(run, window)
        assert not run.runner.settled
        assert run.progress.iteration == step + 1
    # The warm-up of four updates: a skipped step leaves the rate to the next one.
    updates = [sum(bad not in BAD for bad in range(1, step)) for step in range(1, 8)]
    assert rates == pytest.approx([1e-3 * min(n, 4) / 4 for n in updates])
    assert run.progress.skipped_iterations == 3
    window.settle()
    assert run.runner.settled
