"""Copies between the host and a device for which nobody waits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, or the tensor itself where it lies there.

    A GPU fetches by itself from pinned memory only; from other memory the host copies first, and
    without ``non_blocking`` it also waits for all that the GPU has still to do. The copy has a
    stream of its own, so that the GPU fetches while it computes what was launched before.
    """
    if device.type != "cuda" or host.device.type != "cpu":
        return host.to(device, non_blocking=True)
    beside, current = _copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(beside):
        there = host.pin_memory().to(device, non_blocking=True)
    current.wait_stream(beside)
    there.record_stream(current)
    return there


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostCopy:
    """A few numbers on their way to the host.

    Args:
        values: on any device, ``[n]``.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers; waits for what computes them, but not for what was launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
