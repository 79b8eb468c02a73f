"""Copies from the host to a device for which nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, or the tensor itself where it lies there.

    A GPU fetches by itself from pinned memory only; from other memory the host copies first, and
    without ``non_blocking`` it also waits for all that the GPU has still to do.
    """
    if device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
