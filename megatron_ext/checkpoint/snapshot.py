"""Copies of a rank's state in host memory, which survive the process that made them.

A snapshot is a file that every process of the machine can map, in a folder in memory (`/dev/shm`)
or on a disk. Two files take turns, so that the older snapshot stays whole while the newer one is
written. The header marks a snapshot as whole only after all its bytes are written, and a digest
detects bytes that have changed since. So if a process is killed at any moment, the other snapshot
stays readable. The header has its own checksum, and is read only if that matches.

A state is any nesting of dictionaries and lists with tensors and other values. Its tensors are
copied to one region of the file. Everything else, with the positions of the tensors, is pickled
after that region.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_ext import limits
from megatron_ext.disk.bus import remember_size
from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.disk.writing import open_descriptor
from megatron_ext.errors import CheckpointError

_HEADER_BYTES = 4096
"""Size of the header: a whole page, so that the content begins on a page."""
_START = "<II"
"""Format of the first 8 bytes: length and CRC-32 of the header, which follows as JSON."""
_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, so that any dtype can be viewed in place."""
_BLOCK_WORDS = 1 << 15
"""Number of 8-byte words that are summed as a block; a digest is a hash of the sums (`_digest`)."""
_ROOM_FOR_GROWTH = 1 << 16
"""Spare bytes at the end of a file, since the pickled values of the next snapshot may be larger."""


@dataclass(frozen=True)
class Content:
    """A state, split into its tensors and everything else.

    Attributes:
        tensors: the tensors to copy. Their values may change between two snapshots.
        skeleton: the pickled state, with numbers in place of tensors.
        num_bytes: size of the copied tensors, with gaps for alignment.
        offsets: where the copy of each tensor begins, in bytes.
    """

    tensors: list[Tensor]
    skeleton: bytes
    num_bytes: int
    offsets: list[int]


class _Pickler(pickle.Pickler):
    """A pickler that collects the tensors of a state, and stores a number for each."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """The inverse of `_Pickler`: it puts the given tensors in place of their numbers."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor


def content_of(state: Any) -> Content:
    """Split a state into its tensors and everything else; the state itself does not change.

    megatron-core's factories of sharded tensors are replaced by the tensors that they make. A
    tensor that lies within another tensor's memory, such as a part of a weight that a factory
    splits, is copied only once.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    if isinstance(state, dict):
        state = dict_list_map_outplace(lambda value: value, state)  # copies no tensor
        apply_factories(state)
    pickler.dump(state)
    copied = list[Tensor]()
    offsets = list[int]()
    size = 0
    places: list[tuple[int, torch.dtype, torch.Size]] = [(0, torch.uint8, torch.Size())] * len(
        pickler.tensors
    )
    whole: tuple[Tensor, int, int] | None = None  # last tensor without gaps, begin, offset
    for number in sorted(range(len(places)), key=lambda i: _extent(pickler.tensors[i])):
        tensor = pickler.tensors[number]
        begin, minus_bytes, gaps = _extent(tensor)
        if whole is not None and _lies_within(tensor, begin - minus_bytes, *whole[:2]):
            place = whole[2] + begin - whole[1]
        else:
            place = size
            copied.append(tensor)
            offsets.append(size)
            whole = whole if gaps else (tensor, begin, size)
            size += -(minus_bytes // _ALIGNMENT) * _ALIGNMENT
        places[number] = place, tensor.dtype, tensor.shape
    return Content(copied, pickle.dumps((places, file.getvalue())), size, offsets)


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return a sort key by which a tensor follows all tensors that may contain it.

    The key is (address, negative size in bytes, whether the tensor is not contiguous). So of
    tensors that begin at one address the largest is first, and of equal ones a contiguous one.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.data_ptr(), -num_bytes, int(not tensor.is_contiguous())


def _lies_within(tensor: Tensor, end: int, other: Tensor, begin: int) -> bool:
    """Return whether ``tensor`` lies within ``other``'s memory; False if one is not contiguous.

    Args:
        end: address after the last byte of ``tensor``.
        begin: address of ``other``; not above the address of ``tensor``.
    """
    both = tensor.is_contiguous() and other.is_contiguous() and tensor.device == other.device
    return both and 0 < end <= begin + other.numel() * other.element_size()


class _Mapping:
    """A file of fixed size, mapped into memory; `copy` pins it, so that a GPU can write to it."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        flags = os.O_RDWR if size is None else os.O_RDWR | os.O_CREAT
        descriptor = open_descriptor(path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                # Only this user may write the file, since its pickled values can run code.
                raise PermissionError(errno.EPERM, "it is another user's", str(path))
            if size is not None:
                # Reserve the space now: on a full file system, a write to a mapped page would kill
                # the process.
                os.posix_fallocate(descriptor, 0, size)
            self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            remember_size(path, len(self.memory))
        finally:
            os.close(descriptor)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._is_pinned = False

    def copy(self, content: Content) -> None:
        """Copy the tensors of ``content`` behind the header; wait until a GPU has finished."""
        sources = content.tensors
        targets = list[Tensor]()
        for tensor, offset in zip(sources, content.offsets, strict=True):
            place = _HEADER_BYTES + offset, tensor.dtype, tensor.shape
            targets.append(_view(self.bytes, *place))
        on_gpu = any(source.is_cuda for source in sources)
        if on_gpu:
            self._pin()
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def _pin(self) -> None:
        """Pin this memory once, so that a GPU can copy to it directly."""
        if not self._is_pinned:
            self._is_pinned = True
            _cuda_runtime().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)

    def unpin(self) -> None:
        """Unpin the memory, before the mapping is dropped."""
        if self._is_pinned:
            self._is_pinned = False
            _cuda_runtime().cudaHostUnregister(self.bytes.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class SnapshotFile:
    """A file at ``path`` that holds one snapshot and is written again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: _Mapping | None = None

    def reserve(self, num_bytes: int) -> _Mapping:
        """Enlarge the file to hold a header and ``num_bytes`` bytes, and return its mapped memory.

        Raises:
            CheckpointError: the file system has no room, or cannot be written.
        """
        size = _HEADER_BYTES + num_bytes
        if self._mapping is None or self._mapping.bytes.numel() < size:
            if self._mapping is not None:
                self._mapping.unpin()
            size = -(-(size + _ROOM_FOR_GROWTH) // _HEADER_BYTES) * _HEADER_BYTES
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._mapping = _Mapping(self.path, size)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path.parent} has no room for a snapshot of {size / 2**20:.1f} MiB "
                    f"({limits.cause(error, self.path.parent, size)})."
                ) from error
        return self._mapping

    def write(
        self,
        iteration: int,
        content: Content,
        facts: dict[str, Any] | None = None,
        *,
        with_digest: bool = True,
    ) -> Snapshot:
        """Write a snapshot to the file: tensors first, then the skeleton, and the header last.

        The tensors may change as soon as this returns.

        Args:
            iteration: number of training steps of the state.
            content: the state to write.
            facts: values for JSON to store with the snapshot; a reader finds them in
                `Snapshot.facts`.
            with_digest: whether to store a digest, which takes time to compute. Without it, a
                reader cannot tell whether bytes have changed after the write.
        """
        begin = _HEADER_BYTES + content.num_bytes
        end = begin + len(content.skeleton)
        mapping = self.reserve(end - _HEADER_BYTES)
        memory = mapping.memory
        memory[:8] = bytes(8)  # From here on the snapshot is not whole.
        mapping.copy(content)
        memory[begin:end] = content.skeleton
        written = mapping.bytes[_HEADER_BYTES:end]
        header = {
            "iteration": iteration,
            "facts": facts or {},
            "tensors": content.num_bytes,
            "skeleton": len(content.skeleton),
            "digest": _digest(written, content.num_bytes) if with_digest else "",
        }
        text = json.dumps(header).encode()
        assert len(text) <= _HEADER_BYTES - 8
        memory[8 : 8 + len(text)] = text
        memory[:8] = struct.pack(_START, len(text), zlib.crc32(text))
        return Snapshot(self.path, mapping, header)

    def write_raw(self, size: int, pieces: Iterable[tuple[int, Tensor]]) -> Snapshot | None:
        """Write a copy of another snapshot, which arrives in pieces, to this file.

        The first 8 bytes, which mark the copy as whole, are written last. Return the copy; None if
        the pieces did not give a whole snapshot.

        Args:
            size: number of bytes of the other snapshot's ``Snapshot.raw``.
            pieces: (offset, bytes) of each piece, with the bytes as uint8 ``[n]``.
        """
        memory = self.reserve(size - _HEADER_BYTES).bytes
        memory[:8] = 0
        first = torch.zeros(8, dtype=torch.uint8)
        for start, piece in pieces:
            target = memory[start : start + piece.numel()]
            if start == 0:
                first.copy_(piece[:8])
                target = target[8:]
                piece = piece[8:]
            target.copy_(piece)
        memory[:8] = first
        return self.read()

    def discard(self) -> None:
        """Mark an existing file as holding no whole snapshot."""
        with os.fdopen(open_descriptor(self.path, os.O_RDWR), "r+b") as file:
            file.write(bytes(8))

    def read(self) -> Snapshot | None:
        """Return the snapshot in the file; None if it is not whole, or belongs to another user."""
        try:
            mapping = _Mapping(self.path)
            length, checksum = struct.unpack(_START, mapping.memory[:8])
            text = mapping.memory[8 : 8 + length]
            if not 0 < length <= _HEADER_BYTES - 8 or zlib.crc32(text) != checksum:
                return None
            header = parse_json(bytes(text), self.path, not_finite=True)
            snapshot = Snapshot(self.path, mapping, header)
            return snapshot if snapshot.num_bytes <= mapping.bytes.numel() - _HEADER_BYTES else None
        # The file may be shorter than a header, or written by another version of this program.
        except (OSError, ValueError, KeyError, TypeError, struct.error, UnreadableFile):
            return None


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the tensor of ``dtype`` and ``shape`` that begins at byte ``offset`` of ``memory``."""
    num_bytes = shape.numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def _digest(content: Tensor, tensor_bytes: int) -> str:
    """Return a digest of a snapshot's bytes; the first ``tensor_bytes`` belong to tensors.

    The bytes of tensors are summed as 64-bit integers, block by block, which is as fast as reading
    memory. A change of one byte always changes a sum. The sums and all other bytes are hashed.
    """
    words = content[:tensor_bytes].view(torch.int64)
    whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    # numpy sums integers several times as fast as torch sums rows.
    blocks = words[:whole].numpy().view(np.uint64).reshape(-1, _BLOCK_WORDS).sum(axis=1)
    rest = words[whole:].numpy().view(np.uint64).sum()
    digest = hashlib.blake2b(blocks.tobytes(), digest_size=16)
    digest.update(rest.tobytes())
    digest.update(content[tensor_bytes:].numpy().tobytes())
    return digest.hexdigest()


class Snapshot:
    """A whole snapshot in a file, as its header describes it.

    Attributes:
        iteration: number of training steps of the state.
        facts: what the writer stored about the snapshot, as values for JSON.
        num_bytes: size of the content, tensors and pickled values.
        digest: checksum of the content; "" if the writer stored none.
    """

    def __init__(self, path: Path, mapping: _Mapping, header: dict[str, Any]) -> None:
        self.path = path
        self._mapping = mapping
        self._header = header
        self.iteration = int(header["iteration"])
        self.facts = dict(header["facts"])
        self.digest = str(header["digest"])
        self._tensor_bytes = int(header["tensors"])
        self.num_bytes = self._tensor_bytes + int(header["skeleton"])

    @property
    def content(self) -> Tensor:
        """Return the bytes of the content, uint8 ``[num_bytes]``, a view of the file."""
        return self._mapping.bytes[_HEADER_BYTES : _HEADER_BYTES + self.num_bytes]

    @property
    def raw(self) -> Tensor:
        """Return header and content, uint8 ``[n]``, which `SnapshotFile.write_raw` can copy."""
        return self._mapping.bytes[: _HEADER_BYTES + self.num_bytes]

    def is_intact(self) -> bool:
        """Return whether the content still matches the stored digest; False without a digest."""
        return _digest(self.content, self._tensor_bytes) == self.digest

    def state(self, *, to_pickle: bool = False) -> Any:
        """Return the stored state; its tensors are views of the file's memory.

        Args:
            to_pickle: whether the state is to be pickled. Pickling a view would pickle the memory
                of all tensors, so plain tensors are then copied. Those in megatron-core's sharded
                tensors stay views, since a checkpoint stores them without pickling.
        """
        content = self.content
        offset = self._tensor_bytes
        places, skeleton = pickle.loads(content[offset:].numpy().tobytes())
        tensors = [_view(content[:offset], *place) for place in places]
        state = _Unpickler(io.BytesIO(skeleton), tensors).load()
        return dict_list_map_inplace(_apart, state) if to_pickle else state


def _apart(value: Any) -> Any:
    """Return ``value`` with copies of its tensors; megatron-core's sharded tensors stay views.

    A `ShardedObject` is changed in place: its ``data`` gets the copies.
    """
    if isinstance(value, ShardedObject):
        value.data = tree_map_only(Tensor, Tensor.clone, value.data)
        return value
    return tree_map_only(Tensor, Tensor.clone, value)


class SnapshotPair:
    """The two newest snapshots of a state, in two files that are written in turn.

    Args:
        folder: the folder of the two files.
        name: name of the two files, without the number at the end.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.files = [SnapshotFile(folder / f"{name}.{number}") for number in range(2)]
        self._next: int | None = None

    def reserve(self, num_bytes: int) -> None:
        """Enlarge both files to ``num_bytes``; raise a CheckpointError if there is no room."""
        for file in self.files:
            file.reserve(num_bytes)

    def turn(self) -> SnapshotFile:
        """Return the file to write next: one without a whole snapshot, else the older one."""
        if self._next is None:
            snapshots = [file.read() for file in self.files]
            ages = [-1 if snapshot is None else snapshot.iteration for snapshot in snapshots]
            self._next = ages.index(min(ages))
        file = self.files[self._next]
        self._next = 1 - self._next
        return file
