"""Flags of the videos that runs sample: which kind of run follows which."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.task import VIDEO

TASK = "--task streaming --prompts-path p.txt --micro-batch-size 1 --train-iters 1 "
VIEWED = f"{TASK} --save out --sample-interval 5 --sample-texts cat dog "


def parsed(words: str) -> RunConfig:
    return parse_args(words.split(), VIDEO, world_size=1, device="cpu").config


def test_lengths_follow_the_training_unless_flags_say_otherwise() -> None:
    config = parsed(VIEWED + "--sequence-lengths 21 40 --sample-second-texts a b")
    own, streaming = config.section(StreamingSampleConfig), config.section(StreamingConfig)
    assert (own.num_frames(streaming), own.switch_frame(streaming)) == (39, 21)
    config = parsed(VIEWED + "--sample-latent-frames 24")
    assert config.section(StreamingSampleConfig).num_frames(config.section(StreamingConfig)) == 24
    words = "--sample-latent-frames 24 --sample-second-texts a b --sample-switch-frame 20"
    config = parsed(VIEWED + words)
    assert config.section(StreamingSampleConfig).switch_frame(config.section(StreamingConfig)) == 20


def test_all_other_sample_flags_of_a_streaming_run_are_its_own() -> None:
    words = "--sample-seed 3 --sample-fps 8 --sample-batch-size 1 --no-sample-ema --sample-dir d"
    sample = parsed(VIEWED + words).section(SampleConfig)
    assert (sample.sample_seed, sample.sample_fps, sample.sample_batch_size) == (3, 8, 1)
    assert not sample.sample_ema


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sample-seed 3", "`--sample-seed` has an effect only with `--sample-interval`; give it"),
        ("--sample-latent-frames 9", "`--sample-latent-frames` has an effect only with `--sample-"),
        ("--sample-second-texts a", "`--sample-second-texts` has an effect only with `--sample-"),
        ("--save s --sample-interval 5", "`--sample-interval` .5. needs captions; give"),
        ("--sample-interval 5 --sample-texts a", "`--sample-interval` .5. needs a folder for the"),
        ("--save s --sample-interval 5 --sample-prompts p --sample-second-texts a",
         "`--sample-second-texts` has 1 captions, but must have 0, one for each of .* a jsonl as"),
        ("--skip-train", "`--skip-train` .True. does not go with `--task streaming`"),
        *((f"--save s --sample-interval 5 --sample-texts a {flag}",
           f"`{flag.split()[0]}` has no effect with `--task streaming`, whose videos follow the")
          for flag in ("--sample-steps 3", "--sample-text-scale 2", "--sample-image-scale 2",
                       "--no-sample-oscillation", "--no-sample-scale-by-frame",
                       "--sample-size 8 8", "--sample-frames 9")),
    ],
)  # fmt: skip
def test_what_a_streaming_run_would_ignore_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(TASK + words)


@pytest.mark.parametrize(
    "flag", ["--sample-latent-frames 9", "--sample-second-texts a", "--sample-switch-frame 3"]
)
def test_other_runs_refuse_the_flags_of_long_videos(flag: str, tmp_path: Path) -> None:
    name = flag.split()[0]
    with pytest.raises(ConfigError, match=f"`{name}` has an effect only with `--task streaming`"):
        parse_args(
            f"--video-data-path {tmp_path} {flag}".split(), VIDEO,
            world_size=1, device="cpu",
        )  # fmt: skip
