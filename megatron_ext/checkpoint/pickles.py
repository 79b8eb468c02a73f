"""Small unpicklers that call nothing that a pickle names.

Python's own unpickler imports whatever a pickle names, calls it, and sets attributes on any object
on its stack, even on classes. `Machine` follows the same instructions, but its stack holds only the
`Name` of a class or function, never the object itself. Instructions that the writers of checkpoints
do not use are refused. What a call or a state produces is decided by subclasses. `MetadataMachine`
builds the index of a checkpoint from a fixed list of classes and functions. `Scan` builds nothing:
it refuses pickles that would be costly to read.
"""

from __future__ import annotations

import dataclasses
import gc
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

MAX_BYTES = 1 << 32
"""Size limit of a pickle in bytes; a checkpoint index with 400,000 entries has about 80 MB."""
MAX_NESTING = 100
"""Limit of nested values; far beyond it Python's own functions would overflow the stack."""
MAX_KEY = 64
"""Limit of elements of a tuple used as a mapping's key, and of dimensions of a ``torch.Size``."""
MAX_IN_TUPLE = 10_000
"""Limit of elements of a tuple that contains tuples; the elements of inner tuples count, too."""
MAX_SAME_HASH = 1_000
"""Limit of keys in a pickle that share, or may share, a hash with another key (`check_key`)."""
MAX_REUSE = 8
"""Limit of the total size of all calls' arguments in a pickle, as a multiple of the pickle's size.

Sizes are in bytes or elements; the limit has a fixed allowance of 64 KiB more. A pickle can pass
one long value to many calls, and each call would copy it.
"""


class ForeignName(ValueError):
    """A pickle names a class or function that does not belong in a checkpoint."""


class Refused(ValueError):
    """A pickle has an instruction or a value that no checkpoint has; the message says which."""


