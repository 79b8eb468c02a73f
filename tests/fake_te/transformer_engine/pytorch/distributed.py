"""Recomputation and generators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transformer_engine.record import record


class CudaRNGStatesTracker:
    def reset(self) -> None:
        """Forget all."""


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    yield


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant")
    record("checkpoint", **{name: kwargs.pop(name) for name in options if name in kwargs})
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
