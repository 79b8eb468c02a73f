"""CUDA streams on a CPU: what uses memory without waiting for another stream's work is an error.

Streams, events, copies through pinned memory and asynchronous collectives are stood in for, so that
`StreamOrder` can follow them. A collective runs on a stream of its group, and is waited for by
``wait()`` of what it returned. Code that copies to a GPU sees by a tensor's ``device`` that the
tensor is there; all other code chooses its kernels as on a CPU. The stand-ins of
`device.cuda_shim` must be in place.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.device import streams as copies
from tests.stream_order import Awaited, Event, Stream, StreamOrder, Use, place

COLLECTIVES = [
    name
    for name in dir(ProcessGroup)
    if name.lstrip("_").startswith(
        ("all", "broadcast", "reduce", "gather", "scatter", "send", "recv")
    )
]
FACTORIES = ("empty", "zeros", "ones", "tensor", "arange", "full", "empty_like")


COPYING = (
    "megatron_ext/device/streams.py",
    "megatron_ext/layers/activation_offload.py",
    "megatron_ext/optim/offload.py",
    "megatron_ext/losses/linear_cross_entropy.py",
    "megatron_ext/video/step.py",
)
"""Files whose code sees that tensors are on the GPU."""


def _is_copying() -> bool:
    """Return whether the caller of a stand-in stands in a file of `COPYING`."""
    return sys._getframe(2).f_code.co_filename.endswith(COPYING)


def _properties(order: StreamOrder) -> dict[str, Any]:
    """Return the properties by which code that copies sees where a tensor is."""
    device_of: Any = torch.Tensor.device

    def device(tensor: Tensor) -> Any:
        on_gpu = _is_copying() and order.is_on_gpu(tensor)
        return torch.device("cuda", 0) if on_gpu else device_of.__get__(tensor)

    def is_cuda(tensor: Tensor) -> bool:
        return _is_copying() and order.is_on_gpu(tensor)

    return {"device": property(device), "is_cuda": property(is_cuda)}


def _methods(order: StreamOrder) -> dict[str, Any]:
    """Return the methods of tensors that copy to a GPU or from it."""
    move = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        goes = isinstance(target, (str, torch.device)) and _is_gpu(target)
        if not goes or order.is_on_gpu(tensor):
            return move(tensor, *args, **kwargs)
        stream, source = order.current, order.find(tensor)
        use = Use(stream, stream.advance(), "copy to the GPU", place())
        if source is None:
            order.host_use(tensor, "to")
        else:
            order.use(tensor, use, writes=False)
        with order.unseen():
            found = move(tensor, *args, **kwargs).clone()
        order.own(found)
        order.use(found, use, writes=True)
        if not kwargs.get("non_blocking"):
            order.host_waits(stream.clock)
        return found

    def pin_memory(tensor: Tensor, *_device: Any) -> Tensor:
        order.host_use(tensor, "pin_memory")
        with order.unseen():
            found = tensor.clone()
        order.own(found, pinned=True)
        return found

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        memory = order.find(tensor)
        assert memory is not None
        memory.recorded.add(stream)

    def read(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if order.is_on_gpu(tensor):
                order.host_waits(order.current.clock)
            order.host_use(tensor, name)
            return original(tensor, *args, **kwargs)

        return asked

    reads = {name: read(name, getattr(torch.Tensor, name)) for name in ("tolist", "numpy", "cpu")}
    return {"to": to, "pin_memory": pin_memory, "record_stream": record_stream, **reads}


def _is_gpu(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return device is not None
    return torch.device(device).type == "cuda"


def _factory(order: StreamOrder, make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        on_gpu, pinned = _is_gpu(kwargs.get("device")), kwargs.get("pin_memory")
        found = make(*args, **{**kwargs, **({"device": "cpu"} if on_gpu else {})})
        if pinned:
            order.own(found, pinned=True)
        elif on_gpu:
            order.own(found)
            if make.__name__ == "tensor":  # copied from memory that is not pinned
                order.host_waits(order.current.clock)
        return found

    return made


def _collective(order: StreamOrder, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def started(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        # Messages between two ranks have a communicator of their own.
        order.channel = group.group_name, args[1] if name in ("send", "recv") else None
        order.launched = None
        work = start(group, *args, **kwargs)
        return work if order.launched is None else Awaited(work, order.launched)

    return started


@contextlib.contextmanager
def stream_order() -> Iterator[StreamOrder]:
    """Raise `OutOfOrder` where something inside the block does not wait for what it depends on."""
    order = StreamOrder()

    @contextlib.contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before, order.current = order.current, stream or order.current
        try:
            yield
        finally:
            order.current = before

    def synchronize(*_device: Any) -> None:
        for stream in list(order.streams):
            order.host_waits(stream.clock)

    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {
            "Stream": Stream, "Event": Event, "stream": on, "synchronize": synchronize,
            "current_stream": lambda *_: order.current, "default_stream": lambda *_: order.default,
        }),
        (torch.Tensor, {**_properties(order), **_methods(order)}),
        (torch, {name: _factory(order, getattr(torch, name)) for name in FACTORIES}),
        (ProcessGroup, {n: _collective(order, n, getattr(ProcessGroup, n)) for n in COLLECTIVES}),
    ]  # fmt: skip
    copies._stream_of_copies.cache_clear()
    with contextlib.ExitStack() as stack:
        for owner, names in replaced:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(copies._stream_of_copies.cache_clear)
        with order:
            yield order
        order.check_freed()
