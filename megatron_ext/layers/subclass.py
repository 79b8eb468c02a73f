"""Gives a module that megatron-core has built the class that we derive from its own."""

from __future__ import annotations

import torch


def specialize(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Change the class of a module to ``kind``, a subclass that adds no state.

    megatron-core names some classes in its constructors (those of the embedding, the decoder, the
    output head), and hands process groups to its own MLP and experts only, so that neither an
    argument nor a layer spec can name ours. A second module in the place of the first would draw
    other initial weights.

    Raises:
        TypeError: ``kind`` is no subclass of the module's class.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind
