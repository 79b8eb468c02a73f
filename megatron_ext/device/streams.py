"""Streams and events of a device that does one thing after the other.

Copies between the host and a device for which nobody waits.

The beginning and the end of CUDA graphs.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import DeviceNotSupported


class CpuStream:
    """A CUDA stream on a CPU: all streams are the same one, and their work is done already."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes a device and a priority, as CUDA's does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)

    def wait_stream(self, stream: CpuStream) -> None:
        """Nothing is outstanding."""

    def wait_event(self, event: CpuEvent) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """An event that has happened already."""
        return event if event is not None else CpuEvent()

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class CpuEvent:
    """A CUDA event on a CPU: it has happened, but when is not known."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes timing and blocking options, as CUDA's does."""

    def record(self, stream: CpuStream | None = None) -> None:
        """All earlier work is done."""

    def wait(self, stream: CpuStream | None = None) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Would be an invented measurement.

        Raises:
            DeviceNotSupported: always.
        """
        raise DeviceNotSupported(
            "`torch.cuda.Event.elapsed_time` times a GPU, but this run is on a CPU; use "
            "`time.perf_counter`."
        )


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


@contextmanager
def other_threads_go_on() -> Iterator[None]:
    """What other threads ask of the GPU does not spoil what this one captures within.

    The thread of a data loader that pins memory would end a capture of the default mode, and with
    it itself. `torch.cuda.make_graphed_callables` takes no mode, so it gets another `graph`.
    """
    original = torch.cuda.graph
    torch.cuda.graph = partial(original, capture_error_mode="thread_local")  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.graph = original  # type: ignore[misc]


def destroy_graphs() -> None:
    """Destroy all CUDA graphs of this process, whoever still refers to them.

    NCCL takes no communicator down as long as a graph holds its operations, but waits, and a
    failed step's traceback may hold graphs:
    https://docs.nvidia.com/dl-cuda-graph/troubleshooting/process-hang.html
    """
    if torch.cuda.graph.default_capture_stream is None:
        return  # nothing was ever captured
    for thing in gc.get_objects():
        if type(thing) is torch.cuda.CUDAGraph:
            thing.reset()
