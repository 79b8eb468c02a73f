"""Records what a step on fake tensors does: waits of the host, kernels and their bytes, by class.

An operation of torch is one kernel, which reads its inputs and writes its outputs; views are none.
A compiled graph has the kernels and bytes that Inductor counts. Bytes that stay in a cache are
counted too. The classes are those of `planning.kernels`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.traffic import MAKES_NOTHING
from megatron_ext.optim.fused_adam import CHUNK
from tests.gpu_proof import compiler, fake_cuda
from tests.host_syncs import ON_THE_HOST, WAITING

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
ATTENTION = ("scaled_dot_product", "flash_attention", "cudnn_attention")
COLLECTIVES = ("c10d", "_c10d_functional")
OF_UPDATE = ("/optim/", "core/optimizer/", "param_and_grad_buffer.py", "clip_grads.py")
"""Parts of paths: what is done there belongs to the optimizer."""
GRAPHS = {
    "statistics": "logits",
    "to_gradient_": "logits",
    "largest": "casts",
    "quantize": "casts",
    "quantize_with": "casts",
    "flex_attention": "attention",
}
"""Classes of compiled functions that are no pointwise part of a layer."""
VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh", "new_empty_strided", "record_stream")
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


@dataclass(frozen=True)
class Operation:
    """The kernels of one operation of torch, of one compiled graph, or of one Triton launch.

    Attributes:
        kind: its class, as in `planning.kernels`.
        kernels: number of kernels.
        num_bytes: bytes read and written.
        largest: number of elements of its largest tensor.
        place: the function that asked for it, ``file:function``; "autograd" for none of ours.
    """

    name: str
    kind: str
    kernels: int
    num_bytes: int
    largest: int
    place: str


class Trace(TorchDispatchMode):
    """Records the operations of a step, and the places where the host would wait for the device.

    Args:
        vocabulary: entries of the output layer on this rank, by which its tensors are known.
        alone: there are no other ranks, so that collectives move nothing.
        routed: tokens that a rank's experts get together, which the host asks for.

    Attributes:
        waits: what made the host wait, and where, as ``operation at file:function``.
        pinned: places where memory of the host was pinned, which no graph may capture.
    """

    supports_higher_order_operators = True  # FlexAttention is one, inside of its graph

    def __init__(self, vocabulary: int, *, alone: bool, routed: int = 0) -> None:
        super().__init__()
        self.vocabulary, self.alone = vocabulary, alone
        self.operations: list[Operation] = []
        self.waits: list[str] = []
        self.pinned: list[str] = []
        self.routed = routed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Trace:
        compiler.on_call.append(self._add_graph)
        fake_cuda.on_wait.append(self.add_wait)
        fake_cuda.on_launch.append(self._add_launch)
        fake_cuda.on_pin.append(self._add_pinned)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        compiler.on_call.remove(self._add_graph)
        fake_cuda.on_wait.remove(self.add_wait)
        fake_cuda.on_launch.remove(self._add_launch)
        fake_cuda.on_pin.remove(self._add_pinned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compiler.running or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs = _tensors((args, kwargs))
        if _waits(func, args, kwargs, inputs):
            self.add_wait(name)
        if name == "_local_scalar_dense":
            return self._value(inputs[0])
        if name == "masked_select":
            found = inputs[0].new_empty(self.routed)
        elif name == "repeat_interleave" and not inputs[0].is_cuda:
            found = inputs[0].new_empty(_chunks_of_table())
        else:
            found = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._add_pinned()
        outputs = _tensors(found)
        if any(x.is_cuda for x in (*inputs, *outputs)) and _launches(func, name):
            reads, writes = _moved(func, name, args, kwargs, outputs)
            kind = self._kind(func, name, inputs)
            num_bytes = sum(map(_size, (*reads, *writes)))
            if kind == "communication" and self.alone:
                num_bytes = 0
            self._add(name, kind, 1, num_bytes, (*inputs, *outputs))
        return found

    def add_wait(self, name: str) -> None:
        """Note that the host waits here, unless it is for values of its own."""
        place = place_of_call()
        if place is not None:
            self.waits.append(f"{name} at {place}")

    def _add_pinned(self) -> None:
        self.pinned.append(place_of_call() or "host")

    def _value(self, x: Tensor) -> bool | int | float:
        """Return a value for a fake tensor that was asked for one, so that the step goes on."""
        if x.dtype == torch.bool:
            return True
        if "/moe/" in (place_of_call() or ""):
            return self.routed
        return 1.0 if x.is_floating_point() else 1

    def _add(
        self, name: str, kind: str, kernels: int, num_bytes: int, tensors: Sequence[Tensor]
    ) -> None:
        largest = max((x.numel() for x in tensors), default=0)
        place = place_of_call() or "autograd"
        self.operations.append(Operation(name, kind, kernels, num_bytes, largest, place))

    def _add_graph(self, graph: compiler.Graph, args: Sequence[Any]) -> None:
        kind = GRAPHS.get(graph.name, "pointwise")
        self._add(graph.name, kind, len(graph.kernels), graph.num_bytes, _tensors(args))

    def _add_launch(self, name: str, num_bytes: int, tensors: Sequence[Tensor]) -> None:
        kind = "optimizer" if "adam" in name else "casts"
        self._add(name, kind, 1, num_bytes, tensors)

    def _kind(self, func: Any, name: str, inputs: Sequence[Tensor]) -> str:
        if func.namespace in COLLECTIVES:
            return "communication"
        place = place_of_call() or ""
        if "/fp8/kernels.py" in place:
            return "casts"
        if any(part in place for part in OF_UPDATE) or name.startswith("_fused_adam"):
            return "optimizer"
        at_head = any(self.vocabulary in x.shape[-2:] for x in inputs)
        if name in PRODUCTS:
            return "head" if at_head else "linear"
        if any(word in name for word in ATTENTION):
            return "attention"
        if any(x.dim() > 1 and x.size(-1) == self.vocabulary for x in inputs):
            return "logits"
        return "pointwise" if name == "embedding" else "plumbing"

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the kernels and the bytes of each class."""
        kernels, num_bytes = Counter[str](), Counter[str]()
        for operation in self.operations:
            kernels[operation.kind] += operation.kernels
            num_bytes[operation.kind] += operation.num_bytes
        return {kind: (kernels[kind], num_bytes[kind]) for kind in kernels}

    def over(self, elements: int) -> Counter[str]:
        """Count the operations on tensors with so many elements or more, by name and function."""
        return Counter(
            f"{operation.name} at {compiler.VARIANT.sub('', PurePath(operation.place).name)}"
            for operation in self.operations
            if operation.largest >= elements
        )


