"""CUDA graphs of the fake device: a capture runs on fake tensors, and a replay tells what it holds.

`trace.Trace` records what is captured, finds what a capture forbids, and counts the captured
kernels at each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

capturing: list[Graph] = []
"""The graph that is being captured."""
on_replay: list[Callable[[Graph], None]] = []
"""Functions that are told of each replay."""


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`.

    Attributes:
        operations: what was captured, as `trace.Operation`.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.operations: list[Any] = []

    def capture_begin(self, *_args: Any, **_kwargs: Any) -> None:
        capturing.append(self)

    def capture_end(self) -> None:
        capturing.remove(self)

    def replay(self) -> None:
        for tell in on_replay:
            tell(self)

    def reset(self) -> None:
        pass


def install() -> None:
    """Let `torch.cuda.make_graphed_callables` capture on the fake device."""
    torch.cuda.CUDAGraph = Graph  # type: ignore[assignment, misc]
    torch.cuda.graphs.graph_pool_handle = lambda: (0, 1)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: bool(capturing)
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
