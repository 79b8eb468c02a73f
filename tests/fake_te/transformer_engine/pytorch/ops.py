"""Modules made of fused operations; named by megatron-core, not used by these tests."""

import torch


class Sequential(torch.nn.Sequential):
    """Operations one after the other."""


class FusibleOperation(torch.nn.Module):
    """A fused operation."""
