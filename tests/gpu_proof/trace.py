"""Records what a step on fake tensors does: waits of the host, kernels and their bytes, by class.

An operation of torch is counted by the rules of `benchmarks.traffic`. A compiled graph has the
kernels and bytes that Inductor counts. Bytes that stay in a cache are counted too. The classes are
those of `planning.kernels`.
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

from benchmarks.traffic import ATTENTION, PRODUCTS, launches, moved, tensors_of
from megatron_ext.optim.adam_kernel import CHUNK
from tests.gpu_proof import compiler, fake_cuda, fake_graphs
from tests.host_syncs import ON_THE_HOST, WAITING

COLLECTIVES = ("c10d", "_c10d_functional")
OF_UPDATE = ("/optim/", "core/optimizer/", "param_and_grad_buffer.py", "clip_grads.py")
"""Parts of paths: what is done there belongs to the optimizer."""
GRAPHS = {
    "statistics": "logits",
    "to_gradient_": "logits",
    "limit_": "logits",
    "largest": "casts",
    "quantize": "casts",
    "quantize_with": "casts",
    "_attention_in_blocks": "attention",
    "_largest_scores": "attention",
}
"""Classes of compiled functions that are no pointwise part of a layer."""
COPIES = ("::_to_copy", "::copy_")
"""Ends of the names of operations that copy data, between host and device too."""


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
        replays: number of CUDA graphs that were launched.
        forbidden: what was captured and would end the capture, or read the host at each replay.
    """

    supports_higher_order_operators = True  # FlexAttention is one, inside of its graph

    def __init__(self, vocabulary: int, *, alone: bool, routed: int = 0) -> None:
        super().__init__()
        self.vocabulary, self.alone = vocabulary, alone
        self.operations: list[Operation] = []
        self.waits: list[str] = []
        self.pinned: list[str] = []
        self.forbidden: list[str] = []
        self.routed, self.replays = routed, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Trace:
        compiler.on_call.append(self._add_graph)
        fake_cuda.on_wait.append(self.add_wait)
        fake_cuda.on_launch.append(self._add_launch)
        fake_cuda.on_pin.append(self._add_pinned)
        fake_graphs.on_replay.append(self._add_replay)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        compiler.on_call.remove(self._add_graph)
        fake_cuda.on_wait.remove(self.add_wait)
        fake_cuda.on_launch.remove(self._add_launch)
        fake_cuda.on_pin.remove(self._add_pinned)
        fake_graphs.on_replay.remove(self._add_replay)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compiler.running or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs = tensors_of((args, kwargs))
        if _waits(func, args, kwargs, inputs):
            self.add_wait(name)
        elif fake_graphs.capturing and _is_copy_of_host(func, args, kwargs):
            self.forbidden.append(f"{name} at {place_of_call()}")
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
        outputs = tensors_of(found)
        if any(x.is_cuda for x in (*inputs, *outputs)) and launches(func, name):
            num_bytes = moved(func, name, args, kwargs, outputs)
            kind = self._kind(func, name, inputs)
            if kind == "communication" and self.alone:
                num_bytes = 0
            self._add(name, kind, 1, num_bytes, (*inputs, *outputs))
        return found

    def add_wait(self, name: str) -> None:
        """Note that the host waits here, unless it is for values of its own."""
        place = place_of_call()
        if place is not None:
            found = self.forbidden if fake_graphs.capturing else self.waits
            found.append(f"{name} at {place}")

    def _add_pinned(self) -> None:
        place = place_of_call() or "host"
        self.pinned.append(place)
        if fake_graphs.capturing:
            self.forbidden.append(f"pin_memory at {place}")

    def _add_replay(self, graph: fake_graphs.Graph) -> None:
        self.operations += graph.operations
        self.replays += 1

    def _value(self, x: Tensor) -> bool | int | float:
        """Return a value for a fake tensor that was asked for one, so that the step goes on."""
        if x.dtype == torch.bool:
            return True
        if "/moe/" in (place_of_call() or ""):
            # Splits of tokens are read one by one, from a tensor with one for each expert or rank.
            return self.routed // (x.untyped_storage().nbytes() // x.element_size())
        return 1.0 if x.is_floating_point() else 1

    def _add(
        self, name: str, kind: str, kernels: int, num_bytes: int, tensors: Sequence[Tensor]
    ) -> None:
        largest = max((x.numel() for x in tensors), default=0)
        place = place_of_call() or "autograd"
        captured = fake_graphs.capturing
        operations = captured[-1].operations if captured else self.operations
        operations.append(Operation(name, kind, kernels, num_bytes, largest, place))

    def _add_graph(self, graph: compiler.Graph, args: Sequence[Any]) -> None:
        kind = GRAPHS.get(graph.name, "pointwise")
        self._add(graph.name, kind, len(graph.kernels), graph.num_bytes, tensors_of(args))

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


def _waits(func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether the host would wait until the device has done all work before this."""
    name = func.name()
    if name.endswith(COPIES):
        return _is_copy_of_host(func, args, kwargs) and not _is_unblocked(args, kwargs)
    if not any(x.is_cuda for x in inputs):
        return False
    if name in WAITING or name.removesuffix(".self_int") in WAITING:
        return True
    if name == "aten::index_put_" and args[2].numel() == 1 and not args[2].is_cuda:
        return False  # torch fills by the mask then
    by_mask = name in ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
    return by_mask and any(i is not None and i.dtype == torch.bool for i in args[1])


def _is_copy_of_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation copies data between host and device."""
    if not func.name().endswith(COPIES):
        return False
    to = args[1].device if len(args) > 1 else kwargs.get("device") or args[0].device
    return bool(args[0].device.type != torch.device(to).type)


def _is_unblocked(args: Any, kwargs: Any) -> bool:
    """Return whether the host goes on while a copy is made."""
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


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
