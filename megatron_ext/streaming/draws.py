"""Every random decision about streaming sequences, as a function of the seed and of numbers.

Two kinds. Control flow (exit steps, growth, lengths, switches) must be the same on all ranks, whose
collectives would not meet otherwise; it follows the numbers of sequence and chunk. Noise differs
between replicas and follows the numbers of the samples in the run, so that it does not depend on
the layout. As in `data.video.draws` there are no states of generators to keep, nothing else can
consume them, and ranks need not speak.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_ext.data.video.draws import draw_noise, draw_uniforms, generator
from megatron_ext.streaming.options import StreamingOptions


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
