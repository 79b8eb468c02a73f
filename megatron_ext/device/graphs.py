"""The end of CUDA graphs."""

from __future__ import annotations

import gc

import torch


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
