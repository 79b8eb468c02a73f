"""Reads the pickled parts of a checkpoint without running code that they may hold.

An ordinary reader calls whatever a pickle names. Three parts of a checkpoint are pickles: the index
of the shards (``.metadata``), the common state (``common.pt``), and the objects among the shards,
of which the common state is one where newer releases of megatron-core saved it. The readers here
allow only the few classes that belong there; any other raises a CheckpointError.
"""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.transformer import enums
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _is_zipfile

from megatron_ext.checkpoint.files import is_plain_name
from megatron_ext.checkpoint.pickles import ForeignName, Refused, Scan, member_of, read_index
from megatron_ext.disk.reading import read_bytes
from megatron_ext.errors import CheckpointError

_MAX_INDEX_BYTES = 4 << 30
"""The largest index of shards that is read; one of 400,000 shards has 0.1 GB."""
COMMON_STATE = "common_state"
"""Name of the common state among the shards."""
_OBJECT = f"{COMMON_STATE}/shard_0_1"
_OF_NEWER_FLAGS = ("CudaGraphModule", "InferenceCudaGraphScope")
"""Enumerations of flags, which stock checkpoints hold and older releases of megatron-core lack."""
_OLD_PICKLES = 5
"""Pickles at the start of a file of torch.save that is no archive."""
_NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c(8|16))")
_FOREIGN = re.compile(r"GLOBAL (\S+) w")
"""The part of torch's error that names a class which its restricted reader refuses."""


def refused(path: Path | str, name: str) -> CheckpointError:
    """Return the error about a file that names a class which does not belong there."""
    return CheckpointError(
        f"{path} names `{name}`, which does not belong into a checkpoint and could run code, so "
        "nothing of the file is used; load a checkpoint from a source that you trust."
    )


class MetadataReader(FileSystemReader):
    """A reader of shards; their index can neither run code nor name files in other folders.

    `read_metadata` keeps the index that it has read. It has no parameter ``rank``, since torch
    would otherwise look for one index for each rank.
    """

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read ``.metadata`` once; if it is damaged or not safe, raise a CheckpointError."""
        if self._known is None:
            self._known = _read_metadata(Path(self.path) / ".metadata")
            self._known.storage_meta = StorageMeta(load_id=self.load_id)
        return self._known


def _read_metadata(path: Path) -> Metadata:
    try:
        metadata = read_index(read_bytes(path, _MAX_INDEX_BYTES))
        files = {place.relative_path for place in (metadata.storage_data or {}).values()}
    except ForeignName as error:
        raise refused(path, str(error)) from None
    # Damaged pickles raise errors of any class.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({_first_line(error)}); load another checkpoint."
        ) from error
    for name in files:
        if not is_plain_name(name):
            raise CheckpointError(
                f"{path} names the file {name}, but shards lie in the folder of the checkpoint; "
                "load a checkpoint from a source that you trust."
            )
    return metadata


def stored_entries(path: Path) -> dict[str, Any]:
    """Return the metadata of each stored tensor or object of a checkpoint, by name."""
    entries: dict[str, Any] = MetadataReader(str(path)).read_metadata().state_dict_metadata
    return entries


def plain_content(file: Path | BytesIO, place: Path | str, *, mmap: bool = False) -> Any:
    """Read a file of ``torch.save``: tensors, plain values and megatron-core's enumerations.

    Other content raises a CheckpointError, in which ``place`` names the file. With ``mmap`` a
    tensor is read only when it is used.
    """
    try:
        _scan(file)
        with _restricted_names():
            # Said outright, so that no variable of the environment changes it.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    # Damaged archives and pickles raise errors of any class.
    except Exception as error:
        match = _FOREIGN.search(str(error))
        if match is not None:
            raise refused(place, match[1]) from None
        raise CheckpointError(
            f"{place} cannot be read ({_first_line(error)}); load another checkpoint."
        ) from error


def _scan(file: Path | BytesIO) -> None:
    """Refuse pickles that are costly to read, in a file of ``torch.save`` of either format."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            _scan_opened(opened)
        return
    start = file.tell()
    _scan_opened(file)
    file.seek(start)


def _scan_opened(file: IO[bytes]) -> None:
    if _is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            # torch.save packs nothing, and what is packed may be a thousand times as large.
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise Refused("it is packed")
        file.seek(0)
        # torch's own reader, so that both see the same record of the archive.
        Scan(torch._C.PyTorchFileReader(file).get_record("data.pkl")).load()
        return
    content = file.read()
    at = 0
    for _ in range(_OLD_PICKLES):
        scan = Scan(content, at)
        scan.load()
        at = scan.at


