"""Which long videos a streaming run is to sample, as its flags say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.sampling.long_requests import (
    LongRequest,
    Switch,
    at_block_starts,
    read_long_requests,
)

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


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
