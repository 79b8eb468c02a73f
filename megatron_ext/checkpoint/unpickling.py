"""Reads the pickled parts of a checkpoint without running code that they may contain.

An ordinary reader calls whatever a pickle names. Three parts of a checkpoint are pickles: the index
of the shards (``.metadata``), the common state, equal on all ranks (``common.pt``), and objects
among the shards. Newer releases of megatron-core save the common state as such an object. The
readers here allow only a few classes and raise a CheckpointError for any other.
"""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from torch.serialization import _is_zipfile

from megatron_ext.checkpoint.files import is_plain_name
from megatron_ext.checkpoint.memory import memory_of
from megatron_ext.checkpoint.pickles import ForeignName, Refused, Scan, member_of, read_index
from megatron_ext.disk.reading import read_bytes
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import on_first_rank

_MAX_INDEX_BYTES = 4 << 30
"""Size limit of an index of shards; 400,000 shards take 0.1 GB."""
COMMON_STATE = "common_state"
"""Name of the object among the shards in which newer megatron-core saves the common state."""
_OBJECT = f"{COMMON_STATE}/shard_0_1"
_OF_NEWER_FLAGS = ("CudaGraphModule", "InferenceCudaGraphScope")
"""Enumerations that may occur in Megatron-LM's checkpoints, but that older megatron-core lacks."""
_MAX_INERT = 64
"""Largest number of another framework's classes in one file."""
_OLD_PICKLES = 5
"""Number of pickles at the start of a file in ``torch.save``'s old format (no zip archive)."""
_NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c(8|16))")
_FOREIGN = re.compile(r"GLOBAL (\S+) w")
"""Finds the name of a refused class in the error message of ``torch.load(weights_only=True)``."""


def refused(path: Path | str, name: str) -> CheckpointError:
    """Return the error for a file that names a class which does not belong in it."""
    return CheckpointError(
        f"{path} names `{name}`, which does not belong into a checkpoint and could run code, so "
        "nothing of the file is used; load a checkpoint from a source that you trust."
    )


class MetadataReader(FileSystemReader):
    """A reader of shards whose index can neither run code nor name files in other folders.

    The index is read once and kept. `read_metadata` does not take the parameter ``rank`` of its
    base class, since torch would otherwise look for one index per rank.
    """

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read ``.metadata`` once; raise a CheckpointError if it is damaged or unsafe."""
        if self._known is None:
            folder = Path(self.path)
            shared = _shared.get(folder)
            self._known = shared if shared is not None else _read_metadata(folder)
            self._known.storage_meta = StorageMeta(load_id=self.load_id)
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` lists, tensors straight into their places.

        The optimizer's state is read last: if its fp32 weights share memory with the model's, they
        replace rounded values of a 16-bit run.
        """
        # A run that loads nothing does not need it.
        from megatron_ext.checkpoint.stored_tensors import StoredTensor, find_tensor

        done = set[tuple[Any, ...]]()
        others = list[ReadItem]()
        by_file = dict[tuple[bool, str], list[ReadItem]]()
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or place.transform_descriptors:
                others.append(item)
            else:
                is_last = item.dest_index.fqn.startswith("optimizer.")
                by_file.setdefault((is_last, place.relative_path), []).append(item)
        for (_, name), items in sorted(by_file.items(), key=lambda entry: entry[0][0]):
            found = dict[int, StoredTensor | None]()
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                for item in items:
                    place = self.storage_data[item.storage_index]
                    if place.offset not in found:
                        found[place.offset] = find_tensor(file, place.offset, place.length)
                    stored = found[place.offset]
                    if stored is None or not stored.holds(item.storage_offsets, item.lengths):
                        others.append(item)
                        continue
                    target = planner.resolve_tensor(item).detach()
                    # The weights that an optimizer updates may be the model's own, stored once.
                    key = name, place.offset, item.storage_offsets, memory_of(target)
                    if key not in done:
                        done.add(key)
                        stored.read(file, item.storage_offsets, item.lengths, target)
                    planner.commit_tensor(item, target)
        return super().read_data(LoadPlan(others), planner)


_shared: dict[Path, Metadata] = {}
"""The indices that `index_shared` and `index_kept` hold, by the folders of their checkpoints."""


@contextmanager
def index_kept(folder: Path) -> Iterator[None]:
    """Within the context, this process does not read a checkpoint's index again.

    A tool that reads many tensors one after another, without a process group, uses it.

    Raises:
        CheckpointError: the index is damaged or unsafe.
    """
    _shared[folder] = _read_metadata(folder)
    try:
        yield
    finally:
        _shared.pop(folder, None)


@contextmanager
def index_shared(folder: Path) -> Iterator[None]:
    """Within the context, a checkpoint's index is not read again; all ranks call this together.

    Rank 0 reads it and sends it to the others. The index of a large run takes seconds to read, and
    a load asks for it ten times.

    Raises:
        CheckpointError: on all ranks, if the index is damaged or unsafe.
    """
    _shared[folder] = on_first_rank(lambda: _read_metadata(folder), f"{folder} cannot be read")
    try:
        yield
    finally:
        _shared.pop(folder, None)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / ".metadata"
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
    """Return the metadata of each tensor or object stored in a checkpoint, by name."""
    entries: dict[str, Any] = MetadataReader(str(path)).read_metadata().state_dict_metadata
    return entries


