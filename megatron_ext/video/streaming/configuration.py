"""Which long videos a streaming run is to sample, as its flags say.

What the flags of a streaming run say, as its parts take it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ext.checkpoint.stored import check_weights
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.text_encoders import width_of
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.model.wan.options import VideoDiTOptions
from megatron_ext.video.sampling.films import (
    LongRequest,
    Switch,
    at_block_starts,
    read_long_requests,
)
from megatron_ext.video.streaming.loss import DMDConfig
from megatron_ext.video.streaming.noise_schedule import NoiseConfig
from megatron_ext.video.streaming.options import (
    StreamingOptions,
    chunks_seen,
    num_chunks,
    warn_of_aliasing,
)
from megatron_ext.video.streaming.prompts import read_prompts
from megatron_ext.video.streaming.teacher_config import teacher_sizes

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.video.streaming.config import StreamingConfig


def film_requests(config: RunConfig) -> list[LongRequest]:
    """What ``--sample-prompts`` or ``--sample-texts`` ask for, switches at the starts of blocks.

    Raises:
        ConfigError, DataError: see `read_long_requests` and `at_block_starts`.
    """
    sample, own, streaming = config.sample, config.streaming_sample, config.streaming
    if sample.sample_texts is None:
        assert sample.sample_prompts is not None
        requests = read_long_requests(sample.sample_prompts)
    elif own.sample_second_texts is None:
        requests = [LongRequest(text) for text in sample.sample_texts]
    else:
        frame = own.switch_frame(streaming)
        pairs = zip(sample.sample_texts, own.sample_second_texts, strict=True)
        requests = [LongRequest(first, (Switch(frame, second),)) for first, second in pairs]
    return at_block_starts(
        requests, block=streaming.frame_block, num_frames=own.num_frames(streaming)
    )


T = TypeVar("T")

_NAMES = {"block": "frame_block", "window": "window_frames", "sink": "sink_frames"}
"""Flags that have not the name of the field that they give."""


def options_of(config: StreamingConfig) -> StreamingOptions:
    """How sequences grow.

    Raises:
        ConfigError: see `StreamingOptions`.
    """
    values = {
        **_shared(config, StreamingOptions),
        "block": config.frame_block,
        "switch_prompts": config.switches,
        "switch_frames": config.switch_frames or (),
    }
    return _spoken(lambda: StreamingOptions(**values))


def noise_of(config: StreamingConfig) -> NoiseConfig:
    """Which noise levels there are; ConfigErrors as of `NoiseConfig`."""
    return _spoken(lambda: NoiseConfig(**_shared(config, NoiseConfig)))


def dmd_of(config: StreamingConfig) -> DMDConfig:
    """Options of the loss; ConfigErrors as of `DMDConfig`."""
    return _spoken(lambda: DMDConfig(**_shared(config, DMDConfig)))


def window_of(config: StreamingConfig) -> FrameWindow:
    """Which frames the generator sees; ConfigErrors as of `FrameWindow`."""
    return _spoken(
        lambda: FrameWindow(config.frame_block, config.window_frames, config.sink_frames)
    )


def network_options(config: RunConfig, window: FrameWindow | None) -> VideoDiTOptions:
    """How a network attends, None for critic and teacher; ConfigErrors as of the options."""
    return _spoken(
        lambda: VideoDiTOptions(
            window=window,
            zero_head=config.streaming.zero_head,
            recompute_blocks=config.streaming.recompute_blocks,
            cp_comm_type=config.parallel.cp_comm_type[0],
        )
    )


def _shared(config: StreamingConfig, kind: type[Any]) -> dict[str, Any]:
    """The flags that have the names of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in names
    }


def _spoken(build: Callable[[], T]) -> T:
    """Build an object; its errors name the flags in the place of its fields."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError([_in_flags(message) for message in error.messages]) from error


def _in_flags(message: str) -> str:
    def flag(found: re.Match[str]) -> str:
        return f"`--{_NAMES.get(found[1], found[1]).replace('_', '-')}`"

    return re.sub("`([a-z_]+)`", flag, message)


def accumulation_of(config: RunConfig) -> int:
    """Chunks of each kind that a replica computes in a step."""
    micro_batch_size, batch = config.training.batch_sizes
    return batch // (micro_batch_size * config.parallel.data_parallel_size)


def prepare_streaming(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Check prompts, text, latents and lengths before any rank starts; see `Task.preflight`.

    Raises:
        CheckpointError: weights that are not there.
        ConfigError, DataError: flags or prompts that do not fit.
    """
    for role in ("critic", "teacher"):
        check_weights(f"--{role}-checkpoint", getattr(config.streaming, f"{role}_checkpoint"))
    rows = read_prompts(config.streaming)
    streaming = dataclasses.replace(
        config.streaming,
        switches=rows[0].second_text is not None,
        given_frames=0 if rows[0].start is None else config.streaming.frame_block,
    )
    config = dataclasses.replace(config, streaming=streaming)
    options, _, _ = options_of(streaming), noise_of(streaming), dmd_of(streaming)
    network_options(config, window_of(streaming))
    _check_sequences(streaming, options)
    if int(os.environ.get("RANK", "0")) == 0:
        warn_of_aliasing(options, accumulation_of(config))
        print(f"> {coverage(options, accumulation_of(config))}", flush=True)
        if streaming.teacher_checkpoint is None:
            print("> the teacher has random weights; give `--teacher-checkpoint`", flush=True)
    if config.sample.sample_interval is not None:
        film_requests(config)
    return sized(config)


