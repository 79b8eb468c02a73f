"""The examples of streaming: their clips and measurement, the full-size command, and tiny runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import VIDEO
from tests.examples.scripts import EXAMPLES, calls, smoke, stub, succeed
from tests.examples.scripts import rows as rows_of

STREAMING = EXAMPLES / "streaming"
LONGTUNE = STREAMING / "longtune_1.3b.sh"


@pytest.fixture(scope="module")
def swings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render a clip of each of 16 captions, and pairs of prompts."""
    folder = tmp_path_factory.mktemp("swings")
    shown = succeed(STREAMING / "make_swings.py", folder, "--per-caption=1")
    assert "16 clips of 16 captions" in shown and "12 pairs held out" in shown
    return folder


def test_prompts_switch_colours_and_some_pairs_are_held_out(swings: Path) -> None:
    first, second = (
        (swings / f"{name}.txt").read_text().splitlines() for name in ("prompts", "second_prompts")
    )
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
    """Two frames after the switch are left out, and half of the others are not enough."""
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
    first, second = (
        (STREAMING / f"{name}.txt").read_text().splitlines()
        for name in ("prompts", "second_prompts")
    )
    assert len(first) == len(second) == len(set(first)) == len(set(second)) == 12


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the commands that the script would start on eight GPUs."""
    python = stub(tmp_path, "python")
    folders = {name: str(tmp_path / name.lower()) for name in ("VAE", "UMT5")}
    succeed(LONGTUNE, "teacher", "critic", "start", "out", PYTHON=str(python), **folders)
    commands = calls(tmp_path, "python")
    assert [c[:3] for c in commands] == [["pretrain_video.py", "--nproc-per-node", "8"]] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return [parse_args(c[1:], VIDEO, world_size=8, device="cuda").config for c in commands]


def test_the_published_recipe_on_one_node(stages: list[RunConfig]) -> None:
    """LongLive's two stages (arXiv:2509.22622)."""
    first, last = stages
    for config in stages:
        streaming, optimizer = config.section(StreamingConfig), config.optimizer
        sizes = streaming.sizes(None), streaming.sizes("1.3b"), streaming.sizes("14b")
        assert streaming.teacher_size == "14b" and sizes[0] == sizes[1]
        assert [round(x.num_parameters / 1e9, 1) for x in sizes] == [1.4, 1.4, 14.3]
        assert (streaming.frame_block, streaming.window_frames, streaming.sink_frames) == (3, 12, 3)
        assert (streaming.chunk_frames, streaming.max_new_frames) == (21, 18)
        assert (streaming.generator_interval, streaming.guidance_scale) == (5, 4.0)
        assert config.training.batch_sizes == (1, 64)
        assert config.parallel.data_parallel_size == 8
        assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.0, 0.999)
        assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 10.0)
        assert streaming.teacher_checkpoint == "teacher"
    rates = [
        (c.optimizer.lr, c.section(StreamingConfig).critic_lr, c.training.train_iters)
        for c in stages
    ]
    assert rates == [(2e-6, 4e-7, 700), (1e-5, 2e-6, 3000)]
    assert (
        first.section(StreamingConfig).sequence_lengths,
        last.section(StreamingConfig).sequence_lengths,
    ) == (
        (21,),
        (240,),
    )
    assert (first.ema.ema_decay, first.ema.ema_start) == (0.99, 200)
    assert not last.ema.keeps_average(trains=True)
    assert (
        first.lora.lora_rank is None and first.section(StreamingConfig).second_prompts_path is None
    )
    assert (last.lora.lora_rank, last.lora.scale) == (256, 1.0)
    assert last.checkpoint.pretrained_checkpoint == last.section(StreamingConfig).critic_checkpoint
    assert last.checkpoint.pretrained_checkpoint == "out/stage_a"


@pytest.mark.slow
def test_both_stages_run_and_the_second_goes_on_from_the_first(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("streaming/longtune_1.3b.sh", out, timeout=500)
    for stage in ("stage_a", "stage_b"):
        rows = rows_of(out / stage, "train")
        assert [row["iteration"] for row in rows] == [1, 2]
        assert all(math.isfinite(row["critic loss"]) for row in rows)


@pytest.mark.slow
def test_quickstart_ends_with_a_measurement(tmp_path: Path) -> None:
    """At this size it learns nothing; docs/streaming.md says what the whole run reaches."""
    out = tmp_path / "run"
    shown = smoke("streaming/quickstart.sh", out, timeout=580)
    assert len(re.findall(r"[0-9]+ of 12 videos follow their second prompt", shown)) == 2
    assert len(re.findall(r"(before a switch|after it) +[0-9]+% +[0-9]+ of 12", shown)) == 4
    assert (out / "tuned" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    for which in ("before", "tuned"):
        assert len(list((out / f"videos_{which}").glob("*.mp4"))) == 12