def plain_content(
    file: Path | BytesIO, place: Path | str, *, mmap: bool = False, inert: Sequence[str] = ()
) -> Any:
    """Read a file of ``torch.save``: tensors, plain values and megatron-core's enumerations.

    Raise a CheckpointError for any other content.

    Args:
        place: path of the file, for error messages.
        mmap: whether to map the file into memory, so that a tensor is read only when it is used.
        inert: names of packages of other frameworks. Each object of their classes is read as an
            `Inert`; the packages are neither imported nor run.
    """
    names: list[str] = []
    while True:
        try:
            _scan(file)
            with _restricted_names(names):
                # Given explicitly, so that no environment variable can change it.
                return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        # Damaged archives and pickles raise errors of any class.
        except Exception as error:
            match = _FOREIGN.search(str(error))
            if match is None:
                raise CheckpointError(
                    f"{place} cannot be read ({_first_line(error)}); load another checkpoint."
                ) from error
            # torch tells one name at a time.
            if match[1].split(".")[0] not in inert or len(names) == _MAX_INERT:
                raise refused(place, match[1]) from None
            names.append(match[1])


class Inert:
    """An object of another framework, of which only the arguments of its construction are kept."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Leave out the state."""


def _scan(file: Path | BytesIO) -> None:
    """Raise an error if reading a file of ``torch.save`` could exhaust memory or take too long.

    The file may be a zip archive, or in torch's old format without an archive. Compressed archives
    are refused, and so are pickles that `Scan` refuses.
    """
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
            # torch.save never compresses, and compressed content may unpack to a thousand times its
            # size.
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise Refused("it is packed")
        file.seek(0)
        # Use torch's own archive reader, so that the scan and torch see the same record.
        Scan(torch._C.PyTorchFileReader(file).get_record("data.pkl")).load()
        return
    content = file.read()
    position = 0
    for _ in range(_OLD_PICKLES):
        scan = Scan(content, position)
        scan.load()
        position = scan.at


@contextmanager
def _restricted_names(inert: Sequence[str]) -> Iterator[None]:
    """Within the context, allow ``torch.load`` only the names of `_safe_names`, and ``inert``.

    A name of ``inert`` stands for the class `Inert`.
    """
    usual = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*_safe_names(), *((Inert, name) for name in inert)])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(usual)


@functools.cache
def _safe_names() -> list[Any]:
    """Return the classes and functions that ``torch.load`` may use to read a checkpoint safely.

    They extend those that ``weights_only`` always allows. The list is megatron-core's, with two
    kinds of entries replaced:

    - An enumeration is replaced by a function that returns the member of a value. If its class were
      listed, a pickle could set attributes of members, which the whole process shares.
    - numpy's arrays and dtypes are replaced by `PlainArray` and `PlainType`. numpy's own classes
      could be made to use bytes of the file as addresses of objects.
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
    """Return ``value`` unchanged.

    A pickle that names an enumeration which the installed megatron-core lacks calls this function
    instead, so that a member is read as its plain value, such as an integer.
    """
    return value


class PlainType:
    """The replacement for ``numpy.dtype`` in pickles; it accepts only booleans and numbers."""

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
    """The replacement for ``numpy.ndarray`` in pickles; it holds only booleans and numbers.

    Its content must be bytes in the pickle. An array made from raw memory is refused.
    """

    def __new__(cls, *arguments: Any) -> PlainArray:
        raise Refused("it makes an array from raw memory")

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, by_column, content = state
        if type(kind) is not PlainType or type(content) is not bytes:
            raise Refused("it has an array of what are no plain numbers")
        super().__setstate__((version, shape, kind.dtype, by_column, content))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the array as numpy's own class, since ranks that load together exchange arrays."""
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _new_array(kind: Any, shape: Any, code: Any) -> PlainArray:
    """Return an empty array, whatever the arguments: the pickle sets shape, type and data next."""
    array: PlainArray = np.ndarray.__new__(PlainArray, (0,), np.int8)
    return array


class PlainObjectsPlanner(MCoreLoadPlanner):  # type: ignore[misc]
    """megatron-core's load planner, changed so that reading objects runs no code."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = plain_content(value, f"the object `{name}` of the checkpoint")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def holds_common_state(path: Path) -> bool:
    """Return whether a checkpoint has a common state: in ``common.pt``, or among its shards."""
    return (path / COMMON_STATE_FNAME).is_file() or _OBJECT in stored_entries(path)


def common_state_of(path: Path) -> dict[str, Any]:
    """Read the part of a checkpoint that is the same on all ranks, without running code.

    It lies in ``common.pt``, or among the shards if a newer release of megatron-core wrote it.
    """
    place = path / COMMON_STATE_FNAME
    if place.is_file() or not holds_common_state(path):
        content = plain_content(place, place)
    else:
        place = path / _OBJECT
        value = read_object(path, _OBJECT)
        content = value[0] if isinstance(value, list) and value else None
    if not isinstance(content, dict):
        raise CheckpointError(f"{place} must hold names and values; load another checkpoint.")
    return content


def read_object(path: Path, name: str) -> Any:
    """Return the object ``name`` among the shards of a checkpoint, without running code."""
    state: dict[str, Any] = {name: BytesIO()}
    _fill(state, path, MetadataReader(str(path)))
    return state[name]


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
    """Read the values of ``state`` from a checkpoint, in place and without a process group.

    Raise a CheckpointError if that fails.
    """
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
        # torch's message advises to run the code in the file.
        return "it is no plain pickle"
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
