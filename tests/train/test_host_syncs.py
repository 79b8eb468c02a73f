"""A step of training would wait for a GPU in one place, once."""

from __future__ import annotations

from operator import methodcaller

import pytest
import torch

from megatron_ext.optim.builder import choose_kernels
from megatron_ext.train.metrics import IntervalMetrics
from megatron_ext.train.run import Run
from tests.host_syncs import READ, host_syncs
from tests.ranks import ParallelContext, ranks
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, mock_data

FLAGS = [*TINY, *mock_data(), "--train-iters", "100"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"


def places_of_a_step(run: Run) -> list[str]:
    """Return the places of the third step, before which 8-bit scales get histories.

    The device decides on updates, as a GPU does. The host then reads what the step before did: by
    then that step is over, and the passes of this one wait for the device.
    """
    assert run.optimizer is not None
    choose_kernels(run.optimizer, fused=True)
    window = IntervalMetrics(run)
    for _ in range(2):
        one_step(run, window)
    batches = run.train_source.next_step(run.batch_size.num_microbatches)
    with host_syncs() as places:
        one_step(run, window, batches)
    assert not run.runner.settled
    window.report()
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
    """A CPU decides so, and an optimizer that cannot skip an update by itself needs it."""
    run = build(FLAGS, context)
    with host_syncs() as places:
        one_step(run, IntervalMetrics(run))
    assert places == [READ]
    assert run.runner.settled


@ranks()
def test_megatron_cores_schedule_also_asks_for_the_tokens(context: ParallelContext) -> None:
    run = build([*FLAGS, "--pipeline-schedule", "core-1f1b"], context)
    tokens = "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads"
    assert places_of_a_step(run) == [tokens, READ]


@ranks()
def test_experts_ask_for_their_loads(context: ParallelContext) -> None:
    """megatron-core's dispatcher must know how many tokens each expert gets, layer by layer."""
    places = places_of_a_step(build([*FLAGS, *EXPERTS.split()], context))
    assert places.count(READ) == 1
    rest = {place.rpartition(":")[0] for place in places if place != READ}
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
