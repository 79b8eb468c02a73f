"""A run's requests to stop, its saves, and numbers over the parameters of all ranks."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import STOP_SIGNALS, pass_over
from megatron_ext.train import run as module
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.run import Run, StopRequests, count_parameters
from tests.ranks import ParallelContext, ranks
from tests.runs_from_inside import build
from tests.training_runs import SAME_WEIGHTS, TINY, config_of, mock_data

FLAGS = [*TINY, *mock_data(), "--train-iters", "2"]


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def requests(monkeypatch: pytest.MonkeyPatch, words: str, **options: Any) -> StopRequests:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    training = config_of([*FLAGS, *words.split()]).training
    return StopRequests(training, options.pop("started", 1000.0), **options)


CPU = torch.device("cpu")


@pytest.mark.usefixtures("_handlers")
def test_the_time_limit_is_in_minutes_from_the_start_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    limited = requests(monkeypatch, "--exit-duration-in-mins 2")
    assert limited.watches
    for passed, reason in ((119.0, None), (120.0, None), (120.5, "duration")):
        now[0] = 1000.0 + passed
        assert limited.check(CPU) == reason
    assert not requests(monkeypatch, "").watches


@pytest.mark.usefixtures("_handlers")
def test_torchruns_sigterm_asks_an_elastic_run_to_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_under_torchrun", lambda: True)
    monkeypatch.setattr(module, "is_asked_to_resize", lambda: False)
    elastic = requests(monkeypatch, "", elastic=True)
    assert elastic.check(CPU) is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert elastic.check(CPU) == "resize"
    # If SIGTERM is the exit signal, it is one here too, and comes first.
    words = "--exit-signal-handler"
    both = requests(monkeypatch, words, elastic=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert both.check(CPU) == "signal"
    # From now on, the run is on its way to its end.
    assert all(signal.getsignal(number) is pass_over for number in STOP_SIGNALS)


@pytest.mark.usefixtures("_handlers")
def test_a_signal_that_came_before_the_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = ExitSignal(signal.SIGUSR1)
    earlier.came = True
    words = "--exit-signal-handler --exit-signal SIGUSR1"
    assert requests(monkeypatch, words, exit_signal=earlier).check(CPU) == "signal"


def run_with(**attributes: Any) -> Any:
    """Return a run that has nothing but these attributes."""
    run: Any = Run.__new__(Run)
    training = SimpleNamespace(batch_sizes=(2, 16), eval_iters=3)
    config = SimpleNamespace(training=training, checkpoint=SimpleNamespace(save="here"))
    vars(run).update({"config": config, "device": CPU, "optimizer": "adam", **attributes})
    return run


@ranks(dp=2)
def test_how_many_samples_an_evaluation_has(context: ParallelContext) -> None:
    """Only the first rank has opened the split."""
    run = run_with()
    length = 37 if context.rank == 0 else None
    whole: Any = SimpleNamespace(plan=None, whole_epochs=True, num_samples=length)
    assert run.evaluation_samples(whole) == 37
    whole.num_samples = 37  # on both ranks now
    assert run.evaluation_samples(whole) == 37
    part: Any = SimpleNamespace(plan=None, whole_epochs=False, num_samples=length)
    assert run.evaluation_samples(part) == 48
    planned: Any = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=5))
    assert run.evaluation_samples(planned) == 80


def test_the_list_of_best_checkpoints_returns_if_the_save_of_the_newest_has_failed() -> None:
    failed = [False]
    progress = SimpleNamespace(best_checkpoints=["new"], iteration=4)
    saves = SimpleNamespace(
        newest_has_failed=lambda: failed[0], save=lambda write, iteration, is_last: True
    )
    run = run_with(progress=progress, saves=saves, best_before=["old"], _best_if_failed=None)
    assert run.save()
    run.settle_best()
    assert progress.best_checkpoints == ["new"]
    # The next save, which is not of a new best one, does not change the list if it fails.
    run.save()
    failed[0] = True
    run.settle_best()
    assert progress.best_checkpoints == ["new"]
    run.best_before = ["older"]
    run.save()
    run.settle_best()
    assert progress.best_checkpoints == ["older"]
    progress.best_checkpoints = ["again"]
    run.settle_best()
    assert progress.best_checkpoints == ["again"]


def test_the_last_save_is_one_of_the_last_step() -> None:
    finished: list[Any] = []
    saved: list[Any] = []
    run = run_with(
        progress=SimpleNamespace(iteration=7),
        saved_at=4,
        context=SimpleNamespace(recorder=SimpleNamespace(phase=lambda name: nullcontext())),
        saves=SimpleNamespace(finish=lambda write, iteration: finished.append((write, iteration))),
        save_now=lambda superseded, *, waits: saved.append((superseded, waits)),
    )
    run.finish_saves()
    ((write, iteration),) = finished
    write(waits=True)
    assert iteration == 7 and saved == [((), True)]


def test_a_run_that_does_not_save_has_nothing_to_do() -> None:
    run = run_with()
    run.config.checkpoint.save = None
    assert run.save(is_last=True)
    assert run_with(optimizer=None).save(is_last=True)


SIZES = [*SAME_WEIGHTS, *mock_data(), *"--train-iters 2 --num-layers 2".split()]
TIED = "--no-untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


@ranks()
def test_each_parameter_is_counted_once_on_one_rank(context: ParallelContext) -> None:
    for words in (TIED, EXPERTS):
        run = build([*SIZES, *words.split()], context)
        named = [p.detach().double() for chunk in run.chunks for p in chunk.parameters()]
        total = sum(p.numel() for p in named)
        first = next(run.chunks[0].parameters())
        first.requires_grad_(False)
        assert count_parameters(run.chunks, context) == (total, total - first.numel(), total)
        squares = sum(float(p.square().sum()) for p in named)
        assert run.params_norm() == pytest.approx(math.sqrt(squares), rel=1e-12)


@ranks(tp=2, pp=2)
def test_each_parameter_is_counted_once_on_several_ranks(context: ParallelContext) -> None:
    """Norms and routers have copies on tensor-parallel ranks, and a tied embedding on stages."""
    h, ffn, vocabulary = 64, 172, 2048
    attention = h * (h + 2 * 32) + h * h + 2 * h
    dense = vocabulary * h + h + 2 * (attention + 3 * h * ffn)
    experts = 2 * vocabulary * h + h + 2 * (attention + 4 * h + 4 * 3 * h * ffn)
    for words, total in ((TIED, dense), (EXPERTS, experts)):
        layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        layout += " --sequence-parallel" if words == EXPERTS else ""
        run = build([*SIZES, *words.split(), *layout.split()], context)
        found, trained, largest = count_parameters(run.chunks, context)
        assert (found, trained) == (total, total)
        here = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
        everyone: list[Any] = [None] * 4
        torch.distributed.all_gather_object(everyone, here)
        assert largest == max(everyone)
        # With ones everywhere, the norm counts the parameters too.
        with torch.no_grad():
            for chunk in run.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(1.0)
        run.parameter_gather = SimpleNamespace(paused=nullcontext)  # type: ignore[assignment]
        assert run.params_norm() == pytest.approx(math.sqrt(total), rel=1e-12)


@ranks(dp=2, ep=2)
def test_experts_are_counted_once_on_ranks_that_share_them_out(context: ParallelContext) -> None:
    layout = "--expert-model-parallel-size 2"
    run = build([*SIZES, *EXPERTS.split(), *layout.split()], context)
    h, ffn, vocabulary = 64, 172, 2048
    attention = h * (h + 2 * 32) + h * h + 2 * h
    total = 2 * vocabulary * h + h + 2 * (attention + 4 * h + 4 * 3 * h * ffn)
    found, trained, largest = count_parameters(run.chunks, context)
    assert (found, trained, largest) == (total, total, total - 2 * 2 * 3 * h * ffn)
