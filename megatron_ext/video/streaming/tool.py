"""The program tools/sample_video.py --streaming: samples long videos from a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError
from megatron_ext.train.task import Task, later
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.sampling.tool import base_of, run_sampling
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.rules import check_options
from megatron_ext.video.streaming.task import STREAMING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.config.run import RunConfig
    from megatron_ext.train.run import Run
    from megatron_ext.video.streaming.long_videos import Throughput

# Imported when they are called, so that the flags are read without torch.
LongVideoSampler = later("megatron_ext.video.streaming.long_videos:LongVideoSampler")
build_codec = later("megatron_ext.video.data.codecs:build_codec")
build_text_encoder = later("megatron_ext.video.data.text_encoders:build_text_encoder")
encode_captions = later("megatron_ext.video.streaming.prompts:encode_captions")
sized = later("megatron_ext.video.streaming.prepare:sized")
video_prompts = later("megatron_ext.video.streaming.prompts:video_prompts")

_STORED = ("streaming", "lora", "codec", "text_encoder")
"""Sections of a checkpoint's configuration that determine the model and how it is sampled."""

PROGRESS_INTERVAL = 5.0
"""The least number of seconds between two progress lines of the first replica."""


def defaults_of(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that a run takes from a checkpoint, as {field name: default value}.

    ``stored`` is the configuration in the checkpoint. ``given`` holds those flags of the command
    line that belong to the section ``checkpoint``.

    Raises:
        ConfigError: the checkpoint is of another task.
    """
    if stored["video"].get("task") != "streaming":
        raise ConfigError(
            f"`--load` ({given['load']}) must be a checkpoint of `--task streaming`, but is of a "
            "flow-matching run; leave out `--streaming`."
        )
    return {
        **{name: value for section in _STORED for name, value in stored[section].items()},
        **base_of(stored, given),
        "task": "streaming",
        "bf16": stored["precision"]["bf16"],
        "only_samples": True,
    }


def prepare_sampling(config: RunConfig) -> tuple[RunConfig, None]:
    """Check options and prompts; return (configuration, None).

    The configuration has text width and sequence length set. Other tasks return objects for their
    data in place of None (see `Task.preflight`).
    """
    streaming = config.section(StreamingConfig)
    check_options(streaming)
    video_prompts(config.section(SampleConfig), config.section(StreamingSampleConfig), streaming)
    return sized(config), None


def sample_at_once(run: Run) -> None:
    """Sample the videos of the run; print the progress, and the throughput at the end."""
    config = run.config
    device = run.device
    streaming = config.section(StreamingConfig)
    text = config.section(TextEncoderConfig)
    folder = config.section(SampleConfig).sample_dir
    assert folder is not None and streaming.text_features is not None
    shape = text.text_length, streaming.text_features

    def encode(captions: Sequence[str]) -> Tensor:
        # Build the encoder here, so that its memory is free when the videos are sampled.
        build = partial(build_text_encoder, text, device)
        encoded: Tensor = encode_captions(captions, build, shape, run.context, device)
        return encoded

    codec = partial(build_codec, config.section(CodecConfig), device)
    sampler = LongVideoSampler(run, encode, codec)
    printed_at = -math.inf

    def progress(seen: Throughput) -> None:
        nonlocal printed_at
        if seen.seconds - printed_at >= PROGRESS_INTERVAL:
            printed_at = seen.seconds
            print(
                f"> frame block {seen.blocks} of {sampler.num_blocks} after {seen.seconds:.1f} s, "
                f"{seen.blocks / seen.seconds:.2f} blocks/s",
                flush=True,
            )

    seen = sampler(Path(folder), progress)
    run.reporters.say(summary(seen, seen.videos * sampler.num_frames))


def summary(seen: Throughput, latent_frames: int) -> str:
    """Return a line that describes a throughput.

    ``latent_frames`` is the number of latent frames of all videos.
    """
    return (
        f"made {seen.videos} videos of {seen.blocks} frame blocks ({latent_frames} latent "
        f"frames, {seen.frames} frames) in {seen.seconds:.1f} s: "
        f"{seen.blocks / seen.seconds:.2f} blocks/s, "
        f"{latent_frames / seen.seconds:.2f} latent frames/s, "
        f"{seen.frames / seen.seconds:.2f} frames/s; first block after {seen.first_block:.2f} s"
    )


def sample_streaming(argv: Sequence[str]) -> int:
    """Sample long videos with command-line arguments; return the exit code.

    ``argv`` must not have ``--streaming``.
    """
    task = dataclasses.replace(
        STREAMING, preflight=prepare_sampling, inputs=Task.inputs, callbacks=(), step_runner=None
    )
    return run_sampling(task, argv, defaults_of, sample_at_once)
