"""The beginning and the end of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch


@contextmanager
def other_threads_go_on() -> Iterator[None]:
    """What other threads ask of the GPU does not spoil what this one captures within.

    The thread of a data loader that pins memory would end a capture of the default mode, and with
    it itself. `torch.cuda.make_graphed_callables` takes no mode, so it gets another `graph`.
    """
    original = torch.cuda.graph
    torch.cuda.graph = partial(original, capture_error_mode="thread_local")  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.graph = original  # type: ignore[misc]


def destroy_graphs() -> None:
    """Destroy all CUDA graphs of this process, whoever still refers to them.

    NCCL takes no communicator down as long as a graph holds its operations, but waits, and a
    failed step's traceback may hold graphs:
    https://docs.nvidia.com/dl-cuda-graph/troubleshooting/process-hang.html
    """
    if torch.cuda.graph.default_capture_stream is None:
        return  # nothing was ever captured
    for thing in gc.get_objects():
        if type(thing) is torch.cuda.CUDAGraph:
            thing.reset()
