"""Decides how streaming sequences grow, when prompts switch, and which network each step trains.

A sequence is a batch of long videos that grow together; a sample is one of these videos. A clip is
the input of critic and teacher: the newest ``--chunk-frames`` latent frames of a sequence. A step
generates a new clip for each micro-batch of each network that it trains.

Random choices depend only on the seed and on indices. Lengths, growth, switches and exit steps (the
last denoising step of each block) depend on the indices of sequence and clip, so they are the same
on all ranks, as collectives require. Noise depends on the indices of samples in the run. It
differs between replicas, but does not depend on the layout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from megatron_ext.video.data.randomness import draw_noise, draw_uniforms, generator
from megatron_ext.video.streaming.config import StreamingConfig

logger = logging.getLogger(__name__)

Pass = Literal["generator", "critic"]


def num_clips(streaming: StreamingConfig, length: int) -> int:
    """Return the largest number of clips that a sequence of ``length`` frames can have.

    The first clip has ``chunk_frames`` frames; each later one adds at least ``min_new_frames``.
    """
    return 1 + (length - streaming.chunk_frames) // streaming.min_new_frames


def switch_candidates(streaming: StreamingConfig, length: int) -> tuple[int, ...]:
    """Return the frames at which a sequence of ``length`` frames may switch its prompt.

    These are the frames of ``--switch-frames`` below ``length``. Without the flag they are the
    first new frames of all clips except the first and the last clip, computed as if every clip
    added ``min_new_frames``. The result is empty if the sequence is too short or the run has no
    second prompts.
    """
    if not streaming.switches:
        return ()
    if streaming.switch_frames:
        return tuple(x for x in streaming.switch_frames if x < length)
    starts = range(streaming.chunk_frames, length, streaming.min_new_frames)
    return tuple(starts)[: max(0, num_clips(streaming, length) - 2)]


def passes(streaming: StreamingConfig, step: int, accumulation: int = 1) -> tuple[Pass, ...]:
    """Return the names of the networks that the clips of step ``step`` train, one for each clip.

    Every step trains the critic on ``accumulation`` clips. One in ``generator_interval`` steps
    also trains the generator on as many clips, which alternate with those of the critic.
    """
    trains_generator = step % streaming.generator_interval == 0
    once: tuple[Pass, ...] = ("generator", "critic") if trains_generator else ("critic",)
    return once * accumulation


def clips_seen(streaming: StreamingConfig, trained_clips: int, accumulation: int = 1) -> set[int]:
    """Return which clips of a sequence, as indices, train the generator in some sequence.

    The index, from 0, counts only the ``trained_clips`` clips of a sequence that train generator
    or critic; all sequences have this number. The run trains each network on ``accumulation`` clips
    per step.
    """
    cycle = [
        kind
        for step in range(streaming.generator_interval)
        for kind in passes(streaming, step, accumulation)
    ]
    ours = [place for place, kind in enumerate(cycle) if kind == "generator"]
    return {(n * len(cycle) + x) % trained_clips for n in range(trained_clips) for x in ours}


def num_trained_clips(streaming: StreamingConfig) -> int | None:
    """Return how many clips of each sequence are trained on; None if the number is random."""
    counts = {num_clips(streaming, length) for length in streaming.sequence_lengths}
    if len(counts) > 1 or streaming.min_new_frames < streaming.max_new_frames:
        return None
    return counts.pop() - (not streaming.train_first_chunk)


def aliasing(streaming: StreamingConfig, accumulation: int = 1) -> str | None:
    """Return a warning if the generator misses the same clips in every sequence, else None.

    The result is also None if the number of trained clips of a sequence is random. The run trains
    each network on ``accumulation`` clips per step.
    """
    clips = num_trained_clips(streaming)
    if clips is None:
        return None
    trained = clips_seen(streaming, clips, accumulation)
    if len(trained) == clips:
        return None
    interval = streaming.generator_interval
    return (
        f"`generator_interval` ({interval}) and sequences of {clips} trained chunks make the "
        f"generator see only chunks {', '.join(map(str, sorted(trained)))} of each; choose lengths "
        f"whose number of chunks has no divisor in common with {interval + 1}."
    )


def warn_of_aliasing(streaming: StreamingConfig, accumulation: int = 1) -> None:
    """Log a warning if the generator misses the same clips in every sequence."""
    problem = aliasing(streaming, accumulation)
    if problem:
        logger.warning("%s", problem)


def sequence_length(streaming: StreamingConfig, seed: int, sequence: int) -> int:
    """Return the number of frames that sequence ``sequence`` of the run may not exceed."""
    return _choice(streaming.sequence_lengths, seed, sequence, "streaming length")


def switch_frame(streaming: StreamingConfig, seed: int, sequence: int) -> int | None:
    """Return the frame at which a sequence switches to its second prompt; None if it never does."""
    candidates = switch_candidates(streaming, sequence_length(streaming, seed, sequence))
    return _choice(candidates, seed, sequence, "streaming switch") if candidates else None


def new_frames(
    streaming: StreamingConfig, seed: int, sequence: int, clip: int, *, remaining: int
) -> int:
    """Return how many frames the clip with index ``clip`` (1 or more) adds to its sequence.

    The number is drawn, in steps of one block, from ``min_new_frames`` up to ``max_new_frames`` or
    ``remaining``, whichever is smaller.
    """
    most = min(streaming.max_new_frames, remaining)
    choices = range(streaming.min_new_frames, most + 1, streaming.frame_block)
    return _choice(choices, seed, sequence, f"streaming growth {clip}")


def exit_steps(
    streaming: StreamingConfig, seed: int, sequence: int, clip: int, *, blocks: int, steps: int
) -> tuple[int, ...]:
    """Return, for each of a clip's ``blocks`` blocks, the last denoising step that it goes through.

    The step is a random number from 0 to ``steps`` - 1, the same for all blocks of the clip with
    ``same_exit_across_blocks``. With ``last_step_only`` it is always the last step.
    """
    if streaming.last_step_only:
        return (steps - 1,) * blocks
    source = generator(seed, sequence, f"streaming exits {clip}")
    drawn = [int(x) for x in source.integers(steps, size=blocks)]
    return (drawn[0],) * blocks if streaming.same_exit_across_blocks else tuple(drawn)


def noise(
    seed: int,
    samples: Sequence[int],
    shape: Sequence[int],
    purpose: str,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Draw standard normal noise ``[b, *shape]`` for b samples, the same in any layout.

    Args:
        samples: indices of the b samples in the run.
        purpose: a name for what the noise is used for, unique within a sequence.
        like: a tensor with the wanted dtype and device; None is float32 on the CPU.
    """
    drawn = draw_noise(seed, samples, shape, f"streaming {purpose}")
    return drawn if like is None else drawn.to(like.device, like.dtype)


def uniforms(seed: int, samples: Sequence[int], purpose: str) -> Tensor:
    """Draw a uniform number in [0, 1) for each sample, ``[b]`` float64.

    ``samples`` are the indices of the b samples in the run. ``purpose`` names what the numbers
    are used for.
    """
    return draw_uniforms(seed, samples, f"streaming {purpose}")


def block_noise(
    seed: int, samples: Sequence[int], shape: Sequence[int], frame: int, step: int, *, like: Tensor
) -> Tensor:
    """Draw noise for the block that begins at ``frame``, ``[b, *shape]`` in the dtype of ``like``.

    ``samples`` are the indices of the b samples in the run.

    Step 0 is the noise from which the block is denoised. Steps 1 and later are the noise that is
    added before later denoising steps. Step -1 is the noise that is added before the block is
    written into the cache.
    """
    return noise(seed, samples, shape, f"frame {frame} step {step}", like=like)


def _choice(choices: Sequence[int], seed: int, sequence: int, purpose: str) -> int:
    return choices[int(generator(seed, sequence, purpose).integers(len(choices)))]
