"""CUDA graphs on a CPU: what is captured is kept as a list of operations, and run again.

As on a GPU a replay reads and writes the very memory that the capture did, draws random numbers
anew, and runs no Python of the captured code. What would end a capture there is an error here too:
a wait of the host, new pinned memory, a copy from the host, another random state. Other than there
the operations also run while they are captured, and graphs of one memory pool share no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.device import cuda_shim
from megatron_ext.layers import masks
from tests.host_syncs import waits
from tests.stream_order import place


class CaptureError(RuntimeError):
    """Raised where a captured function does what would end the capture on a GPU."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is forbidden while a CUDA graph is captured ({place()})")


def _forbidden() -> list[tuple[Any, tuple[str, ...]]]:
    """Return the functions and methods that a capture forbids."""
    return [
        (torch.Tensor, ("tolist", "numpy", "cpu", "pin_memory")),
        (torch.cuda, ("synchronize", "get_rng_state", "set_rng_state", "manual_seed")),
        (torch.cuda.random, ("get_rng_state", "set_rng_state", "manual_seed")),
        (cuda_shim.CpuStream, ("synchronize", "query")),
        (cuda_shim.CpuEvent, ("synchronize", "query")),
    ]


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(name)

    return refuse


def _factory(make: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    """Wrap a function that makes tensors: with ``keyword`` it is forbidden."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keyword):
            raise CaptureError(f"{make.__name__} with {keyword}")
        return make(*args, **kwargs)

    return made


FACTORIES = {"tensor": "device", "empty": "pin_memory", "empty_like": "pin_memory"}


class CpuGraph(TorchDispatchMode):
    """A stand-in for `torch.cuda.CUDAGraph`.

    Attributes:
        mode: mode of the capture: whether calls of other threads end it.
        made: all graphs, in the order in which they were made.
        replays: indices in it, in the order in which they were replayed.
    """

    made: ClassVar[list[CpuGraph]] = []
    replays: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []
        self.number = len(CpuGraph.made)
        self.is_reset = False
        self.mode = ""
        CpuGraph.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            raise CaptureError(func.name())
        result, leaves = _run(func, args, kwargs or {})
        self.operations.append((func, args, kwargs or {}, leaves))
        return result

    def replay(self) -> None:
        assert self.operations, "replayed before it was captured"
        assert not self.is_reset
        CpuGraph.replays.append(self.number)
        for func, args, kwargs, results in self.operations:
            for old, new in zip(results, _run(func, args, kwargs)[1], strict=True):
                if isinstance(new, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.is_reset = True


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    if func is torch.ops.c10d._reduce_scatter_base_.default:
        # Gloo does a part of it whenever it is awaited, so what is awaited is something else.
        target, source, group, op, *_ = args
        parts = source.clone()
        _, work = torch.ops.c10d.allreduce_([parts], group, op, None)
        work.wait()
        rank = torch.distributed.ProcessGroup.unbox(group).rank()
        target.copy_(parts.view(-1, *target.shape)[rank])
        return (target, work), [target, work]
    result = func(*args, **kwargs)
    leaves = tree_leaves(result)
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()
    return result, leaves


class Capture:
    """A stand-in for `torch.cuda.graph`."""

    default_capture_stream: Any = None

    def __init__(
        self, graph: CpuGraph, pool: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self.graph = graph
        self.stack = contextlib.ExitStack()
        graph.mode = capture_error_mode
        Capture.default_capture_stream = "one"

    def __enter__(self) -> None:
        for owner, names in _forbidden():
            for name in names:
                patch = mock.patch.object(owner, name, _refuse(name))
                self.stack.enter_context(patch)
        for name, keyword in FACTORIES.items():
            made = _factory(getattr(torch, name), keyword)
            self.stack.enter_context(mock.patch.object(torch, name, made))
        captures = mock.patch.object(masks, "is_captured", return_value=True)
        self.stack.enter_context(captures)
        self.graph.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.graph.__exit__(*exception)
        self.stack.close()


@contextlib.contextmanager
def graphs_on_a_cpu() -> Iterator[None]:
    """Let torch's functions capture and replay on the CPU, and let runs on it ask for graphs.

    The answers of `device.cuda_shim` must be in place when something is captured.
    """
    CpuGraph.made, CpuGraph.replays, Capture.default_capture_stream = [], [], None
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", CpuGraph),
        mock.patch.object(torch.cuda, "graph", Capture),
        mock.patch.object(torch.cuda.graphs, "graph_pool_handle", return_value=(0, 1)),
        mock.patch(
            "megatron_ext.schedules.runtime.records_graphs",
            lambda flags, device: flags.cuda_graph_impl == "local",
        ),
    ):
        yield
