"""The device of the ranks: CUDA with NCCL, or the CPU with Gloo.

`select` is the only place in the package that decides between them. It imports torch; this module
itself does not, so that a program can check its flags before it imports torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    import torch

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
        import torch

        if self.kind == "cpu":
            from megatron_ext.device import cuda_shim

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
    import torch

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


DEVICE_FILES = Path("/dev")
_OF_CUDA = "nvidia*", "dxg", "nvhost*", "nvmap", "nvgpu"
"""Patterns of the names of a CUDA driver's `DEVICE_FILES`: on servers, in WSL, and on Jetson."""


def surely_no_gpu() -> bool:
    """Return True if `select` certainly returns the CPU, as far as this is known without torch.

    It is certain if torch is built for CPUs only. With a build for CUDA, it is certain if
    ``CUDA_VISIBLE_DEVICES`` is empty, or if Linux has neither a CUDA driver nor a file of one in
    /dev. Otherwise only torch knows, and the result is False.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except (OSError, SyntaxError, ImportError):
        return False
    if build.get("hip", "unknown") is not None:
        return False
    if build.get("cuda", "unknown") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return True
    if sys.platform != "linux" or any(any(DEVICE_FILES.glob(x)) for x in _OF_CUDA):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


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
    import torch

    if torch.cuda.is_available():
        return Device("cuda", backend or "nccl")
    if backend == "nccl":
        logger.info("no GPU was found: the ranks talk over gloo instead of nccl")
    return Device("cpu", "gloo")