class Name:
    """The name of a class or function, which `Machine` uses in place of the object itself."""

    __slots__ = ("full", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.full = f"{module}.{name}"


_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_WITHOUT_EQUALS = frozenset({int, bool, bytes, type(None)})
"""Classes of keys that `Machine.check_key` does not count, since few of them can share a hash.

Integers have a limited range, and hashes of bytes are salted.
"""
_LARGEST_KEY = 1 << 63


def _is_key(value: Any) -> bool:
    """Return whether a value is cheap to hash: a scalar, or a short tuple of scalars."""
    if type(value) is int:
        # Python's hash is a remainder, so many larger integers could share one hash.
        return -_LARGEST_KEY < value < _LARGEST_KEY
    if type(value) is tuple:
        return len(value) <= MAX_KEY and all(type(x) is not tuple and _is_key(x) for x in value)
    return type(value) in _SCALARS


class Machine:
    """An unpickler for the instructions of pickle protocols 2 to 5 that checkpoints use.

    Other instructions are refused. `load` reads the pickle that starts at byte ``at`` of
    ``content``, returns its value, and sets ``at`` to the first byte after it. For each class, call
    and object state in the pickle, it calls a method that subclasses override (`name`, `call`,
    `build`). Content that ends early or is inconsistent may raise any exception.
    """

    def __init__(self, content: bytes, at: int = 0) -> None:
        if len(content) > MAX_BYTES:
            raise Refused(f"it has {len(content)} bytes, more than {MAX_BYTES}")
        self._content = content
        self.at = at
        self._of_hash: dict[int, Any] = {}
        self._same_hash = 0

    def name(self, module: str, name: str) -> Any:
        """Return what replaces a class or function named in the pickle, such as a `Name`.

        The result is passed to `call` and `new`.

        Raises:
            ForeignName: a pickle of this kind may not contain the name. The base class allows none.
        """
        raise ForeignName(f"{module}.{name}")

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the value to use for a call in the pickle; the base class refuses every call."""
        raise Refused("it calls a function")

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Return an instance of a class named in the pickle, still without state.

        The base class refuses every class.
        """
        raise Refused("it makes an instance")

    def build(self, target: Any, state: Any) -> None:
        """Set the state of an instance that `new` has made.

        Raises:
            Refused: the target already has a state, or is not such an instance.
        """
        raise Refused("it sets a state")

    def stored(self, key: Any) -> Any:
        """Return the tensor storage that was saved beside the pickle under ``key``.

        The base class refuses every key.
        """
        raise Refused("it names a value outside of the file")

    def is_key(self, value: Any) -> bool:
        """Return whether a value may be the key of a mapping."""
        return _is_key(value)

    def check_key(self, key: Any) -> None:
        """Raise Refused if a value cannot be a key of a mapping, or if too many keys share a hash.

        Mappings compare keys with equal hashes one by one, so that many of them would take long.
        """
        if type(key) is str:
            return
        if not self.is_key(key):
            raise Refused(f"it has a {type(key).__name__} as a key")
        if type(key) in _WITHOUT_EQUALS:
            return
        first = self._of_hash.setdefault(hash(key), key)
        if first is not key and first != key:
            self._count_same_hash()

    def _count_same_hash(self) -> None:
        """Count a key whose hash may equal another key's; raise Refused if there are too many."""
        self._same_hash += 1
        if self._same_hash > MAX_SAME_HASH:
            raise Refused(f"it has more than {MAX_SAME_HASH} keys with the hash of another one")

    def check_tuple(self, value: tuple[Any, ...]) -> None:
        """Raise Refused if a tuple, with the tuples in it, is too large for torch's own unpickler.

        The base class accepts every tuple.
        """

    def load(self) -> Any:
        """Follow the instructions to the end of the pickle, and return its value."""
        content = self._content
        position = self.at
        text = content.__getitem__
        long_size = struct.Struct("<I").unpack_from
        integer = struct.Struct("<i").unpack_from
        short = struct.Struct("<H").unpack_from
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: dict[int, Any] = {}
        scans = type(self).check_tuple is not Machine.check_tuple

        while True:
            code = content[position]
            position += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[content[position]])
                position += 1
            elif code == 0x4B:  # BININT1
                stack.append(content[position])
                position += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[long_size(content, position)[0]])
                position += 4
            elif code == 0x28:  # MARK
                if len(below) > MAX_NESTING:
                    _too_deep()
                below.append(stack)
                stack = []
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x81:  # NEWOBJ
                arguments = stack.pop()
                stack[-1] = self.new(stack[-1], arguments)
            elif code == 0x62:  # BUILD
                state = stack.pop()
                self.build(stack[-1], state)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
                if code == 0x75:
                    items, stack = stack, below.pop()
                else:
                    items = stack[-2:]
                    del stack[-2:]
                target = stack[-1]
                if type(target) is not dict and type(target) is not OrderedDict:
                    raise Refused("it sets items of what is no mapping")
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if type(key) is not str:
                        self.check_key(key)
                    target[key] = value
            elif 0x85 <= code <= 0x87 or code == 0x74:  # TUPLE1, TUPLE2, TUPLE3, TUPLE
                if code == 0x74:
                    made = tuple(stack)
                    stack = below.pop()
                else:
                    size = code - 0x84
                    if len(stack) < size:
                        raise Refused("it has too few values for a tuple")
                    made = tuple(stack[-size:])
                    del stack[-size:]
                if scans:
                    self.check_tuple(made)
                stack.append(made)
            elif code == 0x52:  # REDUCE
                arguments = stack.pop()
                if type(arguments) is not tuple:
                    raise Refused("it calls without a tuple of arguments")
                stack[-1] = self.call(stack[-1], arguments)
            elif code == 0x8C or code == 0x58 or code == 0x8D:  # SHORT_BINUNICODE, BINUNICODE and 8
                size, position = self._size(code, (0x8C, 0x58), position)
                stack.append(str(text(slice(position, position + size)), "utf-8", "surrogatepass"))
                position += size
            elif code == 0x4D:  # BININT2
                stack.append(short(content, position)[0])
                position += 2
            elif code == 0x4A:  # BININT
                stack.append(integer(content, position)[0])
                position += 4
            elif code == 0x89 or code == 0x88:  # NEWFALSE, NEWTRUE
                stack.append(code == 0x88)
            elif code == 0x4E:  # NONE
                stack.append(None)
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
                if code == 0x65:
                    items, stack = stack, below.pop()
                else:
                    items = [stack.pop()]
                if type(stack[-1]) is not list:
                    raise Refused("it appends to what is no list")
                stack[-1].extend(items)
            elif code == 0x8A:  # LONG1
                size = content[position]
                number = text(slice(position + 1, position + 1 + size))
                stack.append(int.from_bytes(number, "little", signed=True))
                position += 1 + size
            elif code == 0x47:  # BINFLOAT
                stack.append(struct.unpack_from(">d", content, position)[0])
                position += 8
            elif code == 0x43 or code == 0x42 or code == 0x8E:  # SHORT_BINBYTES, BINBYTES and 8
                size, position = self._size(code, (0x43, 0x42), position)
                stack.append(text(slice(position, position + size)))
                position += size
            elif code == 0x55:  # SHORT_BINSTRING
                size = content[position]
                stack.append(text(slice(position + 1, position + 1 + size)))
                position += 1 + size
            elif code == 0x71:  # BINPUT
                memo[content[position]] = stack[-1]
                position += 1
            elif code == 0x72:  # LONG_BINPUT
                memo[long_size(content, position)[0]] = stack[-1]
                position += 4
            elif code == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                module = stack.pop()
                if type(name) is not str or type(module) is not str:
                    raise Refused("it names a class by what is no text")
                stack.append(self.name(module, name))
            elif code == 0x63:  # GLOBAL
                middle = content.index(b"\n", position)
                end = content.index(b"\n", middle + 1)
                names = content[position:middle].decode(), content[middle + 1 : end].decode()
                stack.append(self.name(*names))
                position = end + 1
            elif code == 0x51:  # BINPERSID
                stack.append(self.stored(stack.pop()))
            elif code == 0x8F:  # EMPTY_SET
                stack.append(set())
            elif code == 0x95:  # FRAME
                position += 8
            elif code == 0x80:  # PROTO
                position += 1
            elif code == 0x2E:  # STOP
                if position > len(content):
                    raise EOFError("it ends early")
                self.at = position
                (value,) = stack
                check_nesting(value)
                return value
            else:
                raise Refused(f"it has an instruction ({code:#04x}) that no checkpoint has")

    def _size(self, code: int, shorter: tuple[int, int], position: int) -> tuple[int, int]:
        """Return the length in bytes of a string in the pickle, and the position where it begins.

        The pickle stores the length at ``position``, and the string right after the length.

        Args:
            code: the instruction that loads the string. It determines whether the length itself
                takes 1, 4 or 8 bytes.
            shorter: the instructions with a length of 1 byte and of 4 bytes. All others have a
                length of 8 bytes.
        """
        if code == shorter[0]:
            return self._content[position], position + 1
        width = 4 if code == shorter[1] else 8
        size = int.from_bytes(self._content[position : position + width], "little")
        if position + width + size > len(self._content):
            raise EOFError("it ends early")
        return size, position + width


