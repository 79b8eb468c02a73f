"""Flags of the long videos that a streaming run samples, beside those of `SampleConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import SIZE

if TYPE_CHECKING:
    from megatron_ext.config.streaming import StreamingConfig
    from megatron_ext.config.video import SampleConfig

DEFAULT_FPS = 16
"""Of Wan 2.1 and LongLive."""


@dataclass(frozen=True)
class StreamingSampleConfig:
    """Length and prompt switches of sampled videos, with ``--task streaming``.

    Attributes:
        only_samples: this is no training, but a run of tools/sample_video.py.
    """

    sample_latent_frames: int | None = flag(
        None,
        "length; default: the longest of --sequence-lengths",
        unit="latent frames",
        bounds=SIZE,
    )
    sample_second_texts: list[str] | None = flag(
        None, "captions after the switch, one for each of --sample-texts", nargs="+"
    )
    sample_switch_frame: int | None = flag(
        None,
        "where --sample-second-texts begin; default: in the middle",
        unit="latent frame",
        bounds=SIZE,
    )
    only_samples: bool = False

    def num_frames(self, streaming: StreamingConfig) -> int:
        """Latent frames of each video, whole blocks unless the flag says otherwise."""
        block = max(1, streaming.frame_block)
        longest = max(streaming.sequence_lengths, default=block)
        return self.sample_latent_frames or longest // block * block

    def switch_frame(self, streaming: StreamingConfig) -> int:
        """Latent frame from which on the second captions hold."""
        block = max(1, streaming.frame_block)
        middle = -(-self.num_frames(streaming) // (2 * block)) * block
        return middle if self.sample_switch_frame is None else self.sample_switch_frame

    def errors(self, sample: SampleConfig, streaming: StreamingConfig) -> list[str]:
        """What cannot be sampled, one sentence each."""
        found, block = [], max(1, streaming.frame_block)
        length, texts = self.sample_latent_frames, sample.sample_texts
        if length is not None and (length < block or length % block):
            found.append(
                f"`--sample-latent-frames` ({length}) must be a positive multiple of "
                f"`--frame-block` ({block}), since blocks are denoised together."
            )
        second, switch = self.sample_second_texts, self.sample_switch_frame
        if second is not None and len(second) != len(texts or ()):
            found.append(
                f"`--sample-second-texts` has {len(second)} captions, but must have "
                f"{len(texts or ())}, one for each of `--sample-texts`; a jsonl as "
                "`--sample-prompts` may hold `switches` of its own."
            )
        if switch is not None and second is None:
            found.append(
                f"`--sample-switch-frame` ({switch}) needs `--sample-second-texts`; give the "
                "captions after the switch."
            )
        start, last = self.switch_frame(streaming), self.num_frames(streaming) - block
        if second is not None and not 1 <= start <= last:
            found.append(
                f"`--sample-switch-frame` ({start}) must lie "
                f"between 1 and the start of the last frame block ({last}); sample longer videos "
                "with `--sample-latent-frames`, or switch earlier."
            )
        return found
