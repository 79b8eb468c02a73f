"""Calls the hooks of modules whose weights are used without calling the modules themselves.

For example, a replayed CUDA graph or a grouped product uses the weights of many modules directly.
"""

from __future__ import annotations

from torch import nn


def call_pre_hooks(root: nn.Module) -> None:
    """Call the forward pre-hooks of a module and of all modules inside it, without inputs.

    In these hooks, data parallelism waits until the weights are gathered. The hooks' results are
    ignored.
    """
    for module in root.modules():
        with_kwargs = module._forward_pre_hooks_with_kwargs
        for number, hook in list(module._forward_pre_hooks.items()):
            hook(module, (), {}) if number in with_kwargs else hook(module, ())
