"""Follows the flow from noise to data in steps: by Euler's method, or by a scheduler of diffusers.

A solver belongs to one batch of clips, since solvers of higher order remember earlier steps. Its
times are those of the flow, from 1 (noise) to 0 (data), which `video.loss.shift` has moved towards
the noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import FlowConfig, SampleConfig
from megatron_ext.video.loss import shift, shift_factor
from megatron_ext.video.model.tokens import LatentShape, tokens_per_frame
from megatron_ext.video.sampling.pipeline import read_part

EULER = "FlowMatchEulerDiscreteScheduler"
_MULTISTEP = {"unipc": "UniPCMultistepScheduler", "dpm++": "DPMSolverMultistepScheduler"}
SCHEDULERS = (EULER, *_MULTISTEP.values())
"""The classes of diffusers' schedulers that can sample a flow, as a folder's scheduler."""
_OF_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
_RANDOM = {
    "stochastic_sampling": (True,),
    "algorithm_type": ("sde-dpmsolver", "sde-dpmsolver++"),
}
"""Settings of schedulers that draw noise in each step, which ranks would draw differently."""


_NUMBERS = (
    "shift flow_shift base_shift max_shift base_image_seq_len max_image_seq_len num_train_timesteps"
).split()
"""Settings of schedulers that must be numbers above 0, if they are there."""


class Solver(ABC):
    """The steps of one batch of clips from noise to data.

    Attributes:
        times: the time at which the model is asked in each step, in falling order.
    """

    times: list[float]

    @abstractmethod
    def step(self, number: int, x: Tensor, velocity: Tensor) -> Tensor:
        """Take step ``number`` (from 0 on, in order) from ``x`` along its velocity; return the end.

        Both tensors are float32.
        """


class Euler(Solver):
    """Euler's method; ``times`` ``[num_steps + 1]`` end with 0."""

    def __init__(self, times: Tensor) -> None:
        *self.times, self._end = times.tolist()

    def step(self, number: int, x: Tensor, velocity: Tensor) -> Tensor:
        after = [*self.times, self._end][number + 1]
        end: Tensor = x + (after - self.times[number]) * velocity
        return end


