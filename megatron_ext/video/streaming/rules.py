"""Check a streaming run before any rank starts, and derive what its data decides."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.stored import check_weights
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.text_encoders import width_of
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.decisions import (
    can_grow,
    clips_seen,
    num_trained_clips,
    switch_candidates,
    warn_of_aliasing,
)
from megatron_ext.video.streaming.prompts import read_prompts
from megatron_ext.video.streaming.teacher_config import teacher_sizes
from megatron_ext.video.streaming.video_prompts import video_prompts

if TYPE_CHECKING:
    from megatron_ext.config.parallel import ParallelConfig
    from megatron_ext.config.run import RunConfig


def window_of(streaming: StreamingConfig) -> FrameWindow:
    """Return which frames the generator sees.

    Raises:
        ConfigError: a window that is too small.
    """
    block, sink = streaming.frame_block, streaming.sink_frames
    if streaming.window_frames - sink < block:
        raise ConfigError(
            f"`--window-frames` ({streaming.window_frames}) must be at least `--sink-frames` + "
            f"`--frame-block` ({sink} + {block} = {sink + block}), or a block would not see all "
            "of itself."
        )
    return FrameWindow(block, streaming.window_frames, sink)


def check_options(streaming: StreamingConfig, cp_comm_type: str) -> None:
    """Check that lengths, noise levels and attention fit together.

    The ranges of single flags are in `StreamingConfig`.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for name, rule, default in (*_sequence_rules(streaming), *_noise_rules(streaming)):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"`{flag}` ({getattr(streaming, name)}) must be {rule}; {default}.")
    window_of(streaming)
    if cp_comm_type not in ("p2p", "all_gather", "a2a"):
        raise ConfigError(f"`--cp-comm-type` ({cp_comm_type}) must be p2p, all_gather or a2a.")


_Rule = tuple[str, str, str]
"""Field that breaks a rule, what it must be, and what to do."""


def _sequence_rules(streaming: StreamingConfig) -> Iterator[_Rule]:
    low, high, size = streaming.min_new_frames, streaming.max_new_frames, streaming.chunk_frames
    lengths, block = streaming.sequence_lengths, streaming.frame_block
    for name, rule, fits in (
        *((name, f"a positive multiple of block ({block})", getattr(streaming, name) % block == 0)
          for name in ("chunk_frames", "min_new_frames", "max_new_frames")),
        ("max_new_frames", f"{low} (min_new_frames) to {size}", low <= high <= size),
        ("recache_frames", f"a positive multiple of block ({block})",
         streaming.recache_frames % block == 0),
        ("recache_frames", f"at most chunk_frames ({size}), which is what is kept",
         streaming.recache_frames <= size),
        ("sequence_lengths", f"one or more of at least chunk_frames ({size})",
         bool(lengths) and min(lengths) >= size),
        ("train_first_chunk", "on where a sequence may have no second chunk (sequence_lengths)",
         streaming.train_first_chunk or all(can_grow(streaming, size, x) for x in lengths)),
    ):  # fmt: skip
        if not fits:
            yield name, rule, "the defaults are those of LongLive"


def _noise_rules(streaming: StreamingConfig) -> Iterator[_Rule]:
    steps = streaming.denoising_steps
    falls = bool(steps) and all(x > y for x, y in zip(steps, steps[1:], strict=False))
    for name, rule, fits in (
        ("denoising_steps", "falling numbers from 1000 or less to above 0", falls),
        (
            "min_timestep",
            "above 0 and at most max_timestep",
            streaming.min_timestep <= streaming.max_timestep,
        ),
    ):
        if not fits:
            yield name, rule, "leave it out to get the default"


def prepare_streaming(config: RunConfig) -> tuple[RunConfig, None]:
    """Check prompts, text, latents and lengths before any rank starts; see `Task.preflight`.

    Raises:
        CheckpointError: weights that are not there.
        ConfigError, DataError: flags or prompts that do not fit.
    """
    for role in ("critic", "teacher"):
        check_weights(
            f"--{role}-checkpoint", getattr(config.section(StreamingConfig), f"{role}_checkpoint")
        )
    rows = read_prompts(config.section(StreamingConfig))
    streaming = dataclasses.replace(
        config.section(StreamingConfig),
        switches=rows[0].second_text is not None,
        given_frames=0 if rows[0].start is None else config.section(StreamingConfig).frame_block,
    )
    config = config.with_section(streaming)
    check_options(streaming, config.parallel.cp_comm_type[0])
    _check_sequences(streaming)
    if int(os.environ.get("RANK", "0")) == 0:
        micro_batch_size, batch = config.training.batch_sizes
        accumulation = batch // (micro_batch_size * config.parallel.data_parallel_size)
        warn_of_aliasing(streaming, accumulation)
        print(f"> {coverage(streaming, accumulation)}", flush=True)
        if streaming.teacher_checkpoint is None:
            print("> the teacher has random weights; give `--teacher-checkpoint`", flush=True)
    if config.section(SampleConfig).sample_interval is not None:
        video_prompts(
            config.section(SampleConfig), config.section(StreamingSampleConfig), streaming
        )
    return sized(config), None


def sized(config: RunConfig) -> RunConfig:
    """Return the configuration with the sizes that text encoder, codec and clips decide.

    Raises:
        ConfigError: latents or a codec that do not fit the networks.
    """
    streaming = dataclasses.replace(
        config.section(StreamingConfig), text_features=width_of(config.section(TextEncoderConfig))
    )
    config = config.with_section(streaming)
    _check_latents(config)
    _check_layout(streaming, config.parallel)
    model = dataclasses.replace(streaming.described(config.model), padded_vocab_size=None)
    length = clip_tokens(streaming)
    model = dataclasses.replace(model, seq_length=length, max_position_embeddings=length)
    return dataclasses.replace(config, model=model)


