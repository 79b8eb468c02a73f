"""The order of operations on CUDA streams, followed on a CPU.

Operations run at once, as everywhere on a CPU. `StreamOrder` notes on which stream each would run
on a GPU, what that stream has waited for by then, and which bytes it reads and writes. A use that
does not wait for another stream's work on the same bytes is an error, and so is memory that is
given back while another stream uses it. `tests.stream_stand_in` brings operations onto streams.

Memory is the GPU's once an operation there has used it: what meets a batch that was sent there
follows it. Other memory is the host's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.host_syncs import waits

UNREAD = ("empty", "new_empty", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones")
"""Beginnings of the names of operations that take a tensor's shape only."""
UNWRITTEN = ("empty", "new_empty")

Clock = dict["Stream", int]
"""For each stream, how many of its operations are over."""


class OutOfOrder(AssertionError):
    """Raised where an operation might run before one on another stream that it depends on."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(number, clock.get(stream, 0))


class Stream:
    """A stand-in for `torch.cuda.Stream`.

    Attributes:
        clock: what is over when the stream's next operation starts, its own operations included.
    """

    order: StreamOrder

    def __init__(self, *_device: Any, name: str = "a side stream", **_priority: Any) -> None:
        self.name = name
        self.clock: Clock = dict(self.order.host)
        self.order.streams.append(self)

    @classmethod
    def of_one_operation(cls, name: str, clock: Clock) -> Stream:
        """Return a stream for one operation, which comes after ``clock``."""
        stream = cls.__new__(cls)
        stream.name, stream.clock = name, dict(clock)
        return stream

    def __repr__(self) -> str:
        return self.name

    def advance(self) -> int:
        """Count one more operation and return its number."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.order.host_waits(self.clock)


class Event:
    """A stand-in for `torch.cuda.Event`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Stream.order.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.order.current).wait_event(self)

    def synchronize(self) -> None:
        Stream.order.host_waits(self.clock)


class Awaited:
    """The work of a collective, which the stream that calls ``wait`` waits for."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *timeout: Any) -> Any:
        order = Stream.order
        with order.unseen():  # Gloo does a part of some collectives here.
            result = self._work.wait(*timeout)
        _join(order.current.clock, self._clock)
        return result

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        if done:
            Stream.order.host_knows(self._clock)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass
class Use:
    """An operation that read or wrote memory."""

    stream: Stream
    number: int
    operation: str
    place: str

    def is_over(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream} ({self.place})"


@dataclass
class Range:
    """Bytes of a storage that are used together, with the last uses of each kind."""

    written: Use | None = None
    read: dict[Stream, Use] = field(default_factory=dict)


@dataclass
class Memory:
    """A storage of the GPU, or pinned memory of the host.

    Attributes:
        home: the stream whose next allocation may get the memory when it is given back.
        elsewhere: the last use by each other stream; collectives hold what they use.
        recorded: streams that `Tensor.record_stream` told the allocator about.
    """

    storage: StorageWeakRef
    home: Stream
    shape: list[int]
    pinned: bool = False
    ranges: dict[tuple[int, int], Range] = field(default_factory=dict)
    elsewhere: dict[Stream, Use] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