def _too_deep() -> NoReturn:
    raise Refused(f"it has values more than {MAX_NESTING} deep in others")


def _parts(value: Any) -> Iterator[Any]:
    """Yield the values directly inside a value that a `Machine` has made."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return iter(value.values())
    if kind is list or kind is tuple:
        return iter(value)
    if kind is Unknown:
        return iter(value.parts)
    return iter(vars(value).values()) if kind in _RECORDS else iter(())


def check_nesting(value: Any) -> None:
    """Raise Refused if a value contains itself, or if values are nested too deeply."""
    heights: dict[int, int] = {}
    inner = {id(value): 0}
    path = [(value, _parts(value))]
    while path:
        at, parts = path[-1]
        for part in parts:
            if type(part) in _LEAVES:
                continue
            height = heights.get(id(part))
            if height is not None:
                inner[id(at)] = max(inner[id(at)], height)
            elif id(part) in inner:
                raise Refused("it holds a value that lies within itself")
            else:
                inner[id(part)] = 0
                path.append((part, _parts(part)))
                break
        else:
            path.pop()
            height = heights[id(at)] = inner.pop(id(at)) + 1
            if height + len(path) > MAX_NESTING:
                _too_deep()
            if path:
                outer = id(path[-1][0])
                inner[outer] = max(inner[outer], height)


_COUNT = (int,)
_TEXT = (str,)
_SIZE = (torch.Size,)
_FLAG = (bool,)
_MAYBE = type(None)
_ANY: tuple[type, ...] = ()
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    metadata.Metadata: {
        "state_dict_metadata": (dict,),
        "storage_data": (dict, _MAYBE),
        "planner_data": _ANY,
        "storage_meta": (metadata.StorageMeta, _MAYBE),
        "version": (str, _MAYBE),
        # megatron-core stores its plans beside the metadata, to prepare the next checkpoint faster.
        "all_local_plans": _ANY,
        "mcore_data": _ANY,
    },
    metadata.MetadataIndex: {
        "fqn": _TEXT,
        "offset": (torch.Size, _MAYBE),
        "index": (int, _MAYBE),
    },
    metadata.StorageMeta: {
        "checkpoint_id": (str, PurePosixPath, PureWindowsPath, _MAYBE),
        "save_id": (str, _MAYBE),
        "load_id": (str, _MAYBE),
        "modules": (list,),
    },
    metadata.ChunkStorageMetadata: {"offsets": _SIZE, "sizes": _SIZE},
    metadata.TensorStorageMetadata: {
        "properties": (metadata.TensorProperties,),
        "size": _SIZE,
        "chunks": (list,),
    },
    metadata.BytesStorageMetadata: {},
    metadata.TensorProperties: {
        "dtype": (torch.dtype,),
        "layout": (torch.layout,),
        "requires_grad": _FLAG,
        "memory_format": (torch.memory_format,),
        "pin_memory": _FLAG,
    },
    filesystem._StorageInfo: {
        "relative_path": _TEXT,
        "offset": _COUNT,
        "length": _COUNT,
        "transform_descriptors": (list, tuple, _MAYBE),
    },
    planner.SavePlan: {
        "items": (list,),
        "storage_data": _ANY,
        "planner_data": _ANY,
        "usable": _FLAG,
    },
    planner.WriteItem: {
        "index": (metadata.MetadataIndex,),
        "type": (planner.WriteItemType,),
        "bytes_io_data": (planner.BytesIOWriteData, _MAYBE),
        "tensor_data": (planner.TensorWriteData, _MAYBE),
    },
    planner.TensorWriteData: {
        "chunk": (metadata.ChunkStorageMetadata,),
        "properties": (metadata.TensorProperties,),
        "size": _SIZE,
    },
    planner.BytesIOWriteData: {"nbytes": _COUNT},
}
"""The classes in the pickled index of a checkpoint, with the allowed types of each field; `_ANY`
allows any value that a `Machine` makes. Fields that other releases of torch add are ignored.
"""
_RECORDS = {kind: fields for kind, fields in _FIELDS.items() if fields}
_NEEDED = {
    kind: {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    for kind in _FIELDS
}
_LEAVES = {
    *_SCALARS,
    torch.Size,
    torch.dtype,
    metadata.MetadataIndex,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.BytesStorageMetadata,
}
"""Classes whose values cannot contain other values."""

_FORMATS = {
    metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    metadata._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or len(numbers) > MAX_KEY:
        raise Refused("it has a size that is none")
    size = torch.Size(numbers)
    if size and (min(size) < 0 or max(size) >= _LARGEST_KEY):
        raise Refused(f"it has a size ({list(size)}) out of range")
    return size


def _layout(name: Any) -> torch.layout:
    layout = getattr(torch, str(name).removeprefix("torch."), None) if type(name) is str else None
    if not isinstance(layout, torch.layout):
        raise Refused("it has a layout that torch does not know")
    return layout


def _path_of(kind: type[PurePath]) -> Callable[..., PurePath]:
    """Return a function that joins texts to a path of class ``kind``, without touching the disk."""

    def make(*parts: Any) -> PurePath:
        if any(type(part) is not str for part in parts):
            raise Refused("it has a path whose parts are no texts")
        return kind(*parts)

    return make


def member_of(kind: type[Enum]) -> Callable[..., Enum]:
    """Return a function that maps a value to the member of the enumeration ``kind``."""

    def member(value: Any) -> Enum:
        if type(value) not in (int, str):
            raise Refused(f"it has a {kind.__name__} that is none")
        return kind(value)

    return member


_POSIX = _path_of(PurePosixPath)
_WINDOWS = _path_of(PureWindowsPath)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": OrderedDict,
    **{
        f"{kind.__module__}.{kind.__name__}": member_of(kind)
        for kind in (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)
    },
    **{
        f"{module}.{name}": _WINDOWS if "Windows" in name else _POSIX
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Function named in a checkpoint's pickled index -> its replacement, which checks arguments."""
_CORE = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES = {f"{kind.__module__}.{kind.__name__}": kind for kind in _FIELDS} | {
    # Classes of earlier releases of megatron-core, which have the fields of torch's classes.
    f"{_CORE}.MCoreMetadata": metadata.Metadata,
    f"{_CORE}.MCoreSavePlan": planner.SavePlan,
}