def coverage(streaming: StreamingConfig, accumulation: int) -> str:
    """Say in a sentence which clips of a sequence the generator is trained on."""
    start = f"the generator is trained in one of {streaming.generator_interval} steps"
    trained = num_trained_clips(streaming)
    if trained is None:
        return f"{start}, on chunks of sequences whose growth is drawn"
    seen = len(clips_seen(streaming, trained, accumulation))
    return f"{start}, on {seen} of the {trained} trained chunks of a sequence"


def clip_tokens(streaming: StreamingConfig) -> int:
    """Return the tokens of a clip."""
    return streaming.chunk_frames * _frame_tokens(streaming)


def _frame_tokens(streaming: StreamingConfig) -> int:
    height, width = streaming.latent_size
    return height * width // streaming.sizes(None).patch_size ** 2


def _check_sequences(streaming: StreamingConfig) -> None:
    """Check that flags of switches have a switch, and that all clips have frames that count.

    Raises:
        ConfigError: a flag that would have no effect, or frames that do not fit.
    """
    found = []
    if not streaming.switches:
        for name, usual in (("switch_frames", None), ("sink_at_switch", "rebuild")):
            value = getattr(streaming, name)
            if value != usual:
                found.append(
                    f"`--{name.replace('_', '-')}` ({value}) needs prompts after a switch; give "
                    "`--second-prompts-path`, or `second_text` in the jsonl."
                )
    elif not any(_switches(streaming, length) for length in streaming.sequence_lengths):
        asked = streaming.switch_frames
        found.append(
            f"no sequence of `--sequence-lengths` ({_words(streaming.sequence_lengths)}) is long "
            f"enough to switch {'inside' if asked is None else f'at {_words(asked)}'}; give longer "
            "ones, or leave out the prompts after the switch."
        )
    if streaming.given_frames >= streaming.chunk_frames:
        found.append(
            f"`--chunk-frames` ({streaming.chunk_frames}) must exceed the frame block "
            f"({streaming.frame_block}) that the images or videos of `--prompts-path` begin with."
        )
    if found:
        raise ConfigError(found)


def _switches(streaming: StreamingConfig, length: int) -> bool:
    block, candidates = streaming.frame_block, switch_candidates(streaming, length)
    return any(-(-frame // block) * block < length for frame in candidates)


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _check_latents(config: RunConfig) -> None:
    """Check that the codec has the channels of the networks, and that patches fill the latents.

    Raises:
        ConfigError: it does not, they do not, or nothing uses the codec.
    """
    streaming = config.section(StreamingConfig)
    sizes = streaming.sizes(None)
    if any(x % sizes.patch_size for x in streaming.latent_size):
        raise ConfigError(
            f"`--latent-size` ({_words(streaming.latent_size)}) must be positive multiples of the "
            f"patch size ({sizes.patch_size})."
        )
    samples = (
        config.section(SampleConfig).sample_interval is not None
        or config.section(StreamingSampleConfig).only_samples
    )
    if not streaming.encode_first_frame and not streaming.given_frames and not samples:
        if config.section(CodecConfig) != CodecConfig():
            raise ConfigError(
                "`--no-encode-first-frame` leaves nothing for the codec to do; leave the flags of "
                "the codec out."
            )
        return
    channels = build_codec(config.section(CodecConfig)).channels
    if channels != sizes.channels:
        raise ConfigError(
            f"`--codec` has {channels} latent channels, but `--generator-size "
            f"{streaming.generator_size}` has {sizes.channels}; give `--codec-channels "
            f"{sizes.channels}` or another codec, or, with `--no-encode-first-frame`, sample no "
            "videos."
        )


def _check_layout(streaming: StreamingConfig, parallel: ParallelConfig) -> None:
    """Check that ranks can share heads, feed-forward layers and the tokens of a frame.

    `video.streaming.teacher_config` checks the teacher, which may have a layout of its own; only
    the heads that it trades without one are checked here.

    Raises:
        ConfigError: they cannot.
    """
    found = list[str]()
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    own = teacher_sizes(streaming, parallel) is not None
    for role in ("generator", "critic", *(() if own else ("teacher",))):
        name = getattr(streaming, f"{role}_size")
        if name is None:
            continue  # as the generator
        sizes = streaming.sizes(name)
        for what, number in (("heads", sizes.num_heads), ("feed-forward rows", sizes.ffn_size)):
            if number % tp and role != "teacher":
                found.append(
                    f"`--{role}-size {name}` has {number} {what}, which "
                    f"`--tensor-model-parallel-size` ({tp}) does not divide; use fewer ranks."
                )
        if parallel.cp_comm_type[0] == "a2a" and sizes.num_heads % (tp * cp):
            found.append(
                f"`--cp-comm-type a2a` trades the {sizes.num_heads} heads of `--{role}-size "
                f"{name}`, which tensor x context parallel size ({tp * cp}) does not divide; use "
                "all_gather."
            )
    ranks, tokens = cp * (tp if parallel.sequence_parallel else 1), _frame_tokens(streaming)
    if tokens % ranks:
        found.append(
            f"`--latent-size` ({_words(streaming.latent_size)}) gives a frame {tokens} tokens, "
            f"which {ranks} ranks (context parallel, times tensor parallel with "
            "`--sequence-parallel`) do not divide; use fewer ranks or another size."
        )
    if found:
        raise ConfigError(found)
