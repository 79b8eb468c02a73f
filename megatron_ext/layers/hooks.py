"""Calls the hooks of modules, and tells hooks whether a backward pass runs them."""

from __future__ import annotations

import torch
from torch import nn


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, whose forward passes are recomputed."""
    return torch._C._current_graph_task_id() != -1


def call_pre_hooks(root: nn.Module) -> None:
    """Call the forward pre-hooks of a module and of all modules inside it, without inputs.

    This is for code that uses the weights of modules without calling them, such as a replayed CUDA
    graph or a grouped product.
    In these hooks, data parallelism waits until the weights are gathered. The hooks' results are
    ignored.
    """
    for module in root.modules():
        with_kwargs = module._forward_pre_hooks_with_kwargs
        for number, hook in list(module._forward_pre_hooks.items()):
            hook(module, (), {}) if number in with_kwargs else hook(module, ())
