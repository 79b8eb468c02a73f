"""The benchmarks of streaming at their smallest; nothing here looks at a clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from benchmarks import streaming_convergence, streaming_memory, streaming_setup, streaming_speed
from benchmarks.streaming_memory import SavedTensors
from megatron_ext.video.config.wan import SIZES
from tests.ranks import ParallelContext, ranks


def test_kept_bytes_are_counted_once_and_given_back() -> None:
    x = torch.randn(100, requires_grad=True)
    weight = torch.randn(100, requires_grad=True)
    saved = SavedTensors([weight])
    with saved.hooks():
        y = (x * weight).exp()  # keeps x, its own result and the weight, which is not counted
        assert saved.live == 800
        z = y.sin()  # keeps its input, which is that result
        assert saved.live == saved.peak == 800
        total = z.square().sum()  # keeps its input
        assert saved.live == 1200
    total.backward()
    assert (saved.live, saved.peak) == (0, 1200)
    want = 2 * y.sin() * y.cos() * y * weight
    torch.testing.assert_close(x.grad, want.detach())


def test_peaks_of_two_graphs_one_after_the_other_do_not_add_up() -> None:
    saved = SavedTensors()
    for _ in range(3):
        x = torch.randn(100, requires_grad=True)
        with saved.hooks():
            x.exp().sum().backward()
    assert (saved.live, saved.peak) == (0, 400)


@ranks()
def test_two_phases_keep_one_block(context: ParallelContext) -> None:
    found = {
        (blocks, two_phase): streaming_memory.measure(
            context, blocks, two_phase=two_phase, sizes=SIZES["tiny"], height=4
        )
        for blocks in (1, 2, 4)
        for two_phase in (False, True)
    }
    phases, whole = ({n: found[n, x] for n in (1, 2, 4)} for x in (True, False))
    for blocks in (2, 4):  # but for the mask, a byte for each frame of the chunk
        assert 0 <= phases[blocks].peak - phases[1].peak <= 3 * blocks
    assert whole[1].peak == pytest.approx(phases[1].peak, rel=0.02)
    assert whole[4].peak == pytest.approx(4 * whole[1].peak, rel=0.02)
    for blocks in (1, 2, 4):
        assert streaming_memory.difference(phases[blocks].gradients, whole[blocks].gradients) < 1e-4
    assert phases[4].exit_inputs == 4 * 3 * 4 * 4 * 4 * 4  # blocks x frames x c x h x w x bytes
    assert streaming_memory.row(2, whole[2], phases[2]).startswith("| 2 | 0.")


def test_gradients_that_differ_are_told() -> None:
    a = {"w": torch.tensor([1.0, 2.0])}
    assert streaming_memory.difference({"w": torch.tensor([1.0, 1.5])}, a) == pytest.approx(0.25)
    with pytest.raises(SystemExit, match=r"\['b'\]"):
        streaming_memory.difference({**a, "b": a["w"]}, a)


@ranks()
def test_frames_through_the_cache_are_those_of_the_mask(context: ParallelContext) -> None:
    found = streaming_speed.measure(
        context, SIZES["tiny"], 6, blocks=6, stretch=2, rounds=2, height=4
    )
    assert list(found.times) == [2, 4]
    assert [len(times) for of in found.times.values() for times in of] == [2] * 4
    assert len(found.ratios) == 2
    assert found.differences.written < 1e-5
    assert found.differences.steps < 1e-5
    assert found.differences.without_past > 1e-2
    assert len(streaming_speed.rows(6, found, 2)) == 2


def test_ratio_is_that_of_the_medians() -> None:
    nothing = streaming_speed.Differences(0.0, 0.0, 0.0)
    times = {10: [[1.0, 2.0, 9.0], [2.0, 2.0, 2.0]], 20: [[3.0] * 3] * 2, 30: [[4.0] * 3] * 2}
    found = streaming_speed.Found(times, nothing)
    assert found.ratios == [2.0, 2.0]
    assert found.ratio == 2.0
    assert "last over first stretch 2.000" in streaming_speed.summary(12, found)[0]


@ranks()
def test_the_distance_falls(context: ParallelContext, tmp_path: Path) -> None:
    settings = streaming_convergence.Settings(batch=16)
    course = streaming_convergence.follow(context, settings, steps=16, every=8, batch=64)
    assert [point.steps for point in course.points] == [0, 8, 16]
    assert course.fall > 0.1
    assert course.floor < 0.2 * course.points[0].distance
    assert course.real.shape == course.before.shape == course.after.shape == (64 * 12, 2, 1, 1)
    streaming_convergence.plot(course, tmp_path / "plot.png")
    assert imread(tmp_path / "plot.png").std() > 0.01


def test_fall_is_of_the_first_distance() -> None:
    point = streaming_convergence.Point(0, 2.0, 1.0, None)
    later = dataclasses.replace(point, steps=5, distance=0.5, critic_loss=1.5)
    empty = torch.empty(0)
    course = streaming_convergence.Course((point, later), 0.1, empty, empty, empty)
    assert course.fall == 0.75
    assert streaming_convergence.row(later) == "| 5 | 0.5000 | 1.0000 | 1.500 |"


def test_results_are_named_by_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(streaming_setup, "RESULTS", tmp_path / "results")
    path = streaming_setup.saved_as("streaming_speed", ".md")
    assert path.parent.is_dir()
    assert path.name.startswith("streaming_speed_20")
    lines = streaming_setup.heading("streaming_speed", ["--blocks", "30"])
    assert lines[1] == "python benchmarks/streaming_speed.py --blocks 30"
