"""The hooks of modules whose weights are used without calling the modules.

A replayed CUDA graph and a grouped product use the weights of many modules, and call none of them.
"""

from __future__ import annotations

from torch import nn


def call_pre_hooks(root: nn.Module) -> None:
    """Call the forward pre-hooks of a module and of those inside it, with no inputs.

    In them data parallelism waits for gathered weights. What a hook returns is ignored.
    """
    for module in root.modules():
        with_kwargs = module._forward_pre_hooks_with_kwargs
        for number, hook in list(module._forward_pre_hooks.items()):
            hook(module, (), {}) if number in with_kwargs else hook(module, ())
