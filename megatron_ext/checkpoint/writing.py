"""Writes the files of a checkpoint; their checksums are computed while they are written.

Each rank writes one file with its shards and names it to rank 0, which writes the files that belong
to no single rank. If one rank cannot write, all ranks raise a CheckpointError.

If a helper process of megatron-core's default writer dies, for example because the disk is full or
psutil is missing, the job hangs. torch's own writer of the same format needs no helpers. It writes
with one thread, since it loses the errors of other threads.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ext import limits
from megatron_ext.checkpoint.files import Files, describe_file, make_durable
from megatron_ext.checkpoint.manifest import MAX_LISTED, write_parts
from megatron_ext.checkpoint.memory import memory_of
from megatron_ext.checkpoint.prepared import BACKEND, VERSION, SavePreparer
from megatron_ext.checkpoint.storage import one_line
from megatron_ext.checkpoint.stored import PROGRESS, RUN_CONFIG
from megatron_ext.checkpoint.summed_file import SummedFile
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.writing import cleared, write_text
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import (
    largest_of_all_ranks,
    on_every_rank,
    on_first_rank,
    to_one_rank,
)

Value = Tensor | bytes | Callable[[], Tensor]
"""A value to write to a checkpoint: a tensor, a function that returns one, or bytes."""
_FORMAT = "metadata.json"


class CheckpointWriter:
    """Writes the checkpoints of a run, and reuses the plan of the last one where it can.

    All ranks call `write` together. What a rank tells rank 0 about its file is the same at each
    save of the same plan, except for the checksums, and is sent only once.

    Args:
        replicas: the groups whose ranks divide the writing of weights that they share. Of more than
            `MAX_LISTED` ranks, the first rank of the first of these groups lists the group's files.
        model: the group of the ranks that hold a whole model together: one rank of each group of
            replicas. If it is None, rank 0 lists the files of all ranks.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        replicas: Sequence[ProcessGroup],
        model: ProcessGroup | None = None,
    ) -> None:
        self._preparer = SavePreparer(config, replicas)
        self._replicas = replicas
        self._model = model
        self._plan: object = None
        self._own: list[WriteResult] | None = None
        self._of_all: list[list[WriteResult]] = []

    def write(
        self,
        state: dict[str, Any],
        folder: Path,
        progress: dict[str, Any],
        run_config: dict[str, Any],
    ) -> tuple[Files, Files]:
        """Write a checkpoint into an empty folder.

        Args:
            state: the sharded and the common state of this rank, in one mapping.
            progress: counters of the run, as values for JSON.
            run_config: the configuration of the run, as sections of plain values.

        Returns:
            (the files for the manifest on rank 0, and none on another rank; the files that this
            rank has written for itself and for its group: shards, and parts of the manifest).

        Raises:
            CheckpointError: on all ranks, if one cannot write.
        """
        prepared = self._preparer.prepare_together(state)
        plan = prepared.plan
        if plan is not self._plan:
            self._plan = plan
            self._own = None
        rank = torch.distributed.get_rank()
        written: list[WriteResult] = []

        def write() -> tuple[list[WriteResult] | None, Files]:
            nonlocal written
            try:
                written, files = write_shards(folder, plan.items, prepared.values)
            except Exception as error:
                why = one_line(error, folder)
            else:
                return None if written == self._own else written, files
            # Without the cause, the sentence is the same on all ranks.
            raise CheckpointError(f"{folder} could not be written by rank {rank}: {why}")

        news, own = on_every_rank(write, "")
        self._own = written
        listed: Files = {}
        if torch.distributed.get_world_size() <= MAX_LISTED or self._model is None:
            told = to_one_rank((news, own), 0)
            listed = _merged([of_rank for _, of_rank in told])
            self._take([of_rank for of_rank, _ in told])
        else:
            parts, listed = self._write_parts(folder, own)
            own = own | parts
            if largest_of_all_ranks([int(news is not None)]) == [1]:
                self._take(to_one_rank(news, 0))

        def finish() -> Files:
            assert plan.metadata is not None
            common = prepared.common, progress, run_config
            return write_common(folder, *common, plan.metadata, self._of_all)

        common_files = on_first_rank(finish, f"{folder} could not be written")
        return listed | common_files if rank == 0 else {}, own

    def _write_parts(self, folder: Path, own: Files) -> tuple[Files, Files]:
        """List the files of each group of replicas in parts of the manifest.

        Return (the parts that this rank has written, the parts of all ranks on rank 0).
        """
        assert self._model is not None
        group = self._replicas[0]
        first = torch.distributed.get_global_rank(group, 0)
        of_group = _merged(to_one_rank(own, first, group))

        def write() -> Files:
            return write_parts(folder, of_group, first) if of_group else {}

        parts = on_every_rank(write, f"{folder} could not be written")
        is_first = torch.distributed.get_rank(group) == 0
        return parts, _merged(to_one_rank(parts, 0, self._model)) if is_first else {}

    def _take(self, news: list[list[WriteResult] | None]) -> None:
        """Keep, on rank 0, what each rank has told about its file; None if that is as before."""
        self._of_all = self._of_all or [[] for _ in news]
        for number, of_rank in enumerate(news):
            if of_rank is not None:
                self._of_all[number] = of_rank