class MetadataMachine(Machine):
    """An unpickler for the index of a checkpoint (``.metadata``).

    It makes only instances of a few torch classes, and checks their fields.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._names: dict[tuple[str, str], Any] = {}
        self._without_state: dict[int, Any] = {}

    def load(self) -> Any:
        value = super().load()
        if self._without_state:
            kind = type(next(iter(self._without_state.values())))
            raise Refused(f"it has a {kind.__name__} without its fields")
        return value

    def name(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        made = self._names.get((module, name))
        if made is None:
            made = self._names[module, name] = Name(module, name)
            if made.full not in _CLASSES and made.full not in _FUNCTIONS:
                raise ForeignName(made.full)
        return made

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        make = _FUNCTIONS.get(function.full) if type(function) is Name else None
        if make is None:
            raise Refused("it calls what is no function of an index")
        return make(*arguments) if make is not OrderedDict else OrderedDict()

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        allowed = _CLASSES.get(kind.full) if type(kind) is Name else None
        if allowed is None or arguments != ():
            raise Refused("it makes an instance of what is no class of an index")
        made: Any = object.__new__(allowed)
        if _NEEDED[allowed]:
            self._without_state[id(made)] = made
        return made

    def is_key(self, value: Any) -> bool:
        if type(value) is metadata.MetadataIndex:
            return id(value) not in self._without_state
        return _is_key(value)

    def build(self, target: Any, state: Any) -> None:
        kind = type(target)
        fields = _FIELDS.get(kind)
        if fields is None or target.__dict__:
            raise Refused(f"it sets the state of a {kind.__name__} that it did not just make")
        if kind is metadata.TensorProperties and type(state) is tuple:
            dtype, layout, requires_grad, encoding, pin_memory = state
            if type(encoding) is not metadata._MEM_FORMAT_ENCODING:
                raise Refused("it has a memory format that torch does not know")
            given = (dtype, layout, requires_grad, _FORMATS[encoding], pin_memory)
            state = dict(zip(fields, given, strict=True))
        if type(state) is not dict:
            raise Refused(f"it has a {kind.__name__} whose state has no names")
        values = vars(target)
        for name, value in state.items():
            types = fields.get(name)
            if types is None:
                continue
            if types is not _ANY and type(value) not in types:
                raise Refused(f"it has a {type(value).__name__} as `{name}` of a {kind.__name__}")
            values[name] = value
        if not _NEEDED[kind] <= values.keys():
            raise Refused(f"it has a {kind.__name__} without some of its fields")
        self._without_state.pop(id(target), None)


def read_index(content: bytes) -> metadata.Metadata:
    """Return the index of a checkpoint from its pickle.

    Raises:
        ForeignName: the pickle names a class or function that does not belong in an index.
        Exception: the pickle is damaged, or is not an index.
    """
    collects = gc.isenabled()
    # All the new objects are still in use, so garbage collection would only cost time.
    gc.disable()
    try:
        index = MetadataMachine(content).load()
    finally:
        if collects:
            gc.enable()
    if type(index) is not metadata.Metadata:
        raise Refused(f"it holds a {type(index).__name__}")
    for name, entry in index.state_dict_metadata.items():
        kind = type(entry)
        kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
        if type(name) is not str or kind not in kinds:
            raise Refused(f"it has a {kind.__name__} as the entry of {name}")
        chunks = entry.chunks if isinstance(entry, metadata.TensorStorageMetadata) else []
        if any(type(chunk) is not metadata.ChunkStorageMetadata for chunk in chunks):
            raise Refused(f"it has chunks of {name} that are none")
    for place, info in (index.storage_data or {}).items():
        if type(place) is not metadata.MetadataIndex or type(info) is not filesystem._StorageInfo:
            raise Refused("it has places of shards that are none")
        if info.offset < 0 or info.length < 0:
            raise Refused(f"it has a place before the start of {info.relative_path}")
        for descriptor in info.transform_descriptors or ():
            if type(descriptor) is not str:
                raise Refused("it has a transformation that is no name")
    return index


_SIZED = frozenset({str, bytes, list, tuple, dict, OrderedDict})
_HASHING = frozenset(
    {f"{module}.set" for module in ("builtins", "__builtin__")}
    | {"collections.Counter", "collections.OrderedDict"}
)
"""Names of functions in pickles that hash the elements of their argument, which may be costly."""


class Unknown:
    """A value that `Scan` does not build; ``parts`` are the values that it would be built from."""

    __slots__ = ("has_state", "parts")

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)
        self.has_state = False


class Scan(Machine):
    """Follows a pickle of ``torch.save`` without building any object that it names.

    torch's own restricted reader decides which names are allowed. Before it runs, this class
    refuses pickles that would exhaust that reader's stack, memory or time: values nested too
    deeply, and keys that are costly to hash.
    """

    def __init__(self, content: bytes, at: int = 0) -> None:
        super().__init__(content, at)
        self._sizes: dict[int, int] = {}
        self._tuples: list[tuple[Any, ...]] = []
        self._left = MAX_REUSE * (len(content) - at) + (1 << 16)

    def name(self, module: str, name: str) -> Name:
        return Name(module, name)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        self._left -= sum(len(value) for value in arguments if type(value) in _SIZED)
        if self._left < 0:
            raise Refused("it gives the same values to functions again and again")
        full = function.full if type(function) is Name else ""
        if full == "collections.OrderedDict" and not arguments:
            return OrderedDict()
        if full.endswith((".bytearray", "Tensor")) and any(type(x) is int for x in arguments):
            raise Refused("it asks for a number of bytes")
        if full == "_codecs.encode" and arguments[1:] not in (("latin1",), ("latin-1",)):
            raise Refused("it encodes a text in another way than pickles do")
        if full in _HASHING:
            for key in (key for value in arguments if type(value) in _SIZED for key in value):
                self.check_key(key)
        return Unknown(function, arguments)

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Unknown:
        return Unknown(kind, arguments)

    def build(self, target: Any, state: Any) -> None:
        if type(target) is Unknown:
            # A second state would free memory that a tensor may share by now.
            if target.has_state:
                raise Refused("it sets the state of an object twice")
            target.has_state = True
            target.parts.append(state)
        elif type(target) is OrderedDict:
            check_nesting(state)
        else:
            raise Refused("it sets the state of what it did not make")

    def stored(self, key: Any) -> Unknown:
        return Unknown(key)

    def is_key(self, value: Any) -> bool:
        # For example a pair of dtypes, the key under which the distributed optimizer keeps its
        # buffers.
        if type(value) is tuple and len(value) <= MAX_KEY:
            return all(type(x) is Name or (type(x) is not tuple and _is_key(x)) for x in value)
        return type(value) in (Name, Unknown) or _is_key(value)

    def check_key(self, key: Any) -> None:
        if type(key) is Unknown:
            # For example a member of an enumeration, or a size: its hash is not known here.
            self._count_same_hash()
        else:
            super().check_key(key)

    def check_tuple(self, value: tuple[Any, ...]) -> None:
        inner = [self._sizes.get(id(part), 0) for part in value if type(part) is tuple]
        size = len(value) + sum(inner)
        if inner and size > MAX_IN_TUPLE:
            raise Refused(f"it has tuples in tuples with more than {MAX_IN_TUPLE} elements")
        self._sizes[id(value)] = size
        # Keep the tuple, so that no other tuple can get its id.
        self._tuples.append(value)
