"""Noise levels of distribution matching on videos.

The path is ``x_t = (1 - sigma) * x0 + sigma * noise``. Networks predict the flow ``v = noise - x0``
and are told the timestep ``t``, 0 to 1000. A table with a shift towards the noise gives the sigma
of a timestep (Wan 2.1, arXiv:2503.20314; LongLive, arXiv:2509.22622). Sigmas and clean latents are
computed in float64, since x0 is a difference of numbers of like size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.video.loss import shift, spread
from megatron_ext.video.streaming.config import StreamingConfig

NUM_TIMESTEPS = 1000
"""Entries of the table, and the timestep of pure noise."""


class NoiseSchedule:
    """A table of noise levels, and the levels that a streaming run uses for each purpose.

    Args:
        streaming: its ``timestep_shift`` is a in sigma = a * s / (1 + (a - 1) * s). Its
            ``denoising_steps`` count thousandths of the way from data to noise, and are shifted
            as the table is with ``warp_denoising_steps``; else they are timesteps.

    Attributes:
        sigmas: the table, falling from 1, ``[1000]`` float64 on the CPU.
        denoising_timesteps: timesteps of the generator's steps, falling.
    """

    def __init__(self, streaming: StreamingConfig) -> None:
        self.streaming = streaming
        table = torch.arange(NUM_TIMESTEPS, 0, -1, dtype=torch.float64) / NUM_TIMESTEPS
        self.sigmas = shift(table, streaming.timestep_shift)
        # Rising, so that the nearest entry is found by bisection.
        self._timesteps = self.sigmas.flip(0) * NUM_TIMESTEPS
        steps = torch.tensor(streaming.denoising_steps, dtype=torch.float64)
        if streaming.warp_denoising_steps:
            steps = shift(steps / NUM_TIMESTEPS, streaming.timestep_shift) * NUM_TIMESTEPS
        self.denoising_timesteps: tuple[float, ...] = tuple(steps.tolist())

    def sigma(self, timesteps: Tensor) -> Tensor:
        """Return the noise at the entries of the table that lie nearest to timesteps.

        Args:
            timesteps: 0 to 1000, of any shape.

        Returns:
            float64 in the same shape; never 0, since the table ends before it.
        """
        table = self._timesteps.to(timesteps.device)
        t = timesteps.double()
        above = torch.searchsorted(table, t.contiguous()).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        return torch.where(t - low < high - t, low, high) / NUM_TIMESTEPS

    def context_sigma(self, *, recached: bool = False) -> float:
        """Return the noise of frames that the generator sees as its past.

        With ``context_noise_from_table`` the table decides, which at timestep 0 gives 0.5% of
        noise; frames of a recache then have none, as in LongLive. Otherwise sigma is 0 at
        timestep 0, and all frames of the past are noised alike.

        Args:
            recached: the frames are encoded anew at a prompt switch.
        """
        streaming = self.streaming
        from_table = streaming.context_noise_from_table
        if (from_table and recached) or (not from_table and streaming.context_noise == 0):
            return 0.0
        return float(self.sigma(torch.tensor(streaming.context_noise)))

    def score_timesteps(self, uniforms: Tensor, exit_step: int | None = None) -> Tensor:
        """Return the timesteps at which scores are compared and the critic is trained.

        As in Self-Forcing (arXiv:2506.08009), ``ts_schedule`` allows no less noise than the
        denoising step after the exit step has, and ``ts_schedule_max`` no more than the exit step.

        Args:
            uniforms: in [0, 1), ``[b]``; each chooses one of the steps before the shift.
            exit_step: exit step of all blocks of the clip, counted from 0; None where blocks
                differ, which allows all steps.

        Returns:
            ``[b]`` float32 between ``min_timestep`` and ``max_timestep``.
        """
        streaming, exits = self.streaming, self.denoising_timesteps
        low, high = 0, NUM_TIMESTEPS
        if exit_step is not None:
            if streaming.ts_schedule and exit_step < len(exits) - 1:
                low = self._step(exits[exit_step + 1])
            if streaming.ts_schedule_max:
                high = max(low + 1, self._step(exits[exit_step]))
        drawn = (uniforms.double() * (high - low)).floor().clamp(max=high - low - 1)
        timesteps = shift((low + drawn) / NUM_TIMESTEPS, streaming.timestep_shift) * NUM_TIMESTEPS
        return timesteps.clamp(streaming.min_timestep, streaming.max_timestep).float()

    def _step(self, timestep: float) -> int:
        """Return the step before the shift, 1 to 1000, whose timestep lies nearest."""
        return 1 + int((self._timesteps - timestep).abs().argmin())

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return ``(1 - sigma) * x0 + sigma * noise``; see `mixed`.

        Args:
            timesteps: one for each sample ``[b]`` or for each frame ``[b, t]``.
        """
        return mixed(x0, noise, self.sigma(timesteps))


def mixed(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return the point of the path between data and noise.

    Args:
        x0: clean latents, ``[b, t, c, h, w]``; ``noise`` has their shape.
        sigma: one for each sample ``[b]``, for each frame ``[b, t]``, or one for all ``[]``.

    Returns:
        ``[b, t, c, h, w]`` in the dtype of ``x0``.
    """
    s = spread(sigma, x0)
    return ((1 - s) * x0.double() + s * noise.double()).to(x0.dtype)
