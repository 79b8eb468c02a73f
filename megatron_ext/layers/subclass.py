"""Changes the class of a module that megatron-core has built to a subclass of ours."""

from __future__ import annotations

import torch


def specialize(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Change the class of a module to ``kind``, a subclass that adds no state.

    This serves modules whose class cannot be chosen in a layer spec. megatron-core's constructors
    fix the classes of the embedding, the decoder and the output head. MLPs and experts would get no
    process groups if the spec named a class of ours. A second module in place of the first would
    draw other initial weights.

    Raises:
        TypeError: ``kind`` is no subclass of the module's class.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind
