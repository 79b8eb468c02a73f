"""The examples of streaming: their clips and measurement, the full-size command, and tiny runs."""

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from benchmarks import streaming_convergence, streaming_memory, streaming_setup, streaming_speed
from benchmarks.streaming_memory import SavedTensors
from megatron_ext.config.run import RunConfig
from megatron_ext.video.networks.wan.config import SIZES
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import VIDEO
from tests.examples.scripts import EXAMPLES, calls, smoke, stub, succeed
from tests.examples.scripts import rows as rows_of
from tests.ranks import ParallelContext, ranks
from tests.training_runs import config_of
from tests.video.networks.wan.plain import num_parameters

STREAMING = EXAMPLES / "streaming"
LONGTUNE = STREAMING / "longtune_1.3b.sh"


@pytest.fixture(scope="module")
def swings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render a clip of each of 16 captions, and pairs of prompts."""
    folder = tmp_path_factory.mktemp("swings")
    shown = succeed(STREAMING / "make_swings.py", folder, "--per-caption=1")
    assert "16 clips of 16 captions" in shown and "12 pairs held out" in shown
    return folder


def prompts_in(folder: Path) -> list[list[str]]:
    return [(folder / x).read_text().splitlines() for x in ("prompts.txt", "second_prompts.txt")]


def test_prompts_switch_colours_and_some_pairs_are_held_out(swings: Path) -> None:
    first, second = prompts_in(swings)
    rows = [json.loads(line) for line in (swings / "held_out.jsonl").read_text().splitlines()]
    held_out = [(row["text"], row["switches"][0]["text"]) for row in rows]
    pairs = [*zip(first, second, strict=True), *held_out]
    assert len(set(pairs)) == len(pairs) == 48
    for before, after in pairs:
        one, other = before.split(), after.split()
        assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, *[True] * 4]
        assert after.endswith("8 FPS.")  # as captions of clips are encoded
    kinds = Counter((before.split()[1], after.split()[1]) for before, after in held_out)
    assert len(kinds) == 12 and {row["switches"][0]["frame"] for row in rows} == {24}


@pytest.fixture
def films(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write videos of squares of colours, one for each frame, that sway, and their list."""
    monkeypatch.syspath_prepend(STREAMING.parent / "video")
    from make_clips import COLOURS, write_mp4

    def write(*asked: tuple[list[str], int], motion: str = "sways") -> Path:
        lines = []
        for number, (names, far) in enumerate(asked):
            frames = np.full((len(names), 32, 32, 3), 16, np.uint8)
            for i, (frame, name) in enumerate(zip(frames, names, strict=True)):
                left = 10 + far * (i % 2)
                frame[8:20, left : left + 12] = COLOURS[name]
            write_mp4(tmp_path / f"{number}.mp4", frames, 8)
            switch = {"frame": 4, "text": f"a blue square {motion} 8 FPS."}
            row = {"text": f"a red square {motion} 8 FPS.", "switches": [switch]}
            lines.append(json.dumps({"path": f"{number}.mp4", **row}) + "\n")
        (tmp_path / "samples.jsonl").write_text("".join(lines))
        return tmp_path

    return write


ROW = r" +(\d+)% +(\d+) of (\d+) +([\d.]+)"
FOLLOWS, STAYS, LATE = (["red"] * n + ["blue"] * (12 - n) for n in (6, 12, 9))


def measured(folder: Path, *flags: str) -> list[tuple[float, ...]]:
    """Return colour in percent, motions, videos and pixel error before and after the switch."""
    shown = succeed(STREAMING / "measure_switches.py", folder, "--skip=2", *flags)
    found = [re.search(f"{name}{ROW}", shown) for name in ("before a switch", "after it       ")]
    assert "2 of 4 videos follow their second prompt" in shown or not flags
    return [tuple(map(float, match.groups())) for match in found if match is not None]


def test_colours_are_measured_before_and_after_the_switch(films: Any) -> None:
    mixed = ["green", "red"] * 2 + ["blue"] * 8
    folder = films((FOLLOWS, 2), (STAYS, 2), (LATE, 2), (mixed, 2))
    before, after = measured(folder, "--at-least=2")
    assert before[:3] == (88, 4, 4) and after[:3] == (62, 4, 4)
    with pytest.raises(AssertionError, match="2 of 4 videos"):
        measured(folder, "--at-least=3")


