"""Counts kernels and the bytes that they read and write, of code that runs on CPU tensors.

What is counted is what a GPU would be asked for: an operation of torch is a kernel, with the bytes
of its tensors, a tensor that is changed in place being read and written; a view is none; a compiled
graph is one, with the bytes of what enters and leaves it, tensors kept for the backward pass among
them, and none if it computes nothing. Inductor may make a few kernels of a graph, which read some
inputs twice (sums over the tokens beside sums over the features), so that the bytes of compiled
code are the least possible, not a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.layers.compiled import compiled_on_cpu

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
KINDS = ("products", "attention", "pointwise")
OVERWRITES = ("copy_", "zero_", "fill_")
"""Operations that change a tensor in place without reading it."""
MAKES_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided")


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: name of the operation, or of the compiled graph.
        kind: one of `KINDS`.
        num_bytes: bytes read and written.
    """

    name: str
    kind: str
    num_bytes: int


@dataclass
class Traffic:
    """The kernels that were counted."""

    kernels: list[Kernel] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """Return the number of kernels of a kind."""
        return sum(kernel.kind == kind for kernel in self.kernels)

    def num_bytes(self, kind: str) -> int:
        """Return the bytes of the kernels of a kind."""
        return sum(kernel.num_bytes for kernel in self.kernels if kernel.kind == kind)

    def add(self, name: str, tensors: Iterable[Any], read_too: Sequence[Tensor] = ()) -> None:
        """Count a kernel of these inputs and outputs, each once; outputs in ``read_too`` twice."""
        seen = {(x.data_ptr(), x.shape): x for x in tensors if isinstance(x, Tensor)}
        kind = "pointwise"
        if name in PRODUCTS:
            kind = "products"
        elif "scaled_dot_product" in name:
            kind = "attention"
        self.kernels.append(Kernel(name, kind, sum(map(_size, (*seen.values(), *read_too)))))


def _size(x: Tensor) -> int:
    """Return the bytes of a tensor; those of a broadcast tensor count once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


class _Counting(TorchDispatchMode):
    """Adds every operation that moves data."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.paused:
            return out
        name = func._schema.name.removeprefix("aten::")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        aliases = all(x.untyped_storage().data_ptr() in storages for x in outputs)
        is_view = aliases and not func._schema.is_mutable
        if not is_view and name not in MAKES_NOTHING:
            in_place = name.endswith("_") and name not in OVERWRITES
            self.traffic.add(name, (*inputs, *outputs), outputs if in_place else ())
        return out

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Count none of the operations within."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before


class _OneKernelRMSNorm(torch.autograd.Function):
    """``rms_norm`` as GPUs have it, in one kernel each way, unlike CPUs."""

    @staticmethod
    def forward(ctx: Any, counting: _Counting, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counting, ctx.eps = counting, eps
        with counting.as_one():
            y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        counting.traffic.add("rms_norm", (x, weight, y))
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with ctx.counting.as_one(), torch.enable_grad():
            y = torch.nn.functional.rms_norm(x, weight.shape, weight, ctx.eps)
            found = torch.autograd.grad(y, (x, weight), upstream)
        ctx.counting.traffic.add("rms_norm_backward", (upstream, x, weight, *found))
        return None, *found, None


class _AsOnGPUs(TorchFunctionMode):
    """Gives ``rms_norm`` the form that GPUs have."""

    def __init__(self, counting: _Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.rms_norm and not self.counting.paused:
            return self._rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rms_norm(self, x: Tensor, _shape: Sequence[int], weight: Tensor, eps: float) -> Any:
        return _OneKernelRMSNorm.apply(self.counting, x, weight, eps)  # type: ignore[no-untyped-call]


def eager_traffic(step: Callable[[], object]) -> Traffic:
    """Return the traffic of a step of uncompiled code."""
    traffic = Traffic()
    with _Counting(traffic) as counting, _AsOnGPUs(counting):
        step()
    return traffic


def compiled_traffic(step: Callable[[], object]) -> Traffic:
    """Return the traffic of a step with compiled parts; it runs twice, to compile first."""
    traffic = Traffic()
    counting = _Counting(traffic)

    def count(graph: torch.fx.GraphModule, _example: Sequence[Tensor]) -> Callable[..., Any]:
        computes = any(node.op == "call_function" for node in graph.graph.nodes)

        def run(*args: Any) -> Any:
            with counting.as_one():
                out = graph(*args)
            if computes and not counting.paused:
                traffic.add("compiled", (*args, *tree_leaves(out)))
            return out

        return run

    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=count,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    with compiled_on_cpu(backend):
        step()
        traffic.kernels.clear()
        with counting:
            step()
    return traffic
