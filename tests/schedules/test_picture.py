"""Prices against the formulas of the papers, and pictures against what a person can count."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_ext.schedules.__main__ import main
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.picture import text
from megatron_ext.schedules.plan import Durations, price

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (2.0, 1.5, 1.0)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("times", TIMES)
def test_bubbles_are_those_of_the_papers(size: int, times: tuple[float, float, float]) -> None:
    forward, input_gradient, weight_gradient = times
    whole = Durations(*times)
    common = {"pipeline_size": size, "num_microbatches": 4 * size}
    cost = price(build_plan("1f1b", **common), whole)  # type: ignore[arg-type]
    assert cost.bubble == pytest.approx((size - 1) * sum(times))
    cost = price(build_plan("zb-h1", **common), whole)  # type: ignore[arg-type]
    theory = (size - 1) * (forward + input_gradient - weight_gradient)
    assert cost.bubble == pytest.approx(theory)
    for chunks in (2, 4):
        part = Durations(*(time / chunks for time in times))
        plan = build_plan("interleaved", num_chunks=chunks, **common)  # type: ignore[arg-type]
        assert price(plan, part).bubble == pytest.approx((size - 1) * sum(times) / chunks)


@pytest.mark.parametrize(("size", "num_microbatches"), [(4, 8), (8, 16), (8, 32)])
def test_zb_v_leaves_little_of_the_bubble_of_1f1b(size: int, num_microbatches: int) -> None:
    half = Durations(0.5, 0.5, 0.5)
    common = {"pipeline_size": size, "num_microbatches": num_microbatches}
    plan = build_plan("zb-v", num_chunks=2, **common)  # type: ignore[arg-type]
    classic = price(build_plan("1f1b", **common))  # type: ignore[arg-type]
    assert price(plan, half).bubble <= 0.25 * classic.bubble


def test_latency_of_messages_makes_a_step_longer() -> None:
    plan = build_plan("1f1b", pipeline_size=3, num_microbatches=1)
    # Two messages there and two back.
    assert price(plan, latency=0.5).makespan == price(plan).makespan + 4 * 0.5


def test_1f1b_as_text() -> None:
    plan = build_plan("1f1b", pipeline_size=2, num_microbatches=2)
    assert text(plan, price(plan)).splitlines() == [
        "rank 0 |F0-F1-......B0----...B1----|",
        "rank 1 |...F0-B0----F1-B1----......|",
    ]


def test_second_chunks_are_in_small_letters() -> None:
    plan = build_plan("zb-v", pipeline_size=2, num_microbatches=1, num_chunks=2)
    lines = text(plan, price(plan)).splitlines()
    assert lines[1].startswith("rank 1 |...F0-f0-...")
    assert "f0-i0-" in lines[0]


def test_command_draws_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    words = f"--schedule zb-v --pipeline-size 4 --microbatches 16 --png {path}".split()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("rank ") >= 4
    assert "step time 50, bubble 2 (4.0%)" in shown
    assert "peak micro-batches in flight on each rank, of all its layers: 4, 4, 4, 4" in shown
    height, width, _ = imread(path).shape
    assert height > 100 and width > 1000


def test_command_takes_measured_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--pipeline-size 2 --microbatches 4 --times 10 11 9".split()) == 0
    assert "step time 150, bubble 30 (20.0%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--schedule zb-v --chunks 3", "The schedule `zb-v` needs 2 chunks on each rank, not 3."),
        ("--png /nowhere/plan.png", "`--png` (/nowhere/plan.png) cannot be written (No such file"),
        ("--png plan.tiger", "`--png` (plan.tiger) cannot be written (Format 'tiger' is not"),
    ],
)
def test_command_refuses(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--microbatches 0", "--times 1 nan 1", "--latency -1"])
def test_command_refuses_numbers_of_no_use(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "must be" in capsys.readouterr().err.splitlines()[-1]
