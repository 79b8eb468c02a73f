"""Modules made of fused operations; named by megatron-core, not used by these tests."""

from __future__ import annotations

import torch


class Sequential(torch.nn.Sequential):
    """Operations one after the other."""


class FusibleOperation(torch.nn.Module):
    """A fused operation."""
