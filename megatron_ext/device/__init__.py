"""The device of the ranks: CUDA with NCCL, or the CPU with Gloo.

`select` is the only place in the package that decides between them. This module also has
asynchronous copies and helpers for CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_ext.device import cuda_shim
from megatron_ext.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """The device that ranks run on, and its collective library (``"nccl"`` or ``"gloo"``)."""

    kind: Literal["cuda", "cpu"]
    backend: str

    def activate(self, local_rank: int) -> torch.device:
        """Make this process use the device, before any process group exists; return torch's device.

        On a CPU this also replaces parts of ``torch.cuda`` by stand-ins (`cuda_shim`).

        Raises:
            ConfigError: this machine has more ranks than GPUs.
        """
        if self.kind == "cpu":
            cuda_shim.install()
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"Local rank {local_rank} has no GPU: this machine shows {count}; start at most "
                f"{count} ranks per machine."
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)


def keep_launch_order() -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS=1`` on Hopper and older GPUs, unless it is set already.

    With this single hardware queue, kernels start in the order of their launches, on which
    megatron-core's overlap of tensor-parallel communication relies. (Users of Megatron-LM must set
    the variable themselves.) Call this before `select`: the driver reads it when it starts.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return
    generation = _generation()
    if generation is None or generation < BLACKWELL:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


BLACKWELL = 10
"""Major compute capability of the first GPUs that start kernels in order from several queues."""


def _generation() -> int | None:
    """Return the major compute capability of the first GPU, without starting the CUDA driver.

    It is read from NVIDIA's management library; None if that library or a GPU is missing.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        or library.nvmlDeviceGetCudaComputeCapability(
            handle, ctypes.byref(major), ctypes.byref(minor)
        )
    )
    return None if failed else major.value


def select(backend: str | None = None) -> Device:
    """Return CUDA if there is a GPU, else the CPU.

    The default backend is NCCL on a GPU and Gloo on a CPU. ``"nccl"`` on a machine without a GPU
    becomes Gloo, so that a launch script runs unchanged.

    Raises:
        ConfigError: the backend is neither ``nccl`` nor ``gloo``.
    """
    if backend not in (None, "nccl", "gloo"):
        raise ConfigError(
            f"`--distributed-backend` ({backend}) must be nccl or gloo; leave it out to get the "
            "one that fits the device."
        )
    if torch.cuda.is_available():
        return Device("cuda", backend or "nccl")
    if backend == "nccl":
        logger.info("no GPU was found: the ranks talk over gloo instead of nccl")
    return Device("cpu", "gloo")


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
