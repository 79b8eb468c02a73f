"""Counts what a rank sends, for tests of messages that must not grow."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that a rank hands to collective operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.count += sum(x.numel() * x.element_size() for x in tensors)
        return func(*args, **(kwargs or {}))
