"""Defines the noise levels of distribution matching on videos.

Noised latents are ``x_t = (1 - sigma) * x0 + sigma * noise``, where sigma is the noise level. The
networks get ``x_t`` and the timestep, 0 to 1000, and predict the flow ``noise - x0``. A table,
shifted to higher noise, gives the sigma of each timestep (Wan 2.1, arXiv:2503.20314; LongLive,
arXiv:2509.22622).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.video.loss import shift, spread
from megatron_ext.video.streaming.config import StreamingConfig

NUM_TIMESTEPS = 1000
"""Number of entries of the table, and the timestep of pure noise."""


class NoiseSchedule:
    """The noise levels and timesteps for denoising, for critic and teacher, and for past frames.

    Args:
        streaming: the flags. Shifting turns a level s into sigma = a * s / (1 + (a - 1) * s), where
            a is ``timestep_shift``; the table has the shifted levels of s = 1, 0.999, ..., 0.001.
            With ``warp_denoising_steps``, each of ``denoising_steps`` is 1000 * s for a level s to
            shift; otherwise it is already a timestep.

    Attributes:
        sigmas: the table, decreasing from 1, ``[1000]`` float64 on the CPU.
        denoising_timesteps: timesteps of the generator's denoising steps, decreasing.
    """

    def __init__(self, streaming: StreamingConfig) -> None:
        self.streaming = streaming
        table = torch.arange(NUM_TIMESTEPS, 0, -1, dtype=torch.float64) / NUM_TIMESTEPS
        self.sigmas = shift(table, streaming.timestep_shift)
        # In increasing order, as bisection for the nearest entry needs.
        self._timesteps = self.sigmas.flip(0) * NUM_TIMESTEPS
        steps = torch.tensor(streaming.denoising_steps, dtype=torch.float64)
        if streaming.warp_denoising_steps:
            steps = shift(steps / NUM_TIMESTEPS, streaming.timestep_shift) * NUM_TIMESTEPS
        self.denoising_timesteps: tuple[float, ...] = tuple(steps.tolist())

    def sigma(self, timesteps: Tensor) -> Tensor:
        """Return the sigma of the table entry nearest to each timestep, in float64.

        It is never 0, since all entries of the table are above 0.
        """
        table = self._timesteps.to(timesteps.device)
        t = timesteps.double()
        above = torch.searchsorted(table, t.contiguous()).clamp(1, len(table) - 1)
        low = table[above - 1]
        high = table[above]
        return torch.where(t - low < high - t, low, high) / NUM_TIMESTEPS

    def context_sigma(self, *, recached: bool = False) -> float:
        """Return the noise level of the past frames to which the generator attends.

        It is the level of the table entry nearest to the timestep ``--context-noise``. The lowest
        level in the table is above 0 (0.5% with the default shift). The result is 0 in two cases:

        - without ``context_noise_from_table``, if ``--context-noise`` is 0,
        - with ``context_noise_from_table``, if ``recached``, as in LongLive. The past frames are
          then encoded again, because the prompt has changed or the cache was lost.
        """
        noise = self.streaming.context_noise
        from_table = self.streaming.context_noise_from_table
        is_clean = recached if from_table else noise == 0
        return 0.0 if is_clean else float(self.sigma(torch.tensor(noise)))

    def score_timesteps(self, uniforms: Tensor, exit_step: int | None = None) -> Tensor:
        """Return the timesteps at which critic and teacher evaluate clips, ``[b]`` float32.

        They are between ``min_timestep`` and ``max_timestep``. With ``ts_schedule`` a clip is
        noised at least as much as the input of the denoising step after ``exit_step``; with
        ``ts_schedule_max`` at most as much as the input of ``exit_step``. Self-Forcing
        (arXiv:2506.08009) has the same bounds.

        Args:
            uniforms: random numbers in [0, 1), ``[b]``; each selects a timestep before the shift,
                0 to 999, within the bounds of ``ts_schedule`` and ``ts_schedule_max``.
            exit_step: denoising step, counted from 0, at which all blocks of the clip end. None if
                blocks may end at different steps; then ``ts_schedule`` and ``ts_schedule_max`` have
                no effect.
        """
        streaming = self.streaming
        exits = self.denoising_timesteps
        low = 0
        high = NUM_TIMESTEPS
        if exit_step is not None:
            if streaming.ts_schedule and exit_step < len(exits) - 1:
                low = self._step(exits[exit_step + 1])
            if streaming.ts_schedule_max:
                high = max(low + 1, self._step(exits[exit_step]))
        drawn = (uniforms.double() * (high - low)).floor().clamp(max=high - low - 1)
        timesteps = shift((low + drawn) / NUM_TIMESTEPS, streaming.timestep_shift) * NUM_TIMESTEPS
        return timesteps.clamp(streaming.min_timestep, streaming.max_timestep).float()

    def _step(self, timestep: float) -> int:
        """Return the number of the table entry nearest to ``timestep``: 1 has the least noise."""
        return 1 + int((self._timesteps - timestep).abs().argmin())

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the latents ``x0`` with ``noise`` at the noise level of ``timesteps``.

        ``timesteps`` are ``[b]``, or ``[b, t]`` with one for each frame.
        """
        return mixed(x0, noise, self.sigma(timesteps))


def mixed(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t, the latents ``x0`` mixed with noise, ``[b, t, c, h, w]`` in the dtype of ``x0``.

    ``sigma`` has a level for each sample ``[b]`` or each frame ``[b, t]``, or one for all ``[]``.
    """
    s = spread(sigma, x0)
    return ((1 - s) * x0.double() + s * noise.double()).to(x0.dtype)