def test_motion_and_shape_are_measured(films: Any) -> None:
    folder = films((FOLLOWS, 2))
    (_, *moves, right), after = measured(folder)
    assert moves == [1, 1] and right < 2 and after[3] < 2
    wrong, _ = measured(films((STAYS[::-1], 2), motion="bobs"))
    assert wrong[1:3] == (0, 1)
    # After the switch a blue square is asked for: 12 x 12 of 32 x 32 pixels are red instead.
    assert measured(films((STAYS, 2)))[1][3] > 10


def test_prompt_files_go_together() -> None:
    first, second = prompts_in(STREAMING)
    assert len(first) == len(second) == len(set(first)) == len(set(second)) == 12


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    python = stub(tmp_path, "python")
    folders = {name: str(tmp_path / name.lower()) for name in ("VAE", "UMT5")}
    succeed(LONGTUNE, "teacher", "critic", "start", "out", PYTHON=str(python), **folders)
    commands = calls(tmp_path, "python")
    assert [c[:3] for c in commands] == [["pretrain_video.py", "--nproc-per-node", "8"]] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return [config_of(c[1:], VIDEO, ranks=8, device="cuda") for c in commands]


def test_the_published_recipe_on_one_node(stages: list[RunConfig]) -> None:
    """LongLive's two stages (arXiv:2509.22622)."""
    first, last = stages
    for config in stages:
        streaming, optimizer = config.section(StreamingConfig), config.optimizer
        sizes = streaming.sizes(), streaming.sizes("critic"), streaming.sizes("teacher")
        assert streaming.teacher_size == "14b" and sizes[0] == sizes[1]
        assert [round(num_parameters(x) / 1e9, 1) for x in sizes] == [1.4, 1.4, 14.3]
        assert (streaming.frame_block, streaming.window_frames, streaming.sink_frames) == (3, 12, 3)
        assert (streaming.chunk_frames, streaming.max_new_frames) == (21, 18)
        assert (streaming.generator_interval, streaming.guidance_scale) == (5, 4.0)
        assert config.training.batch_sizes == (1, 64)
        assert config.parallel.data_parallel_size == 8
        assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.0, 0.999)
        assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 10.0)
        assert streaming.teacher_checkpoint == "teacher"
    early, late = (config.section(StreamingConfig) for config in stages)
    assert [x.optimizer.lr for x in stages] == [2e-6, 1e-5]
    assert [early.critic_lr, late.critic_lr] == [4e-7, 2e-6]
    assert [x.training.train_iters for x in stages] == [700, 3000]
    assert (early.sequence_lengths, late.sequence_lengths) == ((21,), (240,))
    assert (first.ema.ema_decay, first.ema.ema_start) == (0.99, 200)
    assert not last.ema.keeps_average(trains=True)
    assert first.lora.lora_rank is None and early.second_prompts_path is None
    assert (last.lora.lora_rank, last.lora.scale) == (256, 1.0)
    assert last.checkpoint.pretrained_checkpoint == late.critic_checkpoint
    assert last.checkpoint.pretrained_checkpoint == "out/stage_a"


@pytest.mark.slow
def test_both_stages_run_and_the_second_goes_on_from_the_first(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("streaming/longtune_1.3b.sh", out)
    for stage in ("stage_a", "stage_b"):
        rows = rows_of(out / stage, "train")
        assert [row["iteration"] for row in rows] == [1, 2]
        assert all(math.isfinite(row["critic loss"]) for row in rows)


@pytest.mark.slow
def test_quickstart_ends_with_a_measurement(tmp_path: Path) -> None:
    """At this size it learns nothing; docs/streaming.md says what the whole run reaches."""
    out = tmp_path / "run"
    shown = smoke("streaming/quickstart.sh", out)
    assert len(re.findall(r"[0-9]+ of 12 videos follow their second prompt", shown)) == 2
    assert len(re.findall(r"(before a switch|after it) +[0-9]+% +[0-9]+ of 12", shown)) == 4
    assert (out / "tuned" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    for which in ("before", "tuned"):
        assert len(list((out / f"videos_{which}").glob("*.mp4"))) == 12


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
    sizes = {"blocks": 6, "stretch": 2, "rounds": 2, "height": 4}
    found = streaming_speed.measure(context, SIZES["tiny"], 6, **sizes)
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
    assert (found.ratios, found.ratio) == ([2.0, 2.0], 2.0)
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
