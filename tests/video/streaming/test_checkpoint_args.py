"""``--use-checkpoint-args`` with a checkpoint of streaming long-tuning."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.wan import VideoDiTConfig
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import VIDEO
from tests.training_runs import train_on_ranks, training_rows
from tests.video.streaming.runs import flags_of
from tests.video.streaming.tuned import ADAPTERS, STEPS, Tuned

OTHERS = (
    "--generator-size small --critic-size tiny --teacher-size small --latent-channels 6 "
    "--codec-spatial 2 --codec-channels 6 --text-length 9 --text-width 24 --window-frames 9 "
    "--lora-rank 4 --lora-alpha 3 --lora-target-modules linear_q linear_fc1 --lora-rslora"
)
NETWORKS = "generator_size critic_size teacher_size latent_channels frame_block window_frames"


def parsed(words: str, stored: dict[str, Any] | None = None) -> RunConfig:
    flags = "--task streaming --prompts-path p --micro-batch-size 1 --global-batch-size 1"
    return parse_args(
        f"{flags} --train-iters 1 {words}".split(), VIDEO, world_size=1, device="cpu",
        checkpoint_config=stored,
    ).config  # fmt: skip


@pytest.mark.parametrize("words", ["", OTHERS])
def test_the_networks_are_those_of_the_checkpoint(words: str) -> None:
    whole = parsed(f"{words} --latent-size 8 8 --guidance-scale 2")
    again = parsed("--use-checkpoint-args --load x", whole.to_dict())
    for section in ("lora", "codec", "text_encoder", "model"):
        assert again.by_name()[section] == whole.by_name()[section], section
    streaming, stored = again.section(StreamingConfig), whole.section(StreamingConfig)
    for name in NETWORKS.split():
        assert getattr(streaming, name) == getattr(stored, name), name
    # How they are trained is not what they are.
    assert streaming.guidance_scale == 4.0 and streaming.latent_size == (60, 104)


def test_the_command_line_wins() -> None:
    whole = parsed(OTHERS)
    words = "--use-checkpoint-args --load x --text-width 48 --critic-size small --lora-rank 8"
    again = parsed(words, whole.to_dict())
    encoder = again.section(TextEncoderConfig)
    assert encoder.text_width == 48 and encoder.text_length == 9
    assert again.section(StreamingConfig).critic_size == "small" and again.lora.lora_rank == 8
    assert again.lora.lora_target_modules == ["linear_q", "linear_fc1"]


DESCRIBING = (
    "--generator-size --frame-block --window-frames --sink-frames --text-length --text-width "
    "--codec-spatial --codec-channels"
).split()


def test_adapters_go_on_without_the_flags_of_the_networks(tuned: Tuned, tmp_path: Path) -> None:
    """Compare with a run that is given all flags, bit for bit."""
    found = []
    onward = f"--override-opt-param-scheduler --load {tuned.saved} --train-iters {STEPS + 1}"
    for name, words in (("short", "--use-checkpoint-args"), ("whole", ADAPTERS)):
        flags = flags_of(tmp_path, f"{tuned.words} {words} {onward}")
        for flag in DESCRIBING if name == "short" else ():
            place = flags.index(flag)
            del flags[place : place + 2]
        code, rows = train_on_ranks(flags, save=tmp_path / name, task=VIDEO)
        assert code == 0
        found.append(training_rows(rows))
    ((short,), (whole,)) = found
    assert short["iteration"] == STEPS + 1
    assert {k: v for k, v in short.items() if "loss" in k or "norm" in k} == {
        k: v for k, v in whole.items() if "loss" in k or "norm" in k
    }


FLOW = "--video-data-path v --micro-batch-size 1 --train-iters 1001 --video-model"


def flow(words: str, stored: dict[str, Any] | None = None) -> RunConfig:
    """Return the configuration of a flow-matching run."""
    flags = f"{FLOW} {words}".split()
    return parse_args(flags, VIDEO, world_size=1, device="cpu", checkpoint_config=stored).config


WINDOW = "--frame-block 2 --window-frames 8 --sink-frames 2"


def test_streaming_takes_the_size_and_the_window_of_a_causal_model() -> None:
    stored = flow(f"causal-video-dit --video-dit-size mini {WINDOW} --independent-block-timesteps")
    dit = dataclasses.replace(stored.section(VideoDiTConfig), dit_channels=6)
    stored = stored.with_section(dit)
    words = "--use-checkpoint-args --pretrained-checkpoint x --chunk-frames 4"
    words += " --min-new-frames 2 --max-new-frames 2 --recache-frames 4"
    streaming = parsed(words, stored.to_dict()).section(StreamingConfig)
    assert (streaming.generator_size, streaming.latent_channels) == ("mini", 6)
    assert (streaming.frame_block, streaming.window_frames, streaming.sink_frames) == (2, 8, 2)
    teacher = dataclasses.replace(stored.section(VideoConfig), video_model="video-dit")
    stored = stored.with_section(teacher)
    streaming = parsed(words.split(" --chunk")[0], stored.to_dict()).section(StreamingConfig)
    assert (streaming.generator_size, streaming.window_frames) == ("mini", 12)


def test_flow_matching_takes_the_size_and_the_window_of_a_generator() -> None:
    stored = parsed("--generator-size small --window-frames 9 --guidance-scale 2").to_dict()
    words = "--use-checkpoint-args --pretrained-checkpoint x"
    causal = flow(f"causal-video-dit {words}", stored)
    assert causal.section(StreamingConfig).window_frames == 9
    whole = flow(f"video-dit {words}", stored)
    both = flow(f"video-dit {words}", causal.to_dict())
    for run in (causal, whole, both):
        assert run.section(VideoDiTConfig).video_dit_size == "small"


@pytest.mark.parametrize(
    ("held", "wanted", "sentence"),
    [
        (
            "mmdit",
            "streaming",
            "The checkpoint is of an MMDiT, but this run builds the networks of",
        ),
        ("streaming", "mmdit", "the networks of `--task streaming`, but this run builds an MMDiT"),
        ("causal-video-dit", "mmdit", "of a causal video DiT, but this run builds an MMDiT"),
        (
            "text",
            "mmdit",
            "of a model that this program does not train, but this run builds an MMDiT",
        ),
        ("adapters", "video-dit", "of adapters, which flow matching does not train; make whole"),
    ],
)
def test_another_kind_of_model_is_one_sentence(held: str, wanted: str, sentence: str) -> None:
    stored = {
        "mmdit": lambda: flow("mmdit --t2v-weight 1"),
        "causal-video-dit": lambda: flow("causal-video-dit"),
        "streaming": lambda: parsed(""),
        "adapters": lambda: parsed("--lora-rank 4"),
        "text": RunConfig,
    }[held]().to_dict()
    words = "--use-checkpoint-args --load x"
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        parsed(words, stored) if wanted == "streaming" else flow(f"{wanted} {words}", stored)
    assert len(caught.value.messages) == 1
