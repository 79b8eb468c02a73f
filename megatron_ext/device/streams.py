"""Asynchronous copies between host and device, and helpers for CUDA graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device, or the tensor itself if it is there already.

    The copy to a GPU goes from pinned memory through a separate stream. So it overlaps kernels
    launched earlier, and the host does not wait for it.
    """
    if device.type != "cuda" or host.device.type != "cpu":
        return host.to(device, non_blocking=True)
    copies = _stream_of_copies(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        copy = host.pin_memory().to(device, non_blocking=True)
    current.wait_stream(copies)
    copy.record_stream(current)
    return copy


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostCopy:
    """A copy of a few numbers ``[n]`` from any device to the host, begun without waiting for it."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the numbers; wait until they are copied, but not for work launched later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


@contextmanager
def other_threads_go_on() -> Iterator[None]:
    """Let other threads use the GPU while this thread captures CUDA graphs in this context.

    In the default capture mode, the pinning thread of a data loader would fail and break the
    capture. `torch.cuda.make_graphed_callables` has no argument for the mode, so `torch.cuda.graph`
    is replaced in this context by a version with mode "thread_local".
    """
    original = torch.cuda.graph
    torch.cuda.graph = functools.partial(original, capture_error_mode="thread_local")  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.graph = original  # type: ignore[misc]


def destroy_graphs() -> None:
    """Destroy all CUDA graphs of this process, for which NCCL's shutdown would otherwise wait.

    The traceback of a failed step may keep graphs alive:
    https://docs.nvidia.com/dl-cuda-graph/troubleshooting/process-hang.html
    """
    if torch.cuda.graph.default_capture_stream is None:
        return  # nothing was ever captured
    for thing in gc.get_objects():
        if type(thing) is torch.cuda.CUDAGraph:
            thing.reset()
