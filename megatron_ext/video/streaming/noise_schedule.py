"""Noise levels of distribution matching on videos.

The path is ``x_t = (1 - sigma) * x0 + sigma * noise``, networks predict the flow ``v = noise - x0``
and are told the timestep ``t``, 0 to 1000. Sigma of a timestep is looked up in a table with a shift
towards the noise (Wan 2.1, arXiv:2503.20314; LongLive, arXiv:2509.22622). Sigmas and clean latents
are computed in float64, since x0 is a difference of numbers of like size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.loss import shift, spread


@dataclass(frozen=True)
class NoiseConfig:
    """Which noise levels there are, and which of them are used for what.

    Attributes:
        num_timesteps: N, entries of the table, and the timestep of pure noise.
        timestep_shift: a in sigma = a * s / (1 + (a - 1) * s).
        denoising_steps: of the generator, falling, in units of 1 / N of the way from data to
            noise; a 0 at the end is dropped, since there would be nothing left to denoise.
        warp_denoising_steps: the steps are shifted as the table is; else they are timesteps.
        min_timestep, max_timestep: of the scores that are compared, and of the critic's training.
        ts_schedule: of these no less noise than at the denoising step that follows the exit step of
            the chunk, as in Self-Forcing (arXiv:2506.08009).
        ts_schedule_max: no more than at the exit step.
        context_noise: timestep of frames that the generator sees as its past.
        context_noise_from_table: noise frames of the past as the table says, which at timestep 0
            gives them 0.5% of noise, but not those of a recache, as LongLive does; else sigma is 0
            at timestep 0, and all frames of the past are noised alike.

    Raises:
        ConfigError: a value out of its range.
    """

    num_timesteps: int = 1000
    timestep_shift: float = 5.0
    denoising_steps: tuple[int, ...] = (1000, 750, 500, 250)
    warp_denoising_steps: bool = True
    min_timestep: float = 20.0
    max_timestep: float = 980.0
    ts_schedule: bool = False
    ts_schedule_max: bool = False
    context_noise: float = 0.0
    context_noise_from_table: bool = False

    def __post_init__(self) -> None:
        n, steps, a = self.num_timesteps, self.denoising_steps, self.timestep_shift
        low, high = self.min_timestep, self.max_timestep
        used = steps[:-1] if steps and steps[-1] == 0 else steps
        falls = all(x > y for x, y in zip(used, used[1:], strict=False))
        in_range = bool(used) and used[0] <= n and used[-1] > 0
        for name, rule, fits in (
            ("num_timesteps", "2 or more", n >= 2),
            ("timestep_shift", "finite and above 0", 0 < a < math.inf),
            ("denoising_steps", f"falling numbers from {n} or less to above 0", falls and in_range),
            ("min_timestep", "above 0 and at most max_timestep", 0 < low <= high),
            ("max_timestep", f"at most num_timesteps ({n})", high <= n),
            (
                "context_noise",
                f"0 or more and below num_timesteps ({n})",
                0 <= self.context_noise < n,
            ),
        ):
            if not fits:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be {rule}; leave it out to get the "
                    "default."
                )


class NoiseSchedule:
    """The table of a `NoiseConfig`.

    Args:
        config: see there.

    Attributes:
        sigmas: falling from 1, ``[N]`` float64 on the CPU.
        denoising_timesteps: of the generator's steps.
    """

    def __init__(self, config: NoiseConfig) -> None:
        self.config = config
        n = config.num_timesteps
        self.sigmas = self._shifted(torch.arange(n, 0, -1, dtype=torch.float64) / n)
        # Rising, so that the nearest entry is found by bisection.
        self._timesteps = self.sigmas.flip(0) * n
        self.denoising_timesteps = self._denoising_timesteps()

    def _shifted(self, s: Tensor) -> Tensor:
        return shift(s, self.config.timestep_shift)

    def _denoising_timesteps(self) -> tuple[float, ...]:
        n = self.config.num_timesteps
        steps = torch.tensor([s for s in self.config.denoising_steps if s], dtype=torch.float64)
        timesteps = self._shifted(steps / n) * n if self.config.warp_denoising_steps else steps
        return tuple(timesteps.tolist())

    def sigma(self, timesteps: Tensor) -> Tensor:
        """Noise at the entries of the table that lie nearest to timesteps.

        Args:
            timesteps: 0 to N, of any shape.

        Returns:
            float64 in the same shape; never 0, since the table ends before it.
        """
        table = self._timesteps.to(timesteps.device)
        t = timesteps.double()
        above = torch.searchsorted(table, t.contiguous()).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        return torch.where(t - low < high - t, low, high) / self.config.num_timesteps

    def context_sigma(self, *, recached: bool = False) -> float:
        """Noise of frames of the past.

        Args:
            recached: they are encoded anew at a prompt switch, see ``context_noise_from_table``.
        """
        from_table = self.config.context_noise_from_table
        if (from_table and recached) or (not from_table and self.config.context_noise == 0):
            return 0.0
        return float(self.sigma(torch.tensor(self.config.context_noise)))

    def _score_steps(self, exit_step: int | None) -> range:
        """Steps before the shift, of N, that the exit step of a chunk leaves; all without one."""
        low, high = 0, self.config.num_timesteps
        if exit_step is None:
            return range(low, high)
        last = len(self.denoising_timesteps) - 1
        if self.config.ts_schedule and exit_step < last:
            low = self._step(self.denoising_timesteps[exit_step + 1])
        if self.config.ts_schedule_max:
            high = max(low + 1, self._step(self.denoising_timesteps[exit_step]))
        return range(low, high)

    def _step(self, timestep: float) -> int:
        """The step before the shift, 1 to N, whose timestep lies nearest."""
        return 1 + int((self._timesteps - timestep).abs().argmin())

    def score_timesteps(self, uniforms: Tensor, exit_step: int | None = None) -> Tensor:
        """Timesteps at which scores are compared and the critic is trained.

        Args:
            uniforms: in [0, 1), ``[b]``; they choose one of the steps alike.
            exit_step: of all blocks of the chunk, counted from 0, by which ``ts_schedule`` and
                ``ts_schedule_max`` narrow the steps; None where blocks differ.

        Returns:
            ``[b]`` float32 between ``min_timestep`` and ``max_timestep``.
        """
        n = self.config.num_timesteps
        steps = self._score_steps(exit_step)
        drawn = (uniforms.double() * len(steps)).floor().clamp(max=len(steps) - 1)
        step = steps.start + drawn
        timesteps = self._shifted(step / n) * n
        return timesteps.clamp(self.config.min_timestep, self.config.max_timestep).float()

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """``(1 - sigma) * x0 + sigma * noise``, as ``x0``.

        Args:
            x0: clean latents, ``[b, t, c, h, w]``.
            noise: as ``x0``.
            timesteps: of samples ``[b]`` or of frames ``[b, t]``.
        """
        return mixed(x0, noise, self.sigma(timesteps))


def mixed(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Point of the path between data and noise.

    Args:
        x0: clean latents, ``[b, t, c, h, w]``.
        noise: as ``x0``.
        sigma: of samples ``[b]``, of frames ``[b, t]``, or one for all ``[]``.

    Returns:
        ``[b, t, c, h, w]`` in the dtype of ``x0``.
    """
    s = spread(sigma, x0)
    return ((1 - s) * x0.double() + s * noise.double()).to(x0.dtype)