def _chunks_of_table() -> int:
    """Return the chunks of all parameters in the table that the optimizer has just made."""
    (rows,) = fake_cuda.last_data
    return sum(-(-row[-1] // CHUNK) for row in rows)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _size(x: Tensor) -> int:
    """Return the bytes that a kernel reads or writes of a tensor; a broadcast one counts once."""
    held = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        held *= size if stride else 1
    return held


def _launches(func: Any, name: str) -> bool:
    """Return whether an operation launches a kernel: it is no view, and writes something."""
    if name in MAKES_NOTHING or name in VIEWS or func.namespace == "prim":
        return False
    written = (r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
    return all(written)


def _moved(
    func: Any, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    reads, changed = list[Tensor](), list[Tensor]()
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    for argument in func._schema.arguments:
        tensors = _tensors(given.get(argument.name))
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
        rows = _tensors(given.get("values", given.get("source")))
        return [*rows, *rows], rows
    if name.startswith("_fused_adam") and given.get("grad_scale") is None:
        changed = [x for x in changed if all(x is not grad for grad in given["grads"])]
    return reads, changed or list(outputs)


def _waits(func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether the host would wait until the device has done all work before this."""
    name = func.name()
    if name.endswith(("::_to_copy", "::copy_")):
        return _is_blocking_copy(args, kwargs)
    if not any(x.is_cuda for x in inputs):
        return False
    if name in WAITING or name.removesuffix(".self_int") in WAITING:
        return True
    if name == "aten::index_put_" and args[2].numel() == 1 and not args[2].is_cuda:
        return False  # torch fills by the mask then
    by_mask = name in ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
    return by_mask and any(i is not None and i.dtype == torch.bool for i in args[1])


def _is_blocking_copy(args: Any, kwargs: Any) -> bool:
    """Return whether data goes between host and device, and the host waits for it."""
    if kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True):
        return False
    to = args[1].device if len(args) > 1 else kwargs.get("device") or args[0].device
    return bool(args[0].device.type != torch.device(to).type)


def place_of_call() -> str | None:
    """Return the innermost function of the package or of megatron-core, as ``file:function``.

    None if the call comes from a file whose values are on the host on a GPU too.
    """
    for frame in _frames():
        if any(part in frame.filename for part in ON_THE_HOST):
            return None
        for root in ("megatron_ext/", "megatron/core/"):
            if f"/{root}" in frame.filename:
                path = root + frame.filename.rpartition(f"/{root}")[2]
                return f"{path}:{frame.name}"
    return "autograd"


def _frames() -> Iterator[traceback.FrameSummary]:
    """Yield the calls of this thread, the innermost first."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        yield traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
