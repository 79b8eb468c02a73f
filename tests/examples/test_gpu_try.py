"""The script that tries every feature on a GPU tells what failed, and ends in time."""

import signal
import time
from collections.abc import Callable, Sequence

import pytest

from benchmarks import gpu_try
from benchmarks.gpu_try import CONTEXT, FEATURES, NOT_TRIED, STOPPED, VIDEO
from tests.examples.test_gpu_benchmarks import run_apart, table_of


def test_three_steps_of_a_feature_or_the_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FEATURES, "bf16", "--pipeline-model-parallel-size 3")

    def fail(*_args: object) -> list[float]:
        raise RuntimeError("no kernel\nfor this | shape")

    monkeypatch.setattr(gpu_try, "video_steps", fail)
    names = ["bf16", "fp8 rowwise", "GPT-3's layers", VIDEO]
    assert run_apart(gpu_try.main, "--device", "cpu", "--tiny", "--only", *names) == 1
    rows = {row[0]: row[1:] for row in table_of(capfd.readouterr().out.replace("\\|", "/"))}
    assert rows[VIDEO][0] == "FAILED: RuntimeError: no kernel for this / shape"
    assert rows["bf16"][0].startswith("refused: ")
    for name in names[1:3]:
        result, losses, _ = rows[name]
        assert result == "ran"
        assert len(losses.split(", ")) == gpu_try.STEPS
    assert rows[CONTEXT][0].startswith("not tried")


def returns() -> None:
    """Stands for a feature that is quick."""


def compiles_forever() -> None:
    """Stands for a feature that takes too long, and tries something else after an error."""
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def hangs() -> None:
    """Stands for a wait in a library, during which Python answers no signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)


@pytest.mark.parametrize(
    ("features", "results", "most"),
    [
        # Each has a second, and six seconds are too few for all of them.
        ([returns] + [compiles_forever] * 30, ["ran", STOPPED, STOPPED], 6),
        ([returns, hangs, returns], ["ran", STOPPED, NOT_TRIED], 3),
    ],
)
def test_the_script_ends_in_time_and_lists_what_it_did_not_reach(
    features: Sequence[Callable[[], None]],
    results: Sequence[str],
    most: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acts = {f"feature {number}": act for number, act in enumerate(features)}
    pending = iter(acts.values())

    def steps(*_args: object) -> list[float]:
        next(pending)()
        return [1.0] * gpu_try.STEPS

    monkeypatch.setattr(gpu_try, "FEATURES", dict.fromkeys(acts, ""))
    monkeypatch.setattr(gpu_try, "train_steps", steps)
    flags = f"--device cpu --tiny --seconds {most} --feature-seconds 1".split()
    start = time.monotonic()
    assert run_apart(gpu_try.main, *flags) == 1
    seconds = time.monotonic() - start
    rows = table_of(capfd.readouterr().out)
    assert [row[0] for row in rows] == [*acts, CONTEXT]
    assert [row[1] for row in rows[: len(results)]] == results
    assert rows[-2][1] == NOT_TRIED
    assert seconds < most + 5  # with the start of a process, on a busy machine
