"""Changes the class of a module that megatron-core has built to a subclass of ours."""

from __future__ import annotations

import torch


def specialize(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Change the class of a module to ``kind``, a subclass that adds no state.

    Use it for modules whose class a layer spec cannot choose. megatron-core's constructors fix the
    classes of the embedding, the decoder and the output head, and pass process groups to MLPs and
    experts only if these have megatron-core's own classes. Replacing a module by a new one would
    draw other initial weights.

    Raises:
        TypeError: ``kind`` is no subclass of the module's class.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind
