"""How sequences grow, when prompts switch, and which steps train what.

Which steps train the generator, and whether it gets to see every part of a sequence.

Every random decision about streaming sequences, as a function of the seed and of numbers.

Two kinds. Control flow (exit steps, growth, lengths, switches) must be the same on all ranks, whose
collectives would not meet otherwise; it follows the numbers of sequence and chunk. Noise differs
between replicas and follows the numbers of the samples in the run, so that it does not depend on
the layout. As in `video.data.randomness` no states of generators are kept, nothing else can
consume them, and ranks need not speak.

What sequences are made from: prompts, and frames that are given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data.randomness import draw_noise, draw_uniforms, generator

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


logger = logging.getLogger(__name__)

Pass = Literal["generator", "critic"]


def trains_generator(options: StreamingOptions, step: int) -> bool:
    """Whether a step, counted from 0, trains the generator as well as the critic."""
    return step % options.generator_interval == 0


def passes(options: StreamingOptions, step: int, accumulation: int = 1) -> tuple[Pass, ...]:
    """What the chunks of a step are for, in order; each pass takes the next chunk.

    Args:
        options: see `StreamingOptions.generator_interval`.
        step: counted from 0.
        accumulation: chunks of each kind in a step.
    """
    once: tuple[Pass, ...] = ("critic",)
    return (("generator", *once) if trains_generator(options, step) else once) * accumulation


def chunks_seen(options: StreamingOptions, trained_chunks: int, accumulation: int = 1) -> set[int]:
    """Chunks of a sequence that the generator ever trains, if all sequences are alike.

    Args:
        options: see `StreamingOptions.generator_interval`.
        trained_chunks: chunks of a sequence that are trained on, which are counted from 0.
        accumulation: see `passes`.
    """
    cycle = [
        kind
        for step in range(options.generator_interval)
        for kind in passes(options, step, accumulation)
    ]
    ours = [place for place, kind in enumerate(cycle) if kind == "generator"]
    return {(n * len(cycle) + x) % trained_chunks for n in range(trained_chunks) for x in ours}


def aliasing(options: StreamingOptions, accumulation: int = 1) -> str | None:
    """Why the generator misses chunks of every sequence, in a sentence; None if it does not.

    With sequences of several lengths, or chunks of several, places are drawn anew all the time.
    """
    counts = {num_chunks(options, x) - (not options.train_first_chunk)
              for x in options.sequence_lengths}  # fmt: skip
    if len(counts) > 1 or options.min_new_frames < options.max_new_frames:
        return None
    chunks = counts.pop()
    seen = chunks_seen(options, chunks, accumulation)
    if len(seen) == chunks:
        return None
    interval = options.generator_interval
    return (
        f"`generator_interval` ({interval}) and sequences of {chunks} trained chunks make the "
        f"generator see only chunks {', '.join(map(str, sorted(seen)))} of each; choose lengths "
        f"whose number of chunks has no divisor in common with {interval + 1}."
    )


def warn_of_aliasing(options: StreamingOptions, accumulation: int = 1) -> None:
    """Log `aliasing` as a warning."""
    problem = aliasing(options, accumulation)
    if problem:
        logger.warning("%s", problem)


def sequence_length(options: StreamingOptions, seed: int, sequence: int) -> int:
    """Frames after which a sequence ends at the latest."""
    return _choice(options.sequence_lengths, seed, sequence, "streaming length")


def switch_frame(options: StreamingOptions, seed: int, sequence: int) -> int | None:
    """Frame at which a sequence takes its second prompt; None if it does not."""
    candidates = options.switch_candidates(sequence_length(options, seed, sequence))
    return _choice(candidates, seed, sequence, "streaming switch") if candidates else None


def new_frames(
    options: StreamingOptions, seed: int, sequence: int, chunk: int, *, remaining: int
) -> int:
    """Frames that a chunk but the first adds, with so many left to the end of the sequence."""
    choices = options.new_frame_choices(remaining)
    return _choice(choices, seed, sequence, f"streaming growth {chunk}")


def exit_steps(
    options: StreamingOptions, seed: int, sequence: int, chunk: int, *, blocks: int, steps: int
) -> tuple[int, ...]:
    """Denoising step at which each block of a chunk ends, counted from 0 of ``steps``."""
    if options.last_step_only:
        return (steps - 1,) * blocks
    source = generator(seed, sequence, f"streaming exits {chunk}")
    drawn = [int(x) for x in source.integers(steps, size=blocks)]
    return (drawn[0],) * blocks if options.same_exit_across_blocks else tuple(drawn)


def noise(
    seed: int,
    samples: Sequence[int],
    shape: Sequence[int],
    purpose: str,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Standard normal numbers of samples, the same on all model-parallel ranks of a replica.

    Args:
        seed: of the run.
        samples: their numbers in the run.
        shape: of one sample.
        purpose: what for; no two uses in a sequence may share it.
        like: a tensor that gives dtype and device; float32 on the CPU without.

    Returns:
        ``[b, *shape]``.
    """
    drawn = draw_noise(seed, samples, shape, f"streaming {purpose}")
    return drawn if like is None else drawn.to(like.device, like.dtype)


def uniforms(seed: int, samples: Sequence[int], purpose: str) -> Tensor:
    """A number in [0, 1) for each sample, ``[b]`` float64, as `noise`."""
    return draw_uniforms(seed, samples, f"streaming {purpose}")


def block_noise(
    seed: int, samples: Sequence[int], shape: Sequence[int], frame: int, step: int, *, like: Tensor
) -> Tensor:
    """Noise of a block: of its start (step 0), of its later steps, and of its write-back (-1).

    Args:
        seed: of the run.
        samples: their numbers in the run.
        shape: of one sample of the block, (frames, c, h, w).
        frame: absolute number of its first frame.
        step: see above.
        like: gives dtype and device.
    """
    return noise(seed, samples, shape, f"frame {frame} step {step}", like=like)


def _choice(choices: Sequence[int], seed: int, sequence: int, purpose: str) -> int:
    return choices[int(generator(seed, sequence, purpose).integers(len(choices)))]


@dataclass(frozen=True)
class Prompts:
    """What the samples of a sequence are made from.

    Attributes:
        text: embeddings, ``[b, l, d]``.
        text_after: those after the switch; needed where sequences switch.
        start: clean latents of given first frames, ``[b, t, c, h, w]``; whole blocks, and fewer
            than a chunk.
    """

    text: Tensor
    text_after: Tensor | None = None
    start: Tensor | None = None


class PromptSource(Protocol):
    """Gives the prompts of samples."""

    def __call__(self, samples: Sequence[int]) -> Prompts:
        """Prompts of samples, a function of their numbers in the run."""


def second_prompt(prompts: Prompts, batch: int, *, switches: bool) -> Tensor:
    """The second prompt ``[b, l, d]``; empty if the sequence has no switch.

    Raises:
        DataError: it is needed and missing, or a prompt has not the batch size.
    """
    after = prompts.text_after
    if switches and after is None:
        raise DataError(
            "the prompts have no `text_after`, but sequences switch to a second prompt; give "
            "pairs of prompts, or turn `switch_prompts` off."
        )
    for name, text in (("text", prompts.text), ("text_after", after)):
        if text is not None and (text.dim() != 3 or text.size(0) != batch):
            raise DataError(
                f"`{name}` has the shape {list(text.shape)}, but must be [{batch}, l, d], one "
                "for each sample."
            )
    return after if switches and after is not None else prompts.text.new_empty(0)


def given_frames(prompts: Prompts, like: Tensor, options: StreamingOptions) -> Tensor:
    """Given first frames ``[b, t, c, h, w]``; t is 0 if there are none.

    Args:
        prompts: of the sequence.
        like: ``[b, 0, c, h, w]``, which gives sizes, dtype and device.
        options: see `StreamingOptions`.

    Raises:
        DataError: frames of another size, or not whole blocks, or as many as a chunk.
    """
    if prompts.start is None:
        return like
    start, block = prompts.start, options.block
    sizes = (start.shape[0], *start.shape[2:]) == (like.shape[0], *like.shape[2:])
    if not sizes or start.size(1) % block or start.size(1) >= options.chunk_frames:
        raise DataError(
            f"`start` has the shape {list(start.shape)}, but must be [{like.size(0)}, t, "
            f"{', '.join(map(str, like.shape[2:]))}] with whole blocks of {block} frames, fewer "
            f"than a chunk ({options.chunk_frames})."
        )
    return start.to(like)
