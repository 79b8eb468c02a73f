"""Writes, verifies and reads the sharded state of a checkpoint; no rank waits for a failed one.

If a helper process of megatron-core's default writer dies, for example because the disk is full or
psutil is missing, the job hangs. torch's own writer of the same format needs no helpers, and
reports the failure of one rank on all ranks; this module turns the report into a CheckpointError.
Each rank writes with one thread, since torch loses the errors of other threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as core
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron_ext import limits
from megatron_ext.checkpoint.files import Files, describe_file, make_durable
from megatron_ext.checkpoint.optimizer_state import drop_main_weights
from megatron_ext.checkpoint.stored import PROGRESS, RUN_CONFIG, CheckpointRef, check_files
from megatron_ext.checkpoint.unpickling import (
    COMMON_STATE,
    MetadataReader,
    PlainObjectsPlanner,
    common_state_of,
)
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.writing import cleared, write_text
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import gather_or_raise, on_first_rank
from megatron_ext.parallel.context import ParallelContext, contact_fault

BACKEND, VERSION = "torch_dist", 1


class DiskWriter(FileSystemWriter):
    """torch's storage writer, with one thread, so that each rank writes one file.

    If the disk is full, or another limit stops a write, it raises a CheckpointError that says so.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, thread_count=1, sync_files=True, **options)
        self._folder = Path(folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of a checkpoint; return torch's record of each written item."""
        with naming_disk(self._folder, bytes_of(plan)):
            written = super().write_data(plan, planner)
            written.wait()
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of a checkpoint's tensors."""
        with naming_disk(self._folder):
            super().finish(metadata, results)


def bytes_of(plan: SavePlan) -> int:
    """Return the size in bytes of the tensors that a rank's save plan of torch lists."""
    described = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(x.chunk.sizes.numel() * x.properties.dtype.itemsize for x in described)


def file_writer(folder: str | Path) -> FileSystemWriter:
    """Return torch's storage writer for a checkpoint folder, which writes one file per rank."""
    return DiskWriter(folder)


class InProcessSaveStrategy(core.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves in megatron-core's ``torch_dist`` format without starting helper processes.

    Args:
        writer: takes the folder of a checkpoint, and returns the torch storage writer for it.
    """

    def __init__(self, writer: Callable[[str | Path], StorageWriter]) -> None:
        super().__init__(BACKEND, VERSION)
        self._writer = writer

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards; if a rank fails, all raise a CheckpointException."""
        renamed, _, _ = core._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state(
            core.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=self._writer(checkpoint_dir),
            planner=core.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


class PlainLoadStrategy(core.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """megatron-core's reader of ``torch_dist``, changed so that no code in a file can run.

    `load` does what megatron-core's does, but with `MetadataReader` and `PlainObjectsPlanner`.
    """

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *_async_strategy: str
    ) -> StateDict:
        """Load a sharded state's values; if a rank fails, all raise a CheckpointException."""
        tensors = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
        renamed, flat, names = core._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = core.mcore_to_pyt_state_dict(renamed, True)
        reader = MetadataReader(str(checkpoint_dir))
        mismatched = {x.key: x for x in tensors if x.allow_shape_mismatch}
        planner = PlainObjectsPlanner(
            shapes_validation_sharded_tensors=[x for x in tensors if not x.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=mismatched,
        )
        load_state_dict(state, reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        whole = {key: core._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: StateDict = core._replace_sharded_keys_with_state_dict_keys(whole, flat, names)
        core._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: Path, metadata: Metadata | None = None
    ) -> ShardedStateDict:
        index = metadata or MetadataReader(str(checkpoint_dir)).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, index)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> ShardedStateDict:
        metadata = MetadataReader(str(checkpoint_dir)).read_metadata()
        objects = (
            ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        )
        entries = {entry.unique_key: entry for entry in objects}
        return {**entries, **self.load_tensors_metadata(checkpoint_dir, metadata)}


def save_strategy(
    config: CheckpointConfig,
    replicas: ProcessGroup,
    writer: Callable[[str | Path], StorageWriter] = file_writer,
) -> Any:
    """Return megatron-core's strategy for saving sharded state.

    With ``--ckpt-fully-parallel-save``, the ranks of the process group ``replicas``, which hold
    the same weights, each write a part of them; otherwise one of them writes all. ``writer`` is
    the argument of `InProcessSaveStrategy`.
    """
    strategy = InProcessSaveStrategy(writer)
    shared = config.ckpt_fully_parallel_save
    return FullyParallelSaveStrategyWrapper(strategy, replicas) if shared else strategy


def write_state(state: dict[str, Any], folder: Path, strategy: Any) -> None:
    """Write sharded and common state in the format of `dist_checkpointing.save`.

    megatron-core's function may fail on rank 0 alone. Here all ranks raise a CheckpointError if one
    cannot write.
    """
    sharded, common = save_preprocess(state)
    on_first_rank(lambda: save_common(common, folder), COMMON_STATE_FNAME)
    try:
        strategy.save(sharded, folder)
    except CheckpointException as error:
        rank = first_failure(error)[0]
        why = one_line(error)
        raise CheckpointError(f"{folder} could not be written by rank {rank}: {why}") from error
    on_first_rank(lambda: write_format(folder), "config")


def save_common(common: dict[str, Any], folder: Path) -> None:
    """Write the state that is the same on all ranks to ``common.pt`` in a checkpoint's folder."""
    with naming_disk(folder):
        torch.save(common, cleared(folder / COMMON_STATE_FNAME))


def write_format(folder: Path) -> None:
    """Write the file that names the format, which megatron-core reads first."""
    save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))


def describe_written(folder: Path, progress: dict[str, Any], run_config: dict[str, Any]) -> Files:
    """Write the run's counters and configuration as JSON; return size and checksum of every file.

    Each rank reads back the files that it wrote. If a file is too short or cannot be read, all
    ranks raise a CheckpointError.
    """
    rank = torch.distributed.get_rank()

    def describe() -> Files:
        common = describe_common(folder, progress, run_config) if rank == 0 else {}
        return {**describe_shards(folder, rank), **common}

    what = f"{folder} cannot be read back"
    parts = gather_or_raise(describe, what)
    files = {name: entry for part in parts for name, entry in part.items()}
    on_first_rank(lambda: check_index(folder, files), what)
    return files


def describe_shards(folder: Path, rank: int) -> Files:
    """Flush a rank's files to the disk, read them back, and return sizes and checksums."""
    with naming_disk(folder):
        return _read_back(sorted(folder.glob(f"__{rank}_*")))


def describe_common(folder: Path, progress: dict[str, Any], run_config: dict[str, Any]) -> Files:
    """Write the run's counters and configuration; return size and checksum of the common files.

    Common files belong to no single rank. They are flushed to the disk and read back.
    """
    with naming_disk(folder):
        write_text(folder / RUN_CONFIG, json.dumps(run_config, indent=1))
        write_text(folder / PROGRESS, json.dumps(progress, indent=1))
        return _read_back([path for path in folder.iterdir() if not path.name.startswith("__")])


def _read_back(paths: list[Path]) -> Files:
    for path in paths:
        make_durable(path)
    return {path.name: describe_file(path) for path in paths}


def check_index(folder: Path, files: Files) -> None:
    """Raise a CheckpointError if a file is too short for the tensors that `.metadata` lists in it.

    ``files`` gives the sizes of the files.
    """
    metadata = MetadataReader(str(folder)).read_metadata()
    for index, place in metadata.storage_data.items():
        size = files.get(place.relative_path, {"bytes": -1})["bytes"]
        if size < place.offset + place.length:
            raise CheckpointError(
                f"{folder / place.relative_path} is too short for `{index.fqn}`; the file system "
                "lost what was written, so give another `--save`."
            )


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the lowest rank that failed in a collective read or write, and its error."""
    if not error.failures:
        return 0, error
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def one_line(error: BaseException, folder: Path | None = None) -> str:
    """Return a one-line description of an error.

    If a full disk or another limit of the machine caused it, describe that limit; otherwise return
    the first line of the message. ``folder`` is where the write failed.
    """
    if isinstance(error, CheckpointException):
        error = first_failure(error)[1]
    fault = limits.limit_fault(error, folder)
    lines = (fault or str(error)).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")


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


def verify(checkpoint: CheckpointRef, context: ParallelContext) -> None:
    """Raise a CheckpointError on all ranks if a file fails its checksum.

    Each rank checks a part of the files. All ranks call this together.
    """

    def own(files: Files) -> list[str]:
        largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        return largest_first[context.rank :: context.layout.world_size]

    gather_or_raise(lambda: check_files(checkpoint, own), f"{checkpoint.path} cannot be read")


def _load_state(
    state: dict[str, Any], path: Path, strategy: Any, strict: StrictHandling
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Load all state like `dist_checkpointing.load`, without running code that files contain.

    This works with every supported release of megatron-core.

    Args:
        state: the sharded state to fill.
        path: folder of the checkpoint.
        strategy: megatron-core's strategy for loading sharded state.
        strict: how to treat names that only the checkpoint or only the run has.

    Returns:
        (the filled state, names only in the checkpoint, names only in the run).
    """
    force_all_tensors_to_non_fp8(state)
    requested, own, factories = load_preprocess(state)
    loaded = common_state_of(path)
    # megatron-core saves an empty entry for each fp32 weight that belongs to no parameter.
    drop_main_weights(loaded.get("optimizer", {}))
    merge(loaded, own)
    requested, _ = extract_sharded_base(requested)
    stored = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        entries = strategy.load_sharded_metadata(path)
        stored = {name: entry for name, entry in entries.items() if entry.key != COMMON_STATE}
    requested, missing, unexpected = validate_integrity_and_strict_load(
        requested, strict, True, *determine_global_metadata(requested), stored
    )
    merge(loaded, strategy.load(requested, path))
    return apply_factory_merges(loaded, factories), missing, unexpected


def read_state(
    path: Path,
    state: dict[str, Any],
    config: CheckpointConfig,
    context: ParallelContext,
    notes: list[str],
) -> dict[str, Any]:
    """Read a sharded state's values and the common state; all ranks call this together.

    Depending on ``--dist-ckpt-strictness``, append to ``notes`` sentences on the entries that only
    the checkpoint or only the run has.
    """
    strategy: Any = PlainLoadStrategy()
    if config.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, context.pgs.dp_cp)
    raises = config.dist_ckpt_strictness == "raise_all"
    strict = StrictHandling("return_all" if raises else config.dist_ckpt_strictness)
    try:
        loaded, missing, unexpected = _load_state(state, path, strategy, strict)
    # torch's exception of a collective read derives from BaseException.
    except (Exception, CheckpointException) as error:
        if contact_fault(error) is not None:
            raise
        cause = first_failure(error)[1] if isinstance(error, CheckpointException) else error
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{path} cannot be loaded: {cause}") from None
        raise CheckpointError(
            f"{path} does not fit this run: {one_line(error)}; give the flags that it was "
            "saved with, or `--no-load-optim` where only the optimizer differs."
        ) from error
    if StrictHandling.requires_returning_mismatch_keys(strict):
        # A note already says that random states of another layout are not loaded.
        missing = {key for key in missing if not key.startswith("rng_state")}
        named = {"not wanted by the run": missing, "not in it": unexpected}
        of_path = {kind: sorted(keys) for kind, keys in named.items() if keys}
        differ = [f"Of {path} these names are {kind}: {keys}" for kind, keys in of_path.items()]

        def refuse() -> None:
            if differ:
                raise CheckpointError(
                    f"{differ[0]}; give the flags that it was saved with, or another "
                    "`--dist-ckpt-strictness` than raise_all."
                )

        if raises:
            gather_or_raise(refuse, f"{path} cannot be loaded")
        notes += [f"{text}." for text in differ]
    return dict(loaded)