def place() -> str:
    """Return the innermost ``file:function`` of the package, megatron-core or a test."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for root in ("/tests/", "/megatron/core/", "/megatron_ext/"):
            _, found, rest = path.rpartition(root)
            # The folder of a clone may have the package's name.
            if found and not rest.startswith(("stream_", ".venv", "tests/")):
                return f"{root[1:]}{rest}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@functools.cache
def _arguments(func: Any) -> tuple[bool, tuple[tuple[str, bool], ...]]:
    """Return whether an operation makes views, and its arguments with whether it writes them."""
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    arguments = tuple(
        (a.name, bool(a.alias_info and a.alias_info.is_write)) for a in schema.arguments
    )
    return views or func.name() in ("aten::_unsafe_view", "aten::lift_fresh"), arguments


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


class StreamOrder(TorchDispatchMode):
    """Checks the order of all operations inside the block.

    Attributes:
        host: what the host has waited for.
        channels: for each communicator, the collectives that it has started.
        channel: the communicator of the collective that is being started.
        launched: what is over with that collective; None if it uses no memory of the GPU.
        waits: the places where the host waited for the GPU, one entry for each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.memory: dict[int, Memory] = {}
        self.shared: dict[int, Memory] = {}
        self.channels: dict[tuple[str, int | None], list[Stream]] = {}
        self.channel: tuple[str, int | None] = ("", None)
        self.launched: Clock | None = None
        self.waits: list[str] = []
        self.is_off = False
        Stream.order = self
        self.default = self.current = Stream(name="the default stream")

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    def host_waits(self, clock: Clock) -> None:
        """Let the host wait until ``clock`` is over."""
        self.waits.append(place())
        self.host_knows(clock)

    def host_knows(self, clock: Clock) -> None:
        """Let the host, and all that it launches from now on, come after ``clock``."""
        for waiting in (self.host, *(stream.clock for stream in self.streams)):
            _join(waiting, clock)
        self.check_freed()

    def find(self, tensor: Tensor) -> Memory | None:
        return self.memory.get(tensor.untyped_storage()._cdata)

    def is_on_gpu(self, tensor: Tensor) -> bool:
        memory = self.find(tensor)
        return memory is not None and not memory.pinned

    def own(self, tensor: Tensor, *, pinned: bool = False) -> Memory:
        """Count a tensor's storage as the GPU's or, if it is pinned, as the host's."""
        storage = tensor.untyped_storage()
        memory = Memory(StorageWeakRef(storage), self.current, list(tensor.shape), pinned)
        self.memory[storage._cdata] = memory
        if len(self.memory) % 4096 == 0:
            gone = [key for key, held in self.memory.items() if held.storage.expired()]
            for key in gone:
                del self.memory[key]
        return memory

    def use(self, tensor: Tensor, use: Use, *, writes: bool, held: bool = False) -> None:
        """Check that a tensor's last uses are over, and note a use."""
        if tensor.numel() == 0:
            return
        memory = self.find(tensor) or self.own(tensor)
        bounds = _bounds(tensor)
        for (first, end), known in list(memory.ranges.items()):
            if first < bounds[1] and bounds[0] < end:
                self._compare(tensor, use, known, writes)
                if writes and bounds[0] <= first and end <= bounds[1]:
                    del memory.ranges[first, end]
        noted = memory.ranges.setdefault(bounds, Range())
        if writes:
            noted.written = use
        else:
            noted.read[use.stream] = use
        if use.stream is not memory.home and not held and not memory.pinned:
            memory.elsewhere[use.stream] = use
            self.shared[tensor.untyped_storage()._cdata] = memory

    def _compare(self, tensor: Tensor, use: Use, known: Range, writes: bool) -> None:
        before = [known.written] if known.written is not None else []
        for old in [*before, *(known.read.values() if writes else ())]:
            if not old.is_over(use.stream.clock):
                did = "wrote" if old is known.written else "reads"
                raise OutOfOrder(
                    f"{use} {'overwrites' if writes else 'reads'} {list(tensor.shape)}, which "
                    f"{old} {did}, without waiting for it"
                )

    def host_use(self, tensor: Tensor, operation: str, *, writes: bool = False) -> None:
        """Check that the host has waited for what streams do with memory that it uses."""
        memory = self.find(tensor)
        for known in memory.ranges.values() if memory is not None else ():
            before = [known.written] if known.written is not None else []
            for old in [*before, *(known.read.values() if writes else ())]:
                if not old.is_over(self.host):
                    raise OutOfOrder(
                        f"the host ({operation}, {place()}) uses {list(tensor.shape)} without "
                        f"waiting for {old}"
                    )

    def check_freed(self) -> None:
        """Check that memory was given back only when all streams were done with it."""
        for key in [key for key, memory in self.shared.items() if memory.storage.expired()]:
            memory = self.shared.pop(key)
            for stream, last in memory.elsewhere.items():
                if stream not in memory.recorded and not last.is_over(memory.home.clock):
                    raise OutOfOrder(
                        f"{memory.shape} of {memory.home} was given back while {last} uses it; "
                        "record_stream was not called"
                    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self._communicate(func, args)
            return func(*args, **kwargs)
        self.check_freed()
        views, arguments = _arguments(func)
        if views:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        read, written = list[Tensor](), list[Tensor]()
        given = {**dict(zip((n for n, _ in arguments), args, strict=False)), **kwargs}
        for argument, writes in arguments:
            (written if writes else read).extend(_tensors(given.get(argument)))
        if not any(self.is_on_gpu(x) for x in (*read, *written)):
            for tensor in (*read, *written):
                self.host_use(tensor, name, writes=any(tensor is x for x in written))
            return func(*args, **kwargs)
        use = Use(self.current, self.current.advance(), name, place())
        self._launch(use, [] if name.startswith(UNREAD) else read, written)
        if waits(func, args) or (name == "copy_" and self._arrives(given)):
            self.host_waits(self.current.clock)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if self.find(tensor) is None:
                self.own(tensor)
                if not name.startswith(UNWRITTEN):
                    self.use(tensor, use, writes=True)
        return result

    def _launch(self, use: Use, read: list[Tensor], written: list[Tensor]) -> None:
        for tensor in read:
            if tensor.dim() == 0 and not self.is_on_gpu(tensor):
                self.host_use(tensor, use.operation)  # its value is passed to the kernel
            else:
                self.use(tensor, use, writes=False)
        for tensor in written:
            self.use(tensor, use, writes=True)

    def _arrives(self, given: dict[str, Any]) -> bool:
        """Return whether the host waits for a copy into its memory."""
        target = self.find(given["self"])
        return target is not None and target.pinned and not given.get("non_blocking")

    def _communicate(self, func: Any, args: Any) -> None:
        """Note a collective, which comes after those of its communicator.

        Who waits for it comes after it alone: it may not rely on the collectives before.
        """
        name = func._schema.name.removeprefix("c10d::")
        parts = [tensors for tensors in map(_tensors, args[:2]) if tensors]
        if not any(self.is_on_gpu(x) for tensors in parts for x in tensors):
            return
        before = self.channels.setdefault(self.channel, [])
        stream = Stream.of_one_operation(f"the communicator {self.channel}", self.current.clock)
        if before:
            _join(stream.clock, before[-1].clock)
        before.append(stream)
        use = Use(stream, stream.advance(), name, place())
        self.launched = {**self.current.clock, stream: use.number}
        for tensor in parts[1] if len(parts) > 1 else ():
            self.use(tensor, use, writes=False, held=True)
        for tensor in parts[0]:
            self.use(tensor, use, writes=name != "send", held=True)


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, first = tensor.element_size(), tensor.storage_offset()
    return first * size, (first + last + 1) * size
