"""Counts kernels and the bytes that they read and write.

What is counted is what a GPU would be asked for. An operation of torch is one kernel, which reads
its inputs and writes its outputs; a tensor that is changed in place is read and written; a view is
no kernel. `launches` and `moved` are these rules, also for whole steps on fake tensors
(``tests/gpu_proof``).

Code that runs on CPU tensors is counted by `eager_traffic` and `compiled_traffic`. There a compiled
graph is one kernel, with the bytes of what enters and leaves it, tensors kept for the backward pass
among them, and none if it computes nothing. Inductor may make a few kernels of a graph, which read
some inputs twice (sums over the tokens beside sums over the features), so that the bytes of
compiled code are the least possible, not a promise.
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

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
ATTENTION = ("scaled_dot_product", "flash_attention", "cudnn_attention")
"""Parts of the names of kernels of attention."""
KINDS = ("products", "attention", "pointwise")
NO_KERNEL = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "lift_fresh", "record_stream",
)  # fmt: skip
"""Operations without a kernel whose declarations do not say so."""
OVERWRITES = (
    "zero_", "fill_", "copy_", "normal_", "uniform_", "_foreach_zero_", "_foreach_copy_",
    "to_8_bits",
)  # fmt: skip
"""Operations that do not read the tensor that they write."""
READS_ROWS = ("embedding", "index_select", "gather", "index")
"""Operations that read as much of their first input as they write."""
ADDS_ROWS = ("_index_put_impl_", "index_put_", "index_add_")
"""Operations that read and write only those rows of their first input that they change."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operation."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def size_of(x: Tensor) -> int:
    """Return the bytes that a kernel reads or writes of a tensor; a broadcast one counts once."""
    held = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        held *= size if stride else 1
    return held


def launches(func: Any, name: str) -> bool:
    """Return whether an operation launches a kernel: it is no view, and writes something."""
    if name in NO_KERNEL or func.namespace == "prim":
        return False
    written = (r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
    return all(written)


def moved(func: Any, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; an input that is given twice is one."""
    reads, writes = _reads_and_writes(func, name, args, kwargs, outputs)
    once = {id(x): x for x in reads}.values()
    return sum(map(size_of, (*once, *writes)))


def _reads_and_writes(
    func: Any, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    reads, changed = list[Tensor](), list[Tensor]()
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    for argument in func._schema.arguments:
        tensors = tensors_of(given.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            changed += tensors
        if not (is_written and (argument.is_out or name in OVERWRITES)):
            reads += tensors
    if given.get("beta") == 0:
        reads = reads[1:]  # the sum that a product overwrites
    if name in READS_ROWS:
        reads[:1] = outputs
    if name in ADDS_ROWS:
        rows = tensors_of(given.get("values", given.get("source")))
        return [*rows, *rows], rows
    if name.startswith("_fused_adam") and given.get("grad_scale") is None:
        changed = [x for x in changed if all(x is not grad for grad in given["grads"])]
    return reads, changed or list(outputs)


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

    def add(self, name: str, num_bytes: int) -> None:
        """Count a kernel."""
        kind = "pointwise"
        if name in PRODUCTS:
            kind = "products"
        elif any(word in name for word in ATTENTION):
            kind = "attention"
        self.kernels.append(Kernel(name, kind, num_bytes))

    def add_tensors(self, name: str, tensors: Iterable[Any]) -> None:
        """Count a kernel that reads or writes each of these tensors once."""
        seen = {(x.data_ptr(), x.shape): x for x in tensors if isinstance(x, Tensor)}
        self.add(name, sum(map(size_of, seen.values())))


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
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if not self.paused and launches(func, name):
            self.traffic.add(name, moved(func, name, args, kwargs, tensors_of(out)))
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
        counting.traffic.add_tensors("rms_norm", (x, weight, y))
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with ctx.counting.as_one(), torch.enable_grad():
            y = torch.nn.functional.rms_norm(x, weight.shape, weight, ctx.eps)
            found = torch.autograd.grad(y, (x, weight), upstream)
        ctx.counting.traffic.add_tensors("rms_norm_backward", (upstream, x, weight, *found))
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
                traffic.add_tensors("compiled", (*args, *tree_leaves(out)))
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
