"""``--use-checkpoint-args`` with a checkpoint of streaming long-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config import RunConfig, parse_args
from megatron_ext.config.video_rules import STREAMING_DEFAULTS
from pretrain_video import task_of
from tests.training.streaming.tiny import flags_of
from tests.training.streaming.tuned import ADAPTERS, STEPS, Tuned
from tests.training_runs import train_on_ranks, training_rows

OTHERS = (
    "--generator-size small --critic-size tiny --teacher-size small --latent-channels 6 "
    "--codec-spatial 2 --codec-channels 6 --text-length 9 --text-width 24 --window-frames 9 "
    "--lora-rank 4 --lora-alpha 3 --lora-target-modules linear_q linear_fc1 --lora-rslora"
)
SECTIONS = ("lora", "codec", "text_encoder")
NETWORKS = "generator_size critic_size teacher_size latent_channels frame_block window_frames"


def parsed(words: str, stored: dict[str, Any] | None = None) -> RunConfig:
    flags = "--task streaming --prompts-path p --micro-batch-size 1 --global-batch-size 1"
    return parse_args(
        f"{flags} --train-iters 1 {words}".split(), world_size=1, device="cpu",
        checkpoint_config=stored, defaults=STREAMING_DEFAULTS,
    ).config  # fmt: skip


@pytest.mark.parametrize("words", ["", OTHERS])
def test_the_networks_are_those_of_the_checkpoint(words: str) -> None:
    whole = parsed(f"{words} --latent-size 8 8 --guidance-scale 2")
    again = parsed("--use-checkpoint-args --load x", whole.to_dict())
    for section in (*SECTIONS, "model"):
        assert getattr(again, section) == getattr(whole, section), section
    for name in NETWORKS.split():
        assert getattr(again.streaming, name) == getattr(whole.streaming, name), name
    # How they are trained is not what they are.
    assert again.streaming.guidance_scale == 4.0 and again.streaming.latent_size == (60, 104)


def test_the_command_line_wins() -> None:
    whole = parsed(OTHERS)
    words = "--use-checkpoint-args --load x --text-width 48 --critic-size small --lora-rank 8"
    again = parsed(words, whole.to_dict())
    assert again.text_encoder.text_width == 48 and again.text_encoder.text_length == 9
    assert again.streaming.critic_size == "small" and again.lora.lora_rank == 8
    assert again.lora.lora_target_modules == ["linear_q", "linear_fc1"]


DESCRIBING = (
    "--generator-size --frame-block --window-frames --sink-frames --text-length --text-width "
    "--codec-spatial --codec-channels"
).split()


def test_adapters_go_on_without_the_flags_of_the_networks(tuned: Tuned, tmp_path: Path) -> None:
    """As with all of them, bit for bit."""
    found = []
    onward = f"--override-opt-param-scheduler --load {tuned.saved} --train-iters {STEPS + 1}"
    for name, words in (("short", "--use-checkpoint-args"), ("whole", ADAPTERS)):
        flags = flags_of(tmp_path, f"{tuned.words} {words} {onward}")
        for flag in DESCRIBING if name == "short" else ():
            place = flags.index(flag)
            del flags[place : place + 2]
        code, rows = train_on_ranks(
            flags, save=tmp_path / name, task=task_of, defaults=STREAMING_DEFAULTS
        )
        assert code == 0
        found.append(training_rows(rows))
    ((short,), (whole,)) = found
    assert short["iteration"] == STEPS + 1
    assert {k: v for k, v in short.items() if "loss" in k or "norm" in k} == {
        k: v for k, v in whole.items() if "loss" in k or "norm" in k
    }
