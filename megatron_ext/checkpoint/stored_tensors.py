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
        record = f"data/{described.key}"
        size = math.prod(described.shape) * described.dtype.itemsize
        begin = archive.get_record_offset(record) + described.offset * described.dtype.itemsize
    # Whatever is wrong with the bytes, torch's own reader tells it.
    except Exception:
        return None
    if begin + size > length:
        return None
    tensor = StoredTensor(described.dtype, described.shape, start + begin)
    return tensor if list(described.strides) == tensor.strides else None


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str


@dataclass(frozen=True)
class _Described:
    """What the pickle of a tensor says; ``offset`` is that of its first element in its storage."""

    dtype: torch.dtype
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorMachine(Machine):
    """An unpickler for the pickle of one tensor of numbers; it returns a `_Described`."""

    def name(self, module: str, name: str) -> Name:
        return Name(module, name)

    def stored(self, key: Any) -> _Storage:
        kind, storage, number, _device, _numel = key
        if kind != "storage" or type(number) is not str:
            raise Refused("it names a value that is no storage")
        return _Storage(_DTYPES[storage.full], number)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if function.full == "collections.OrderedDict" and not arguments:
            return OrderedDict()
        storage, offset, shape, strides, _requires_grad, _hooks = arguments
        numbers = [offset, *shape, *strides]
        if function.full != _REBUILD or any(type(x) is not int or x < 0 for x in numbers):
            raise Refused("it makes another value than a tensor")
        return _Described(storage.dtype, storage.key, offset, tuple(shape), tuple(strides))
