"""Noise levels of distribution matching on videos.

The path is ``x_t = (1 - sigma) * x0 + sigma * noise``. Networks predict the flow ``v = noise - x0``
and are told the timestep ``t``, 0 to 1000. A table with a shift towards the noise gives the sigma
of a timestep (Wan 2.1, arXiv:2503.20314; LongLive, arXiv:2509.22622).
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
        """Return the noise at the entries of the table that lie nearest to timesteps, in float64.

        It is never 0, since the table ends before it.
        """
        table = self._timesteps.to(timesteps.device)
        t = timesteps.double()
        above = torch.searchsorted(table, t.contiguous()).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        return torch.where(t - low < high - t, low, high) / NUM_TIMESTEPS

    def context_sigma(self, *, recached: bool = False) -> float:
        """Return the noise of frames that the generator sees as its past.

        With ``context_noise_from_table`` the table decides, which at timestep 0 gives 0.5% of
        noise; frames ``recached`` at a prompt switch then have none, as in LongLive. Otherwise
        sigma is 0 at timestep 0, and all frames of the past are noised alike.
        """
        noise, from_table = self.streaming.context_noise, self.streaming.context_noise_from_table
        is_clean = recached if from_table else noise == 0
        return 0.0 if is_clean else float(self.sigma(torch.tensor(noise)))

    def score_timesteps(self, uniforms: Tensor, exit_step: int | None = None) -> Tensor:
        """Return the timesteps at which clips are looked at, ``[b]`` float32.

        As in Self-Forcing (arXiv:2506.08009), ``ts_schedule`` allows no less noise than the
        denoising step after the exit step has, and ``ts_schedule_max`` no more than the exit step.

        Args:
            uniforms: in [0, 1), ``[b]``; each chooses one of the steps before the shift.
            exit_step: exit step of all blocks of the clip, counted from 0; None where blocks
                differ, which allows all steps.
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
        """Return x_t at timesteps of samples ``[b]`` or of frames ``[b, t]``; see `mixed`."""
        return mixed(x0, noise, self.sigma(timesteps))


def mixed(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t for latents and noise ``[b, t, c, h, w]``, in the dtype of ``x0``.

    There is one sigma for each sample ``[b]``, for each frame ``[b, t]``, or one for all ``[]``.
    """
    s = spread(sigma, x0)
    return ((1 - s) * x0.double() + s * noise.double()).to(x0.dtype)
