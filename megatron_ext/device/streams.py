"""Work of a device beside the host: copies for which nobody waits, and CUDA graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, or the tensor itself where it lies there.

    A GPU fetches by itself from pinned memory only; from other memory the host copies first, and
    without ``non_blocking`` it also waits for all that the GPU has still to do. The copy has a
    stream of its own, so that the GPU fetches while it computes what was launched before.
    """
    if device.type != "cuda" or host.device.type != "cpu":
        return host.to(device, non_blocking=True)
    copies, current = _stream_of_copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        copy = host.pin_memory().to(device, non_blocking=True)
    current.wait_stream(copies)
    copy.record_stream(current)
    return copy


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostCopy:
    """A few numbers ``[n]``, on any device, on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the numbers; wait until they are computed, but not for later work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


@contextmanager
def other_threads_go_on() -> Iterator[None]:
    """Let other threads use the GPU without spoiling what this one captures within.

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
