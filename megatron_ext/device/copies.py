"""Counted copies between a device and host memory, beside what the device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Traffic:
    """Bytes that have been copied to the host and to the device so far."""

    to_host: int = 0
    to_device: int = 0


class Buffers:
    """Host memory of ``numel`` elements each, used in turn for tensors of at most this size.

    Args:
        count: number of buffers.
        pinned: whether the memory is pinned, so that copies can run beside the host's work.
    """

    def __init__(self, numel: int, dtype: torch.dtype, count: int, *, pinned: bool) -> None:
        like: dict[str, Any] = {"dtype": dtype, "device": "cpu", "pin_memory": pinned}
        self._buffers = [torch.empty(numel, **like) for _ in range(count)]

    def view(self, turn: int, like: Tensor) -> Tensor:
        """Return the buffer of number ``turn``, in the shape of ``like``."""
        whole = self._buffers[turn % len(self._buffers)]
        return whole[: like.numel()].view(like.shape)


class Copy:
    """A copy that has begun; without a GPU it is complete."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device = device
        self.arrived: Any = None
        if stream is not None:
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.arrived.record(stream)

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def precede(self) -> None:
        """Let the device's current stream wait for the copy."""
        if self.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self.arrived)


class Copies:
    """A sequence of copies; without a GPU, each is complete at once.

    Args:
        device: where one side of each copy is; the other side is on the host.
        beside: whether the copies have a stream of their own, beside the current one.
    """

    def __init__(self, device: torch.device, traffic: Traffic, *, beside: bool) -> None:
        self._device = device
        self._traffic = traffic
        self._stream: Any = None
        if device.type == "cuda":
            own = torch.cuda.Stream if beside else torch.cuda.current_stream
            self._stream = own(device)

    def begin(self) -> None:
        """Let later copies wait for what the current stream computes so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, copy: Copy) -> None:
        """Let later copies wait for a copy of another sequence."""
        if self._stream is not None:
            self._stream.wait_event(copy.arrived)

    def end(self) -> None:
        """Let the current stream wait for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """Begin to copy ``source`` from the device to the host."""
        self._traffic.to_host += target.nbytes
        return self._copy(target, source, source)

    def to_device(self, target: Tensor, source: Tensor) -> Copy:
        """Begin to copy ``source`` from the host to the device."""
        self._traffic.to_device += source.nbytes
        return self._copy(target, source, target)

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> Copy:
        if self._stream is None:
            target.copy_(source)
            return Copy(self._device)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The memory must not be given to others before the copy is complete.
        on_device.record_stream(self._stream)
        return Copy(self._device, self._stream)
