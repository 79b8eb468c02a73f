"""Configurations that are printed, fed back, and taken from checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.train.main import main
from megatron_ext.video.task import FLOW, VIDEO
from tests.video.clips import FLAGS, train

WORDS = {
    "plain": "",
    "layout": (
        "--nproc-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --pipeline-schedule zb-v --use-distributed-optimizer --bf16"
    ),
    "model": (
        "--hidden-size 96 --num-attention-heads 2 --axes-dim 16 16 16 --num-single-blocks 0 "
        "--guidance-embed --guidance 3 --recompute-double-blocks 1 --t2v-weight 2"
    ),
    "encoding": (
        '--online-encoding --video-buckets {"64px":{"9":[1.0,2]}} --reference-lengths 1 9 '
        "--ema-decay 0 --sample-interval 2 --sample-texts a --sample-size 64 64"
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_printed_configuration_gives_itself_back(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--video-data-path", "x", "--save", "y", *WORDS[name].split()]
    assert main(FLOW, [*flags, "--print-config"]) == 0
    printed = capfd.readouterr().out
    (tmp_path / "run.yaml").write_text(printed)
    again = ["--config", str(tmp_path / "run.yaml"), "--print-config"]
    assert main(FLOW, again) == 0
    assert capfd.readouterr().out == printed
    # The command line still wins, and what would be ignored is still refused.
    changed = [*again[:2], "--lr", "7e-5"]
    config = parse_args(changed, VIDEO, world_size=0, device="cpu").config
    assert config.optimizer.lr == 7e-5
    assert main(FLOW, [*again, "--num-layers", "77"]) == 2
    assert "`--num-layers` has no effect on a video model" in capfd.readouterr().err


def test_a_checkpoint_tells_the_model(clips: Path, valid: Path, tmp_path: Path) -> None:
    """Evaluated without any flag of the model, its loss is that of the run that made it."""
    save = tmp_path / "save"
    model = "--num-double-blocks 1 --num-single-blocks 1 --mlp-ratio 2 --i2v-loop-weight 0"
    data = f"--video-valid-path {valid} --eval-iters 1"
    wanted = train(clips, save, f"{data} {model} --train-iters 2")[-1]
    words = f"{data} --i2v-loop-weight 0 --use-checkpoint-args --load {save} --skip-train"
    (found,) = train(clips, tmp_path / "again", words)
    assert found["kind"] == wanted["kind"] == "evaluation"
    assert math.isclose(found["loss"], wanted["loss"], rel_tol=1e-6)
