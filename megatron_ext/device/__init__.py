"""The device that ranks run on: CUDA with NCCL, or the CPU with Gloo.

`select` is the only place in the package that asks whether a GPU exists.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ext.device import cuda_shim
from megatron_ext.errors import ConfigError

logger = logging.getLogger(__name__)

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Device:
    """The device that ranks run on.

    Attributes:
        kind: ``"cuda"`` or ``"cpu"``.
        backend: the collective library, ``"nccl"`` or ``"gloo"``.
    """

    kind: Kind
    backend: str

    def activate(self, local_rank: int) -> torch.device:
        """Make this process use the device; every rank calls it once, before any group exists.

        On a CPU this installs the shim of ``torch.cuda``. On GPUs it also sets the environment
        that Megatron-LM makes its users export.

        Args:
            local_rank: index of the rank on its machine.

        Raises:
            ConfigError: more ranks than GPUs on this machine.
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
        # One hardware queue keeps the order of kernels and collectives that megatron-core's
        # overlap of tensor-parallel communication relies on.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)


def select(backend: str | None = None) -> Device:
    """Choose CUDA where there is a GPU, else the CPU.

    Args:
        backend: ``--distributed-backend``; None takes the one that fits the device. ``"nccl"`` on
            a machine without a GPU gives Gloo, so that a launch script runs unchanged.

    Raises:
        ConfigError: a backend that is neither ``nccl`` nor ``gloo``.
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
