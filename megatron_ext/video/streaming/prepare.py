"""Checks a streaming run before any rank starts, and sets the options that its data determines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.stored import check_weights
from megatron_ext.errors import ConfigError, FlagError, all_of
from megatron_ext.train.task import later
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.config.weights import check_sizes, is_published, weights_inputs
from megatron_ext.video.data.codecs import build_codec, check_codec_folder
from megatron_ext.video.data.text_encoders import encoder_checks, widths_of
from megatron_ext.video.streaming.config import Role, StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.decisions import (
    clips_seen,
    num_trained_clips,
    switch_candidates,
    warn_of_aliasing,
)
from megatron_ext.video.streaming.prompts import prompt_checks, read_training_prompts, video_prompts
from megatron_ext.video.streaming.rules import check_options, teacher_sizes

if TYPE_CHECKING:
    from megatron_ext.config.parallel import ParallelConfig
    from megatron_ext.config.run import RunConfig


def prepare_streaming(config: RunConfig) -> tuple[RunConfig, None]:
    """Check weights, prompts and lengths before a run; return (configuration, None).

    The configuration is completed with settings that follow from prompts, text encoder and latents.
    Other tasks return objects for their data in place of None (see `Task.preflight`).
    """
    streaming = config.section(StreamingConfig)
    sample = config.section(SampleConfig)
    _check_others(streaming)
    rows = read_training_prompts(streaming)
    streaming = dataclasses.replace(
        streaming,
        switches=rows[0].second_text is not None,
        given_frames=0 if rows[0].start is None else streaming.blocks.first,
    )
    check_options(streaming)
    _check_sequences(streaming)
    if int(os.environ.get("RANK", "0")) == 0:
        micro_batch_size, batch = config.training.batch_sizes
        accumulation = batch // (micro_batch_size * config.parallel.data_parallel_size)
        warn_of_aliasing(streaming, accumulation)
        print(f"> {coverage(streaming, accumulation)}", flush=True)
        if streaming.teacher_checkpoint is None:
            print("> the teacher has random weights; give `--teacher-checkpoint`", flush=True)
    if sample.sample_interval is not None:
        video_prompts(sample, config.section(StreamingSampleConfig), streaming)
    return sized(config.with_section(streaming)), None


def streaming_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each check one input: weights, a file of prompts, an encoder.

    Each raises an error if its input is missing or invalid.
    """
    streaming = config.section(StreamingConfig)
    encoder = config.section(TextEncoderConfig)
    return [
        *weights_inputs(config),
        partial(_check_others, streaming),
        *prompt_checks(streaming),
        *encoder_checks(encoder),
        partial(check_codec_folder, config.section(CodecConfig)),
    ]


def _check_others(streaming: StreamingConfig) -> None:
    """Raise an error if critic or teacher cannot start from the weights that are given for it."""
    checks: list[Callable[[], Any]] = []
    given: dict[Role, str | None] = {
        "critic": streaming.critic_checkpoint,
        "teacher": streaming.teacher_checkpoint,
    }
    for role, path in given.items():
        flag = f"--{role}-checkpoint"
        if path is not None and is_published(path):
            check = later("megatron_ext.video.convert.training:check_network")
            checks.append(partial(check, flag, path, streaming.sizes(role)))
        else:
            checks.append(partial(check_weights, flag, path))
    all_of(checks)


def sized(config: RunConfig) -> RunConfig:
    """Check codec and layout; return the configuration with text width and sequence length."""
    streaming = dataclasses.replace(
        config.section(StreamingConfig),
        text_features=widths_of(config.section(TextEncoderConfig))[0],
    )
    samples = (
        config.section(SampleConfig).sample_interval is not None
        or config.section(StreamingSampleConfig).only_samples
    )
    _check_latents(streaming, config.section(CodecConfig), samples=samples)
    _check_layout(streaming, config.parallel)
    length = clip_tokens(streaming)
    described = streaming.described(config.model)
    model = dataclasses.replace(described, padded_vocab_size=None, seq_length=length)
    return check_sizes(dataclasses.replace(config.with_section(streaming), model=model))


def coverage(streaming: StreamingConfig, accumulation: int) -> str:
    """Return a clause for the log: how often, and on how many clips, the generator is trained.

    ``accumulation`` is the number of clips on which a step trains each network.
    """
    start = f"the generator is trained in one of {streaming.generator_interval} steps"
    trained = num_trained_clips(streaming)
    if trained is None:
        return f"{start}, on chunks of sequences whose growth is drawn"
    seen = len(clips_seen(streaming, trained, accumulation))
    return f"{start}, on {seen} of the {trained} trained chunks of a sequence"


def clip_tokens(streaming: StreamingConfig) -> int:
    """Return the number of tokens of one clip."""
    return streaming.chunk_frames * _frame_tokens(streaming)


