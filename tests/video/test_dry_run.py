"""A dry run of a video model: its plan, or all faults of its flags in one run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO
from tests.video.clips import LONG, SHORT, write_clips
from tests.video.cost.layouts import COMMON
from tests.video.streaming.runs import flags_of

FAULTS = {
    "": "`--video-data-path` is missing",
    "--recompute-double-blocks -1": "`--recompute-double-blocks` (-1) must be at least",
    "--double-block-cost 0": "`--double-block-cost` (0.0) must be above 0",
    "--guidance 3": "needs `--guidance-embed`",
    "--sample-steps 0": "`--sample-steps` (0) must be at least 1",
    "--pipeline-schedule core-1f1b": "takes sequences of one length only",
}
"""Flags with one fault each, of which any may come together."""
MORE_VIDEO = {
    "--num-experts 4": "on a video model: its blocks have no experts",
    "--generator-size mini": "has an effect only with `--task streaming`",
    "--independent-block-timesteps": "has an effect only with",
    "--pipeline-model-parallel-layout Et|L": "blocks are dealt to stages by their cost",
    "--online-encoding --video-data-path x": "needs `--video-buckets`",
    "--sample-interval 5": "`--sample-interval` (5) needs captions",
}
STREAMING = {
    "--fp16": "three networks have no common loss scale",
    "--critic-lr 0": "`--critic-lr` (0.0) must be above 0",
    "--critic-clip-grad -1": "`--critic-clip-grad` (-1.0) must be at least 0",
    "--recompute-blocks -1": "`--recompute-blocks` (-1) must be at least",
    "--eval-iters 3": "`--eval-iters` (3) does not go with `--task streaming`",
}
MORE_STREAMING = {
    "--pipeline-model-parallel-size 2 --nproc-per-node 2": "pipeline stages would wait",
    "--teacher-tensor-model-parallel-size 3 --nproc-per-node 2": "`--teacher-tensor-model-paral",
    "--video-data-path x": "`--video-data-path` has no effect with `--task streaming`",
    "--lora-rank 8 --lora-dropout 0.1": "does not go with `--task streaming`",
}
KINDS = {"video": FAULTS | MORE_VIDEO, "streaming": STREAMING | MORE_STREAMING}


def _errors(kind: str, words: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    flags = flags_of(folder, words) if kind == "streaming" else [*COMMON.split(), *words.split()]
    flags.append("--dry-run")
    assert main(VIDEO, flags) == EXIT_CODE_USER_ERROR
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), lines
    return lines


@pytest.mark.parametrize(("kind", "flags"), [(kind, x) for kind in KINDS for x in KINDS[kind]])
def test_a_fault_is_told(
    kind: str, flags: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = _errors(kind, flags, tmp_path, capfd)
    assert any(KINDS[kind][flags] in line for line in lines), lines


@pytest.mark.parametrize(("kind", "faults"), [("video", FAULTS), ("streaming", STREAMING)])
@pytest.mark.parametrize("seed", range(3))
def test_several_faults_are_told_in_one_run(
    kind: str, faults: dict[str, str], seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = random.Random(seed).sample(sorted(faults), 3)
    lines = _errors(kind, " ".join(chosen), tmp_path, capfd)
    for flags in chosen:
        assert any(faults[flags] in line for line in lines), (flags, lines)


def test_the_worst_and_the_typical_bucket_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 40, LONG: 16})
    flags = [*COMMON.split(), "--video-data-path", str(data), "--dry-run", "--dry-run-gpu", "H200"]
    assert main(VIDEO, flags) == 0
    shown = capfd.readouterr().out
    assert any("64px 9x64x64" in line and "typical" in line for line in shown.splitlines())
    assert any("64px 17x64x64" in line and "worst" in line for line in shown.splitlines())
    assert "estimated on H200" in shown and "double" not in shown
