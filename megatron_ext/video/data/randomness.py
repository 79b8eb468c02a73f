"""Draws the random numbers of a micro-batch, as a function of the seed and the sample numbers.

Each number comes from a counter-based generator (Philox, SC11 "Parallel random numbers: as easy as
1, 2, 3") whose key is a hash of the seed, the number of the sample in the run and the purpose.
Therefore the ranks of a replica draw the same numbers without communication, replicas draw
different ones, the parallel layout does not matter, and a resumed run needs no generator state.

numpy's Philox has keys of 128 bits. Seeds of torch's CPU generator have only 32 bits: among 100,000
samples, two would probably share their noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.video.config.run import ConditionConfig, TextDropoutConfig
from megatron_ext.video.data.conditions import draw_modes


@dataclass(frozen=True)
class Randomness:
    """The random numbers and choices for the b samples of a micro-batch, on the CPU.

    Attributes:
        noise: noise of each clip, ``[b, c, t, h, w]`` float32, standard normal.
        normals: numbers from which timesteps are computed, ``[b]`` float32, standard normal.
        modes: condition mode of each clip (which frames it is given, if any), as an index into
            `config.run.MODES`, ``[b]`` int64.
        drop_text: whether to use the token embeddings of the empty caption, ``[b]`` bool.
        drop_pooled: whether to use the pooled embedding of the empty caption, ``[b]`` bool.
    """

    noise: Tensor
    normals: Tensor
    modes: Tensor
    drop_text: Tensor
    drop_pooled: Tensor


def generator(seed: int, sample: int, purpose: str) -> np.random.Generator:
    """Return a new generator, a function of seed, number of the sample in the run, and purpose.

    A purpose is any name, such as "noise"; other purposes give independent numbers.
    """
    digest = hashlib.blake2b(f"{seed} {sample} {purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def sample_numbers(
    consumed_samples: int, microbatch: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Return the numbers of a micro-batch's samples, counted through the whole run.

    Args:
        consumed_samples: number of samples of all earlier training steps, over all replicas.
        microbatch: index of the micro-batch in its step.
    """
    first = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


def draw_normals(
    seed: int, samples: Sequence[int], purpose: str, count: int | None = None
) -> Tensor:
    """Return a standard normal number for each sample, ``[b]`` float32, drawn by `generator`.

    With ``count``, return that many for each sample, ``[b, count]``; the first of them is the
    number that is returned without ``count``.
    """
    drawn = [generator(seed, sample, purpose).standard_normal(count or 1) for sample in samples]
    numbers = torch.from_numpy(np.stack(drawn)).float()
    return numbers[:, 0] if count is None else numbers


def draw_noise(
    seed: int, samples: Sequence[int], shape: Sequence[int], purpose: str = "noise"
) -> Tensor:
    """Return standard normal numbers for each sample, ``[b, *shape]`` float32; see `generator`."""
    draws = (generator(seed, sample, purpose) for sample in samples)
    drawn = [draw.standard_normal(tuple(shape), dtype=np.float32) for draw in draws]
    return torch.from_numpy(np.stack(drawn))


def draw_uniforms(seed: int, samples: Sequence[int], purpose: str) -> Tensor:
    """Return a uniform number in [0, 1) for each sample, ``[b]`` float64; see `generator`."""
    drawn = [generator(seed, sample, purpose).random() for sample in samples]
    return torch.tensor(drawn, dtype=torch.float64)


def draw_microbatch(
    seed: int,
    samples: Sequence[int],
    shape: tuple[int, int, int, int],
    conditions: ConditionConfig,
    dropout: TextDropoutConfig,
) -> Randomness:
    """Draw all random numbers for a micro-batch of latents of shape (c, t, h, w).

    ``samples`` are the numbers of the samples in the run; ``conditions`` has the weights of the
    condition modes, ``dropout`` the probabilities of dropping captions. ConfigError is raised if
    no condition mode fits clips of t latent frames.
    """
    return Randomness(
        noise=draw_noise(seed, samples, shape),
        normals=draw_normals(seed, samples, "timestep"),
        modes=draw_modes(conditions, shape[1], draw_uniforms(seed, samples, "condition")),
        drop_text=draw_uniforms(seed, samples, "text dropout") < dropout.text_dropout,
        drop_pooled=draw_uniforms(seed, samples, "pooled dropout") < dropout.pooled_dropout,
    )
