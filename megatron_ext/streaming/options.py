"""How sequences grow, when prompts switch, and which steps train what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_ext.errors import ConfigError

SinkAtSwitch = Literal["rebuild", "keep"]


@dataclass(frozen=True)
class StreamingOptions:
    """Sequences of chunks of latent frames; all lengths count latent frames.

    Attributes:
        block: frames that are denoised together.
        chunk_frames: frames of the chunks that critic and teacher see.
        min_new_frames, max_new_frames: of a chunk but the first, drawn in steps of a block, both
            ends included. LongLive's range of 18 to 21 leaves out its upper end, which gives 18.
        sequence_lengths: frames after which a sequence ends at the latest; one is drawn.
        train_first_chunk: else the first chunk is generated without a loss.
        switch_prompts: sequences have a second prompt, to which they switch once.
        switch_frames: where; one is drawn from those before the end. Empty: the starts of all
            chunks but the first and the last, if chunks grow by ``min_new_frames``.
        recache_frames: last frames that are encoded anew at a switch.
        sink_at_switch: sink frames are encoded anew under the new prompt, or kept as they are.
        same_exit_across_blocks: one exit step for all blocks of a chunk; else each its own.
        last_step_only: the exit step is always the last.
        two_phase: generate without gradient and run exit steps again with it, one block at a time;
            else with gradient at once, so that all blocks' activations are held together.
        decode_history: the codec decodes all of the previous chunk before the frame that becomes
            the first; else the overlap only.
        generator_interval: the generator is trained in one of so many steps, the critic in all.

    Raises:
        ConfigError: numbers that do not fit together.
    """

    block: int = 3
    chunk_frames: int = 21
    min_new_frames: int = 18
    max_new_frames: int = 18
    sequence_lengths: tuple[int, ...] = (240,)
    train_first_chunk: bool = True
    switch_prompts: bool = True
    switch_frames: tuple[int, ...] = ()
    recache_frames: int = 21
    sink_at_switch: SinkAtSwitch = "rebuild"
    same_exit_across_blocks: bool = True
    last_step_only: bool = False
    two_phase: bool = True
    decode_history: bool = True
    generator_interval: int = 5

    def __post_init__(self) -> None:
        low, high, chunk = self.min_new_frames, self.max_new_frames, self.chunk_frames
        lengths, whole = self.sequence_lengths, f"a positive multiple of block ({self.block})"
        for name, rule, fits in (
            ("block", "1 or more", self.block >= 1),
            ("chunk_frames", whole, self._is_whole(chunk)),
            ("min_new_frames", whole, self._is_whole(low)),
            ("max_new_frames", whole, self._is_whole(high)),
            ("max_new_frames", f"{low} (min_new_frames) to {chunk}", low <= high <= chunk),
            ("recache_frames", whole, self._is_whole(self.recache_frames)),
            (
                "recache_frames",
                f"at most chunk_frames ({chunk}), which is what is kept",
                self.recache_frames <= chunk,
            ),
            (
                "sequence_lengths",
                f"one or more of at least chunk_frames ({chunk})",
                bool(lengths) and min(lengths) >= chunk,
            ),
            (
                "train_first_chunk",
                "on where a sequence may have no second chunk (sequence_lengths)",
                self.train_first_chunk or all(self.can_grow(chunk, x) for x in lengths),
            ),
            ("switch_frames", "above 0", all(x > 0 for x in self.switch_frames)),
            (
                "sink_at_switch",
                f"one of {', '.join(get_args(SinkAtSwitch))}",
                self.sink_at_switch in get_args(SinkAtSwitch),
            ),
            ("generator_interval", "1 or more", self.generator_interval >= 1),
        ):
            if not fits:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be {rule}; the defaults are those of "
                    "LongLive."
                )

    def _is_whole(self, frames: int) -> bool:
        return frames > 0 and self.block > 0 and frames % self.block == 0

    def new_frame_choices(self, remaining: int) -> range:
        """How many frames a chunk but the first may add with so many left to the end."""
        high = min(self.max_new_frames, remaining)
        return range(self.min_new_frames, high + 1, self.block)

    def can_grow(self, current: int, length: int) -> bool:
        """Whether a sequence of ``current`` frames may have another chunk before ``length``."""
        return current + self.min_new_frames <= length

    def switch_candidates(self, length: int) -> tuple[int, ...]:
        """Frames at which a sequence may switch; none where it is too short."""
        if not self.switch_prompts:
            return ()
        if self.switch_frames:
            return tuple(x for x in self.switch_frames if x < length)
        return tuple(range(self.chunk_frames, length, self.min_new_frames))[: self._inner(length)]

    def _inner(self, length: int) -> int:
        """Chunks but the first and the last, if all grow as little as they can."""
        return max(0, num_chunks(self, length) - 2)


def num_chunks(options: StreamingOptions, length: int) -> int:
    """Chunks of a sequence in which all grow by ``min_new_frames``."""
    return 1 + (length - options.chunk_frames) // options.min_new_frames
