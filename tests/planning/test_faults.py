"""Planted faults of video, streaming, fp8, adapters and Transformer Engine: all told in one run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from pretrain_gpt import GPT
from pretrain_video import defaults_of, task_of
from tests.planning.layouts import MODEL
from tests.planning.video_layouts import COMMON
from tests.video.streaming.runs import flags_of

Faults = dict[str, tuple[str, str]]
LORA, FP8 = "--lora-rank 8 ", "--bf16 --fp8-format hybrid "

TEXT: Faults = {
    "rank": ("--lora-rank 0", "`--lora-rank` (0) must be at least 1"),
    "alpha": (LORA + "--lora-alpha 0", "`--lora-alpha` (0.0) must be above 0"),
    "lora dropout": (LORA + "--lora-dropout 1", "`--lora-dropout` (1.0) must be at least 0"),
    "targets": (LORA + "--lora-target-modules linear_q", "`--lora-target-modules` (linear_q)"),
    "no rank": ("--lora-alpha 4", "`--lora-alpha` needs `--lora-rank`"),
    "decoupled": (LORA + "--decoupled-lr 1e-3", "`--decoupled-lr` is for the embedding"),
    "fp8 alone": ("--fp8-margin 1", "`--fp8-margin` needs `--fp8-format`"),
    "fp8 of fp32": ("--fp8-format hybrid", "`--fp8-format` needs `--bf16`"),
    "history": (FP8 + "--fp8-amax-history-len 0", "`--fp8-amax-history-len` (0) must be"),
    "margin": (FP8 + "--fp8-margin -1", "`--fp8-margin` (-1) must be at least"),
    "width": (FP8 + "--ffn-hidden-size 200", "`--fp8-format` needs layers whose sides divide"),
    "layers": (FP8 + "--num-layers-at-start-in-bf16 2", "needs `--first-last-layers-bf16`"),
    "delayed": (
        FP8 + "--fp8-recipe tensorwise --fp8-margin 1",
        "`--fp8-margin` belongs to `--fp8-recipe delayed`",
    ),
    "engine": ("--transformer-impl transformer_engine", "needs Transformer Engine and a GPU"),
    "gpu": ("--dry-run-gpu V100", "`--dry-run-gpu` (V100) must be one of A100-40GB"),
    "ffn": ("--ffn-hidden-size 0", "`--ffn-hidden-size` (0) must be at least 1"),
}
VIDEO: Faults = {
    "data": ("", "`--video-data-path` is missing"),
    "text flag": ("--num-experts 4", "`--num-experts` has no effect on a video model"),
    "of streaming": ("--generator-size mini", "has an effect only with `--task streaming`"),
    "of dit": ("--independent-block-timesteps", "has an effect only with"),
    "recompute": (
        "--recompute-double-blocks -1",
        "`--recompute-double-blocks` (-1) must be at least",
    ),
    "cost": ("--double-block-cost 0", "`--double-block-cost` (0.0) must be above 0"),
    "layout": ("--pipeline-model-parallel-layout Et|L", "blocks are dealt to stages by their cost"),
    "guidance": ("--guidance 3", "needs `--guidance-embed`"),
    "online": ("--online-encoding --video-data-path x", "needs `--video-buckets`"),
    "codec": ("--codec-channels 4", "has an effect only with `--online-encoding`"),
    "samples": ("--sample-steps 0", "`--sample-steps` (0) must be at least 1"),
    "interval": ("--sample-interval 5", "`--sample-interval` (5) needs captions"),
    "shift": ("--flow-shift 3 --shift-max 4", "has no effect beside `--flow-shift`"),
    "core": ("--pipeline-schedule core-1f1b", "takes sequences of one length only"),
}
STREAMING: Faults = {
    "stages": ("--pipeline-model-parallel-size 2 --nproc-per-node 2", "pipeline stages would wait"),
    "half": ("--fp16", "three networks have no common loss scale"),
    "critic": ("--critic-lr 0", "`--critic-lr` (0.0) must be above 0"),
    "clip": ("--critic-clip-grad -1", "`--critic-clip-grad` (-1.0) must be at least 0"),
    "blocks": ("--recompute-blocks -1", "`--recompute-blocks` (-1) must be at least"),
    "teacher": (
        "--teacher-tensor-model-parallel-size 3 --nproc-per-node 2",
        "`--teacher-tensor-model-parallel-size`",
    ),
    "evaluation": ("--eval-iters 3", "`--eval-iters` (3) does not go with `--task streaming`"),
    "clips": ("--video-data-path x", "`--video-data-path` has no effect with `--task streaming`"),
    "adapters": (LORA + "--lora-dropout 0.1", "does not go with `--task streaming`"),
}
TOGETHER = {
    "text": (TEXT, "rank margin gpu ffn engine"),
    "video": (VIDEO, "data recompute cost guidance samples core"),
    "streaming": (STREAMING, "half critic clip blocks evaluation"),
}


def _said(kind: str, words: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Sentences of one run of a kind."""
    if kind == "text":
        code = main(GPT, [*MODEL, *words.split(), "--dry-run"])
    else:
        flags = [*COMMON.split(), *words.split(), "--dry-run"]
        if kind == "streaming":
            flags = [*flags_of(folder, words), "--dry-run"]
        code = main(task_of, flags, defaults=defaults_of(flags))
    assert code == EXIT_CODE_USER_ERROR
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), lines
    return lines


def test_there_are_more_than_thirty_of_them() -> None:
    assert len(TEXT) + len(VIDEO) + len(STREAMING) >= 30


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, faults in (("text", TEXT), ("video", VIDEO), ("streaming", STREAMING))
        for name in faults
    ],
)
def test_a_fault_is_reported(
    kind: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags, said = TOGETHER[kind][0][name]
    lines = _said(kind, flags, tmp_path, capfd)
    assert any(said in line for line in lines), lines


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("seed", range(3))
def test_several_faults_come_in_one_run(
    kind: str, seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults, names = TOGETHER[kind]
    chosen = random.Random(seed).sample(names.split(), 3)
    lines = _said(kind, " ".join(faults[name][0] for name in chosen), tmp_path, capfd)
    for name in chosen:
        assert any(faults[name][1] in line for line in lines), (name, lines)