class DiffusersSolver(Solver):
    """A scheduler of diffusers whose timesteps are set."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.set_begin_index(0)
        count = scheduler.config.num_train_timesteps
        self.times = [float(step) / count for step in scheduler.timesteps]

    def step(self, number: int, x: Tensor, velocity: Tensor) -> Tensor:
        now = self._scheduler.timesteps[number]
        after: Tensor = self._scheduler.step(velocity, now, x, return_dict=False)[0]
        return after


@dataclass(frozen=True)
class Schedule:
    """How clips are stepped from noise to data: the solver, its settings and the shift of times.

    Attributes:
        flow: flags of training, whose shift applies if nothing else gives one.
        settings: content of a scheduler_config.json of diffusers; empty for none.
        even: whether the times given to `EULER` are evenly spaced before the shift. Otherwise it
            spaces them itself.
    """

    flow: FlowConfig
    sampling: SampleConfig
    settings: Mapping[str, Any] = field(default_factory=dict)
    even: bool = True

    @property
    def class_name(self) -> str | None:
        """Return the class of diffusers' scheduler; None for Euler's method without diffusers."""
        chosen = self.sampling.sample_scheduler
        if chosen is None:
            return self.settings.get("_class_name")
        return _MULTISTEP.get(chosen)

    def solver(self, shape: LatentShape, patch_size: int) -> Solver:
        """Return a new solver for a batch of clips with latents of ``shape`` (t, h, w)."""
        num_steps = self.sampling.sample_steps
        factor = self.factor(shape, patch_size)
        name = self.class_name
        if name is None:
            return Euler(times(num_steps, factor))
        own = self.settings.get("_class_name") == name
        settings = {k: v for k, v in self.settings.items() if own and k[:1] != "_"}
        settings |= {"use_dynamic_shifting": False}
        even = None
        if name == EULER:
            settings["shift"] = factor
            even = np.linspace(1.0, 1 / num_steps, num_steps) if self.even else None
        else:
            settings |= {**_OF_FLOW, "flow_shift": factor}
        try:
            scheduler = scheduler_class(name).from_config(settings)
            if even is None:
                scheduler.set_timesteps(num_steps)
            else:
                scheduler.set_timesteps(sigmas=even)
        # A scheduler refuses its settings by errors of several classes.
        except (TypeError, ValueError, NotImplementedError, AttributeError, ImportError) as error:
            raise ConfigError(
                f"{name} refuses its settings ({error}); correct the folder's "
                "scheduler_config.json, or give another `--sample-scheduler`."
            ) from None
        return DiffusersSolver(scheduler)

    def factor(self, shape: LatentShape, patch_size: int) -> float:
        """Return the factor by which `shift` moves the times of clips of latent ``shape``.

        It is ``--sample-shift``, or that of the scheduler's settings, or that of training.
        """
        if self.sampling.sample_shift is not None:
            return self.sampling.sample_shift
        settings = self.settings
        if settings.get("use_dynamic_shifting"):
            least = settings.get("base_shift", 0.5)
            most = settings.get("max_shift", 1.15)
            start = settings.get("base_image_seq_len", 256)
            end = settings.get("max_image_seq_len", 4096)
            tokens = shape[0] * tokens_per_frame(shape, patch_size)
            mu = least + (most - least) * (tokens - start) / (end - start)
            return mu if settings.get("time_shift_type") == "linear" else math.exp(mu)
        for name in ("flow_shift", "shift"):
            if name in settings:
                return float(settings[name])
        return shift_factor(self.flow, shape, patch_size)


def times(num_steps: int, factor: float) -> Tensor:
    """Return flow times from 1 (noise) to 0 (data), ``[num_steps + 1]`` float32.

    They are evenly spaced, and then moved by `shift` with ``factor``, as in training.
    """
    return shift(torch.linspace(1, 0, num_steps + 1), factor)


def scheduler_class(name: str) -> Any:
    """Return a scheduler's class of diffusers, one of `SCHEDULERS`.

    Raises:
        ConfigError: diffusers is not installed.
    """
    try:
        import diffusers
    except ImportError:
        raise ConfigError(
            f"The scheduler {name} needs the package diffusers, which is not installed; run `pip "
            "install diffusers`, or give `--sample-scheduler euler`."
        ) from None
    return getattr(diffusers, name)


def read_scheduler(folder: Path) -> dict[str, Any]:
    """Return the content of the scheduler_config.json in the folder of a diffusers scheduler.

    Raises:
        ConfigError: the file cannot be read, or the scheduler cannot sample a flow.
    """
    path = folder / "scheduler_config.json"
    settings = read_part(path)
    name = settings.get("_class_name")
    if name not in SCHEDULERS:
        raise ConfigError(
            f"{path} names the scheduler {name}, but clips are sampled with one of "
            f"{', '.join(SCHEDULERS)}; copy the folder of a network of flow matching."
        )
    wanted = {} if name == EULER else _OF_FLOW
    for key, value in wanted.items():
        if settings.get(key) != value:
            raise ConfigError(
                f"{path} has `{key}` {settings.get(key)!r}, but a scheduler of flow matching has "
                f"{value!r}; correct it."
            )
    for key, values in _RANDOM.items():
        if settings.get(key) in values:
            raise ConfigError(
                f"{path} has `{key}` {settings[key]!r}, which draws noise in each step, but ranks "
                f"must step alike; correct it."
            )
    for key in _NUMBERS:
        value = settings.get(key, 1)
        if type(value) not in (int, float) or value <= 0:
            raise ConfigError(
                f"{path} has `{key}` {value!r}, which must be a number above 0; correct it."
            )
    return settings