def _merged(parts: Iterable[Files]) -> Files:
    return {name: entry for listed in parts for name, entry in listed.items()}


class DiskWriter(FileSystemWriter):
    """torch's storage writer, with one thread, so that each rank writes one file.

    If the disk is full, or another limit stops a write, it raises a CheckpointError that says so.

    Attributes:
        files: sizes and checksums of the files that it has written.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        # `SummedFile` flushes to the disk; torch would do so before the last write.
        super().__init__(folder, thread_count=1, sync_files=False, **options)
        self._folder = Path(folder)
        self.files: Files = {}
        self.fs = _DescribedFiles(self.files)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of a checkpoint; return torch's record of each written item."""
        with naming_disk(self._folder, bytes_of(plan)), _without_checksums_of_records():
            written = super().write_data(plan, planner)
            written.wait()
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of a checkpoint's tensors."""
        with naming_disk(self._folder):
            super().finish(metadata, results)


@contextmanager
def _without_checksums_of_records() -> Iterator[None]:
    """Within the context, let ``torch.save`` compute no checksum of each tensor's bytes.

    torch never checks these, and the manifest has a checksum of the whole file.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _DescribedFiles(FileSystem):
    """torch's file access for `DiskWriter`; it adds each file that is written to ``files``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        place = Path(path)
        with SummedFile(place) as stream:
            yield cast(io.IOBase, stream)
        entry = stream.checksum.entry()
        size = place.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{place} has {size} bytes, but {entry['bytes']} were written; the file system "
                "lost what was written, so give another `--save`."
            )
        self._files[place.name] = entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._files[Path(new_path).name] = self._files.pop(Path(path).name)


def bytes_of(plan: SavePlan) -> int:
    """Return the size in bytes of the tensors that a rank's save plan of torch lists."""
    described = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(x.chunk.sizes.numel() * x.properties.dtype.itemsize for x in described)


class _ValuePlanner(DefaultSavePlanner):
    """A torch save planner that takes the data of each item from a list instead of a state dict.

    Args:
        values: the value of each item of ``plan``, in the same order.
    """

    def __init__(self, plan: SavePlan, values: Sequence[Value]) -> None:
        super().__init__()
        self._values = dict(zip((item.index for item in plan.items), values, strict=True))
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self._values[write_item.index]
        if write_item.type == WriteItemType.BYTE_IO:
            assert isinstance(value, bytes)
            return io.BytesIO(value)
        assert not isinstance(value, bytes)
        if not isinstance(value, Tensor):
            return self._made(value)
        return compact(value) if value.is_cpu else value

    def _made(self, make: Callable[[], Tensor]) -> Tensor:
        """Return a new tensor, and free the memory of the one before, which has been written.

        torch's writer keeps all tensors until the end.
        """
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = make()
        return self._last