def sized(config: RunConfig) -> RunConfig:
    """With what text encoder, codec and chunks decide about the networks.

    Raises:
        ConfigError: latents or a codec that do not fit the networks.
    """
    streaming = dataclasses.replace(config.streaming, text_features=width_of(config.text_encoder))
    config = dataclasses.replace(config, streaming=streaming)
    _check_latents(config)
    _check_layout(config)
    model = dataclasses.replace(streaming.described(config.model), padded_vocab_size=None)
    length = chunk_tokens(streaming)
    model = dataclasses.replace(model, seq_length=length, max_position_embeddings=length)
    return dataclasses.replace(config, model=model)


def coverage(options: StreamingOptions, accumulation: int) -> str:
    """Which chunks of a sequence the generator is trained on, in a sentence."""
    start = f"the generator is trained in one of {options.generator_interval} steps"
    counts = {num_chunks(options, length) for length in options.sequence_lengths}
    if len(counts) > 1 or options.min_new_frames < options.max_new_frames:
        return f"{start}, on chunks of sequences whose growth is drawn"
    trained = counts.pop() - (not options.train_first_chunk)
    seen = len(chunks_seen(options, trained, accumulation))
    return f"{start}, on {seen} of the {trained} trained chunks of a sequence"


def chunk_tokens(config: StreamingConfig) -> int:
    """Tokens of a chunk."""
    return config.chunk_frames * _frame_tokens(config)


def _frame_tokens(config: StreamingConfig) -> int:
    height, width = config.latent_size
    return height * width // config.sizes(None).patch_size ** 2


def _check_sequences(config: StreamingConfig, options: StreamingOptions) -> None:
    """Flags of switches must have a switch, and chunks of all kinds frames that count.

    Raises:
        ConfigError: a flag that would have no effect, or frames that do not fit.
    """
    found = []
    if not config.switches:
        for name, usual in (("switch_frames", None), ("sink_at_switch", "rebuild")):
            if getattr(config, name) != usual:
                found.append(
                    f"`--{name.replace('_', '-')}` ({getattr(config, name)}) needs prompts after a "
                    "switch; give `--second-prompts-path`, or `second_text` in the jsonl."
                )
    elif not any(_switches(config, options, length) for length in config.sequence_lengths):
        asked = config.switch_frames
        found.append(
            f"no sequence of `--sequence-lengths` ({_words(config.sequence_lengths)}) is long "
            f"enough to switch {'inside' if asked is None else f'at {_words(asked)}'}; give longer "
            "ones, or leave out the prompts after the switch."
        )
    if config.given_frames >= config.chunk_frames:
        found.append(
            f"`--chunk-frames` ({config.chunk_frames}) must exceed the frame block "
            f"({config.frame_block}) that the images or videos of `--prompts-path` begin with."
        )
    if found:
        raise ConfigError(found)


def _switches(config: StreamingConfig, options: StreamingOptions, length: int) -> bool:
    block = config.frame_block
    return any(-(-frame // block) * block < length for frame in options.switch_candidates(length))


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _check_latents(config: RunConfig) -> None:
    """The codec's channels must be those of the networks, and patches must fill the latents.

    Raises:
        ConfigError: they are not, or codecs that nothing uses.
    """
    streaming = config.streaming
    sizes = streaming.sizes(None)
    if min(streaming.latent_size) < 1 or any(x % sizes.patch_size for x in streaming.latent_size):
        raise ConfigError(
            f"`--latent-size` ({_words(streaming.latent_size)}) must be positive multiples of the "
            f"patch size ({sizes.patch_size})."
        )
    samples = config.sample.sample_interval is not None or config.streaming_sample.only_samples
    if not streaming.encode_first_frame and not streaming.given_frames and not samples:
        if config.codec != CodecConfig():
            raise ConfigError(
                "`--no-encode-first-frame` leaves nothing for the codec to do; leave the flags of "
                "the codec out."
            )
        return
    channels = build_codec(config.codec).channels
    if channels != sizes.channels:
        raise ConfigError(
            f"`--codec` has {channels} latent channels, but `--generator-size "
            f"{streaming.generator_size}` has {sizes.channels}; give `--codec-channels "
            f"{sizes.channels}` or another codec, or, with `--no-encode-first-frame`, sample no "
            "videos."
        )


def _check_layout(config: RunConfig) -> None:
    """Ranks must share out heads, feed-forward layers and the tokens of a frame.

    The teacher's are checked in `video.streaming.teacher_config`, since it may have a layout of
    its own; only the heads that it trades without one are checked here.

    Raises:
        ConfigError: they cannot.
    """
    streaming, parallel, found = config.streaming, config.parallel, list[str]()
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