def _frame_tokens(streaming: StreamingConfig) -> int:
    height, width = streaming.latent_size
    return height * width // streaming.sizes().patch_size ** 2


def _check_sequences(streaming: StreamingConfig) -> None:
    """Raise ConfigError if switches do not fit prompts or lengths, or given frames fill a clip."""
    errors = []
    blocks = streaming.blocks
    switches = [
        blocks.at_or_after(frame) < length
        for length in streaming.sequence_lengths
        for frame in switch_candidates(streaming, length)
    ]
    if not streaming.switches:
        for name, usual in (("switch_frames", None), ("sink_at_switch", "rebuild")):
            value = getattr(streaming, name)
            if value != usual:
                errors.append(
                    FlagError(
                        f"--{name.replace('_', '-')}",
                        value,
                        "needs prompts after a switch",
                        "give `--second-prompts-path`, or `second_text` in the jsonl",
                    )
                )
    elif not any(switches):
        frames = streaming.switch_frames
        place = "inside" if frames is None else f"at {_words(frames)}"
        errors.append(
            FlagError(
                "no sequence of `--sequence-lengths`",
                _words(streaming.sequence_lengths),
                f"is long enough to switch {place}",
                "give longer ones, or leave out the prompts after the switch",
            )
        )
    if streaming.given_frames >= streaming.chunk_frames:
        errors.append(
            FlagError(
                "--chunk-frames",
                streaming.chunk_frames,
                f"must exceed the frame block ({streaming.given_frames}) that the images or "
                "videos of `--prompts-path` begin with",
            )
        )
    if errors:
        raise ConfigError(errors)


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _check_latents(streaming: StreamingConfig, codec: CodecConfig, *, samples: bool) -> None:
    """Raise ConfigError if the patch size or the codec does not fit the latents.

    It is also an error to give flags of the codec to a run that uses no codec. A run uses the codec
    to encode the first frame of each clip (``encode_first_frame``), to encode given images or
    videos, or to sample videos. ``samples`` tells whether the run samples videos.
    """
    sizes = streaming.sizes()
    if any(x % sizes.patch_size for x in streaming.latent_size):
        raise ConfigError.about(
            "--latent-size",
            _words(streaming.latent_size),
            f"must be positive multiples of the patch size ({sizes.patch_size})",
        )
    if not streaming.encode_first_frame and not streaming.given_frames and not samples:
        if codec != CodecConfig():
            raise ConfigError.about(
                "--no-encode-first-frame",
                None,
                "leaves nothing for the codec to do",
                "leave the flags of the codec out",
            )
        return
    channels = build_codec(codec).channels
    if channels != sizes.channels:
        raise ConfigError.about(
            "--codec",
            None,
            f"has {channels} latent channels, but `--generator-size "
            f"{streaming.generator_size}` has {sizes.channels}",
            f"give `--codec-channels {sizes.channels}` or another codec, or, with "
            "`--no-encode-first-frame`, sample no videos",
        )


def _check_layout(streaming: StreamingConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if ranks cannot divide heads, feed-forward layers or tokens of a frame.

    The teacher is checked by `teacher_errors`. Only if it has the layout of the run, this function
    checks that its heads can be divided by ``--cp-comm-type a2a``.
    """
    errors = list[str]()
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    roles: list[Role] = ["generator", "critic"]
    if teacher_sizes(streaming, parallel) is None:
        roles.append("teacher")
    for role in roles:
        name = getattr(streaming, f"{role}_size")
        sizes = streaming.sizes(role)
        if name is None:
            continue  # This network has the size of the generator, which is checked.
        for what, number in (("heads", sizes.num_heads), ("feed-forward rows", sizes.ffn_size)):
            if number % tp and role != "teacher":
                errors.append(
                    FlagError(
                        f"--{role}-size {name}",
                        None,
                        f"has {number} {what}, which `--tensor-model-parallel-size` ({tp}) does "
                        "not divide",
                        "use fewer ranks",
                    )
                )
        if parallel.cp_comm_type[0] == "a2a" and sizes.num_heads % (tp * cp):
            errors.append(
                FlagError(
                    "--cp-comm-type a2a",
                    None,
                    f"trades the {sizes.num_heads} heads of `--{role}-size {name}`, which tensor "
                    f"x context parallel size ({tp * cp}) does not divide",
                    "use all_gather",
                )
            )
    ranks = cp * (tp if parallel.sequence_parallel else 1)
    tokens = _frame_tokens(streaming)
    if tokens % ranks:
        errors.append(
            FlagError(
                "--latent-size",
                _words(streaming.latent_size),
                f"gives a frame {tokens} tokens, which {ranks} ranks (context parallel, times "
                "tensor parallel with `--sequence-parallel`) do not divide",
                "use fewer ranks or another size",
            )
        )
    if errors:
        raise ConfigError(errors)