def compact(value: Tensor) -> Tensor:
    """Return a CPU tensor of the same values whose storage holds only these values.

    torch saves the whole storage of a tensor, and ``value`` may be a part of a buffer or snapshot.
    If ``value`` is contiguous, the result shares its memory; otherwise the result is a copy.
    """
    if not value.numel():
        return value.clone()
    data = value.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(data, dtype=value.dtype).view(value.shape)


def write_shards(
    folder: Path, plan: SavePlan, values: Sequence[Value], **options: Any
) -> tuple[list[WriteResult], Files]:
    """Write a rank's file of shards and flush it to the disk, without communication.

    Tensors that are the same memory are written once, and the index names one place for them. For
    example, without data parallelism an fp32 weight is also the weight that the optimizer updates.

    Args:
        plan: the items to write.
        values: the value of each item. A function is called when its tensor is written, and the
            tensor is freed afterwards, so that only one is in memory. It must be a new one.
        options: further options of torch's storage writer.

    Returns:
        (torch's record of each item, the file with its size and checksum).
    """
    first = dict[Any, MetadataIndex]()
    copies = list[tuple[MetadataIndex, MetadataIndex]]()
    kept = list[tuple[WriteItem, Value]]()
    for item, value in zip(plan.items, values, strict=True):
        original = item.index
        if isinstance(value, Tensor) and value.numel():
            original = first.setdefault(memory_of(value), original)
        if original is item.index:
            kept.append((item, value))
        else:
            copies.append((item.index, original))
    plan = replace(plan, items=[item for item, _ in kept])
    writer = DiskWriter(folder, **options)
    planner = _ValuePlanner(plan, [value for _, value in kept])
    written = writer.write_data(plan, planner).value()
    by_index = {result.index: result for result in written}
    written += [replace(by_index[original], index=index) for index, original in copies]
    for result in written:
        place = result.storage_data
        size = writer.files.get(place.relative_path, {"bytes": -1})["bytes"]
        if size < place.offset + place.length:
            raise CheckpointError(
                f"{folder / place.relative_path} is too short for `{result.index.fqn}`; the file "
                "system lost what was written, so give another `--save`."
            )
    return written, writer.files


def write_common(
    folder: Path,
    common: dict[str, Any],
    progress: dict[str, Any],
    run_config: dict[str, Any],
    metadata: Metadata,
    results: list[list[WriteResult]],
) -> Files:
    """Write the files that belong to no single rank; return their sizes and checksums.

    Args:
        common: the state that all ranks share.
        progress: counters of the run.
        run_config: the configuration of the run.
        metadata: the index of all tensors, which is completed with ``results``.
        results: torch's records of the items that each rank has written.
    """
    save_common(common, folder)
    writer = DiskWriter(folder)
    writer.finish(metadata, results)
    with naming_disk(folder):
        save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))
        write_text(folder / RUN_CONFIG, json.dumps(run_config, indent=1))
        write_text(folder / PROGRESS, json.dumps(progress, indent=1))
        files = dict(writer.files)
        for name in (COMMON_STATE_FNAME, _FORMAT, RUN_CONFIG, PROGRESS):
            make_durable(folder / name)
            files[name] = describe_file(folder / name)
    return files


def save_common(common: dict[str, Any], folder: Path) -> None:
    """Write the state that is the same on all ranks to ``common.pt`` in a checkpoint's folder."""
    with naming_disk(folder):
        torch.save(common, cleared(folder / COMMON_STATE_FNAME))


@contextmanager
def naming_disk(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Within the context, turn a write error that a full disk caused into a CheckpointError.

    Errors from other limits, such as a quota, are turned into one, too. torch's own error would not
    mention the disk. The process that writes must use this context: the free space of the disk has
    to be read before a cleanup changes it.

    Args:
        folder: folder that is written to; the error names its disk.
        needed: size of the write in bytes, for the error; None if unknown.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        fault = limits.limit_fault(error, folder, needed)
        if fault is None:
            raise
        raise CheckpointError(fault) from error
