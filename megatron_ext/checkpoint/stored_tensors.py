"""Reads tensors from the files of a checkpoint straight into the memory where they belong.

torch's own reader reads each stored tensor as a whole into new memory, even if only a part of it is
wanted, and copies from there. Here the place of the values in the file is looked up first. Then
only the bytes between the first and the last wanted value are read, without a copy where they fit
the target as they are.
"""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_ext.checkpoint.pickles import Machine, Name, Refused

_END = b"PK\x07\x08"
"""The bytes with which a zip archive goes on after the content of a record that is not packed."""
_REBUILD = "torch._utils._rebuild_tensor_v2"
_DTYPES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
"""The dtype of each class of storage that a pickle may name."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a contiguous tensor's values in a file; ``start`` is that of the first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def strides(self) -> list[int]:
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]

    def holds(self, offset: Sequence[int], size: Sequence[int]) -> bool:
        """Return whether the box of ``size`` at ``offset`` lies within the tensor."""
        if len(offset) != len(self.shape):
            return False
        return all(a + b <= c for a, b, c in zip(offset, size, self.shape, strict=True))

    def read(
        self, file: FileIO, offset: Sequence[int], size: Sequence[int], target: Tensor
    ) -> None:
        """Copy the box of ``size`` at ``offset`` in this tensor into ``target``.

        The tensor must hold the box, and ``target`` must have its size.

        Raises:
            EOFError: the file ends before the values.
        """
        assert target.shape == torch.Size(size)
        if not target.numel():
            return
        strides = self.strides
        first = sum(a * b for a, b in zip(offset, strides, strict=True))
        length = 1 + sum((a - 1) * b for a, b in zip(size, strides, strict=True))
        begin = self.start + first * self.dtype.itemsize
        if length == target.numel() and self._can_hold(target):
            _read(file, begin, target)
            return
        read = torch.empty(length, dtype=self.dtype)
        _read(file, begin, read)
        target.copy_(read.as_strided(tuple(size), strides))

    def _can_hold(self, target: Tensor) -> bool:
        """Return whether the bytes of stored values are those of ``target``."""
        is_plain = type(target) is Tensor and target.is_cpu and target.is_contiguous()
        return is_plain and target.dtype == self.dtype


def _read(file: FileIO, position: int, target: Tensor) -> None:
    """Fill a contiguous tensor in host memory with the bytes of a file from ``position`` on."""
    values: Any = target.reshape(-1).view(torch.uint8).numpy()
    left = memoryview(values)
    while left:
        size = os.preadv(file.fileno(), [left], position)
        if not size:
            raise EOFError(f"{file.name} ends early")
        position += size
        left = left[size:]


def find_tensor(file: FileIO, start: int, length: int) -> StoredTensor | None:
    """Return the place of the tensor in the ``length`` bytes of a file from ``start`` on.

    The result is None if they are not what ``torch.save`` writes of a contiguous tensor of numbers
    on a machine with the byte order of this one.
    """
    try:
        part: Any = _create_file_view(file, start, length)
        archive: Any = torch._C.PyTorchFileReader(part)
        if archive.get_record("byteorder").decode() != sys.byteorder:
            return None
        described = _TensorMachine(archive.get_record("data.pkl")).load()
        if type(described) is not _Described:
            return None
        storage = described.storage
        width = storage.dtype.itemsize
        begin = archive.get_record_offset(f"data/{storage.key}")
    # Whatever is wrong with the bytes, torch's own reader tells it.
    except Exception:
        return None
    end = begin + storage.num_values * width
    first = begin + described.offset * width
    tensor = StoredTensor(storage.dtype, described.shape, start + first)
    is_plain = list(described.strides) == tensor.strides and end < length
    if not is_plain or first + math.prod(described.shape) * width > end:
        return None
    # What follows the values shows that they are not packed.
    return tensor if os.pread(file.fileno(), len(_END), start + end) == _END else None


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    num_values: int


@dataclass(frozen=True)
class _Described:
    """A tensor as its pickle describes it; ``offset`` counts values in its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorMachine(Machine):
    """An unpickler for the pickle of one tensor of numbers; it returns a `_Described`."""

    def name(self, module: str, name: str) -> Name:
        return Name(module, name)

    def stored(self, key: Any) -> _Storage:
        kind, storage, number, _device, num_values = key
        if kind != "storage" or type(number) is not str or type(num_values) is not int:
            raise Refused("it names a value that is no storage")
        return _Storage(_DTYPES[storage.full], number, num_values)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if function.full == "collections.OrderedDict" and not arguments:
            return OrderedDict()
        storage, offset, shape, strides, _requires_grad, _hooks = arguments
        numbers = [offset, *shape, *strides]
        are_counts = all(type(x) is int and x >= 0 for x in numbers)
        if function.full != _REBUILD or type(storage) is not _Storage or not are_counts:
            raise Refused("it makes another value than a tensor")
        return _Described(storage, offset, tuple(shape), tuple(strides))