@contextmanager
def _restricted_names() -> Iterator[None]:
    """Let torch's restricted reader use this module's list of names, and no others, for a while."""
    usual = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(_safe_names())
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(usual)


@functools.cache
def _safe_names() -> list[Any]:
    """Return what may stand for a name in a file of ``torch.save``, besides torch's own classes.

    It is megatron-core's list, but for what it has of shared objects and of raw memory: torch's
    reader sets a state on each instance of a class of the list. A member of an enumeration is the
    same object for the whole process, so that functions return the members here; and numpy takes
    bytes of the file as addresses of objects, so that arrays are made by `PlainArray`.
    """
    kinds = [kind for kind in SAFE_GLOBALS if kind.__module__.split(".")[0] != "numpy"]
    members = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    names: list[Any] = [kind for kind in kinds if kind not in members]
    names += [(member_of(kind), f"{kind.__module__}.{kind.__qualname__}") for kind in members]
    missing = (name for name in _OF_NEWER_FLAGS if not hasattr(enums, name))
    names += [(_plain_value, f"{enums.__name__}.{name}") for name in missing]
    names += [(PlainArray, "numpy.ndarray"), (PlainType, "numpy.dtype")]
    names += [(_new_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return names


def _plain_value(value: object) -> object:
    """Return the value of an enumeration's member that this megatron-core does not know."""
    return value


class PlainType:
    """The type of a pickled array: plain numbers of one size, in one order of bytes."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        if type(code) is not str or not _NUMBERS.fullmatch(code):
            raise Refused(f"it has an array of {code!r}, which are no plain numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        _version, order, *rest = state
        if order not in ("<", ">", "|", "=") or rest[:5] != [None, None, None, -1, -1]:
            raise Refused("it has an array of what are no plain numbers")
        self.dtype = self.dtype.newbyteorder(order)


class PlainArray(np.ndarray):
    """An array of plain numbers that is made from the bytes of a pickle, whose size is checked."""

    def __new__(cls, *arguments: Any) -> PlainArray:
        raise Refused("it makes an array from raw memory")

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, by_column, content = state
        if type(kind) is not PlainType or type(content) is not bytes:
            raise Refused("it has an array of what are no plain numbers")
        super().__setstate__((version, shape, kind.dtype, by_column, content))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as numpy's own class: ranks that load together send it to each other."""
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _new_array(kind: Any, shape: Any, code: Any) -> PlainArray:
    """Return an empty array, of which the pickle then sets shape, type and content."""
    array: PlainArray = np.ndarray.__new__(PlainArray, (0,), np.int8)
    return array


class PlainObjectsPlanner(MCoreLoadPlanner):  # type: ignore[misc]
    """megatron-core's load planner, which here reads objects without running code."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = plain_content(value, f"the object `{name}` of the checkpoint")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def holds_common_state(path: Path) -> bool:
    """Return whether a checkpoint has its common state, in either of two places."""
    return (path / COMMON_STATE_FNAME).is_file() or _OBJECT in stored_entries(path)


def common_state_of(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint that are the same on all ranks, read without running code.

    They lie in ``common.pt``, or among the shards where newer releases of megatron-core wrote them.
    """
    place = path / COMMON_STATE_FNAME
    if place.is_file() or not holds_common_state(path):
        content = plain_content(place, place)
    else:
        place = path / _OBJECT
        state = {_OBJECT: BytesIO()}
        _fill(state, path, MetadataReader(str(path)))
        value: Any = state[_OBJECT]
        content = value[0] if isinstance(value, list) and value else None
    if not isinstance(content, dict):
        raise CheckpointError(f"{place} must hold names and values; load another checkpoint.")
    return content


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Return the tensors ``names`` of a checkpoint, unsharded, without a process group."""
    reader = MetadataReader(str(path))
    stored = reader.read_metadata().state_dict_metadata
    state = {}
    for name in names:
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path} holds no tensor `{name}`; load another checkpoint.")
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _fill(state, path, reader)
    return state


def _fill(state: dict[str, Any], path: Path, reader: MetadataReader) -> None:
    """Read the values of a state in place, without a process group, or raise a CheckpointError."""
    try:
        load(state, storage_reader=reader, planner=PlainObjectsPlanner(), no_dist=True)
    # torch's exception derives from BaseException, and would end a program with a traceback.
    except CheckpointException as error:
        cause = next((cause for cause, _ in error.failures.values()), error)
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(
            f"{path} cannot be read ({_first_line(cause)}); load another checkpoint."
        ) from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        # torch's text advises to run the code of the file.
        return "it is no plain pickle"
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
