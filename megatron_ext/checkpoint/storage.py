"""Verifies and reads the sharded state of a checkpoint; no rank waits for a failed one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as core
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

from megatron_ext import limits
from megatron_ext.checkpoint.files import Files
from megatron_ext.checkpoint.manifest import is_part, read_part, read_root
from megatron_ext.checkpoint.memory import fills
from megatron_ext.checkpoint.optimizer_state import drop_main_weights
from megatron_ext.checkpoint.stored import CheckpointRef, check_listed
from megatron_ext.checkpoint.unpickling import (
    COMMON_STATE,
    MetadataReader,
    PlainObjectsPlanner,
    common_state_of,
)
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import (
    on_every_rank,
    on_first_rank,
    raise_together,
    sum_of_all_ranks,
    union_of_all_ranks,
)
from megatron_ext.parallel.context import ParallelContext, contact_fault


def check_whole(entries: Sequence[ShardedTensor | ShardedObject]) -> None:
    """Check that the main replicas of all ranks' shards form whole tensors; all call this together.

    ``entries`` are this rank's shards. Each rank sends one number, see `_excess_of`. If the numbers
    of all ranks do not add up to zero, megatron-core's own check, for which every rank receives the
    shards of all, decides and names the tensor.

    Raises:
        CheckpointingException: on all ranks, if the shards do not form whole tensors.
    """
    if not sum_of_all_ranks(sum(map(_excess_of, entries))):
        return
    # megatron-core raises the error on rank 0 only.
    fault: Exception | None = None
    try:
        validate_sharding_integrity(determine_global_metadata(dict(enumerate(entries)))[1])
    except Exception as error:
        fault = error
    raise_together(fault)


def _excess_of(entry: ShardedTensor | ShardedObject) -> int:
    """Return a number that adds up to zero over all shards of a whole tensor.

    It is the sum of the weights of the shard's elements. The first shard of a tensor subtracts the
    sum for the whole tensor. Weights depend on the tensor's name and on the element's position, so
    that a shard that is there twice does not make up for a missing one.
    """
    if not is_main_replica(entry.replica_id):
        return 0
    digest = hashlib.blake2b(entry.key.encode(), digest_size=8).digest()
    weight = int.from_bytes(digest, "big")
    offset = entry.global_offset
    shape = tuple(entry.local_shape) if isinstance(entry, ShardedTensor) else ()
    shape = (1,) * (len(offset) - len(shape)) + shape
    excess: int = _weight_of(offset, shape, weight)
    if not any(offset):
        excess -= _weight_of(offset, entry.global_shape, weight)
    return excess


def _weight_of(offset: Sequence[int], shape: Sequence[int], weight: int) -> int:
    """Return the sum, over a box's positions x, of the product over dimensions of ``weight`` + x.

    ``offset`` is the first position in the box, and ``shape`` its size in each dimension.
    """
    total = weight
    for start, size in zip(offset, shape, strict=True):
        total *= size * weight + size * (2 * start + size - 1) // 2
    return total


class PlainLoadStrategy(core.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """megatron-core's reader of ``torch_dist``, changed so that no code in a file can run.

    `load` does what megatron-core's does, but with `MetadataReader` and `PlainObjectsPlanner`.
    """

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *_async_strategy: str
    ) -> StateDict:
        """Load a sharded state's values; if a rank fails, all raise its error."""
        tensors = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
        renamed, flat, names = core._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = core.mcore_to_pyt_state_dict(renamed, True)
        reader = MetadataReader(str(checkpoint_dir))
        mismatched = {x.key: x for x in tensors if x.allow_shape_mismatch}
        planner = PlainObjectsPlanner(
            shapes_validation_sharded_tensors=[x for x in tensors if not x.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=mismatched,
        )
        # A rank reads what it needs by a plan of its own, since torch does not change these plans.
        fault: BaseException | None = None
        try:
            load_state_dict(state, reader, planner=planner, no_dist=True)
        # torch's exception derives from BaseException.
        except (Exception, CheckpointException) as error:
            fault = error
        raise_together(fault)
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


def verify(checkpoint: CheckpointRef, context: ParallelContext) -> None:
    """Raise a CheckpointError on all ranks if a file fails its checksum.

    Rank 0 reads the manifest, and each rank checks a share of the files, for which it reads few of
    the manifest's parts. All ranks call this together.
    """
    path = checkpoint.path
    what = f"{path} cannot be read"
    root: Files = on_first_rank(lambda: read_root(path) or {}, what)
    rank = context.rank
    size = context.layout.world_size
    on_every_rank(lambda: _check_share(checkpoint, root, rank, size), what)


def _check_share(checkpoint: CheckpointRef, root: Files, rank: int, world_size: int) -> None:
    """Raise a CheckpointError if a file in the share of a rank fails its checksum.

    The ranks deal out the parts of the manifest ``root``, so that several ranks may share a part,
    or a rank has several.
    """
    whole = {name: entry for name, entry in root.items() if not is_part(entry)}
    check_listed(checkpoint, whole, _share(whole, rank, world_size))
    parts = sorted(name for name, entry in root.items() if is_part(entry))
    if not parts:
        return
    dealt = min(len(parts), world_size)
    sharers = range(rank % dealt, world_size, dealt)
    for name in parts[sharers[0] :: dealt]:
        check_listed(checkpoint, root, [name])
        listed = read_part(checkpoint.path, name, root[name])
        check_listed(checkpoint, listed, _share(listed, sharers.index(rank), len(sharers)))


def _share(listed: Files, index: int, size: int) -> list[str]:
    """Return the names of one of ``size`` shares of files, of about the same bytes."""
    largest_first = sorted(listed, key=lambda name: (-listed[name]["bytes"], name))
    return largest_first[index::size]


def _load_state(
    state: dict[str, Any],
    path: Path,
    strategy: PlainLoadStrategy,
    strict: StrictHandling,
    context: ParallelContext,
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Load all state like `dist_checkpointing.load`, without running code that files contain.

    This works with every supported release of megatron-core.

    Args:
        state: the sharded state to fill.
        path: folder of the checkpoint.
        strategy: reads the sharded state.
        strict: how to treat names that only the checkpoint or only the run has.

    Returns:
        (the filled state, names only in the checkpoint, names only in the run).
    """
    force_all_tensors_to_non_fp8(state)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = partial(_merged, entry.data, entry.merge_fn)
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
    entries = list(nested_values(requested))
    check_whole(entries)
    of_all: Any = None
    if StrictHandling.requires_global_app_metadata(strict):
        keys = union_of_all_ranks({entry.key for entry in entries}, context)
        of_all = [[SimpleNamespace(key=key) for key in keys]]
    requested, missing, unexpected = validate_integrity_and_strict_load(
        requested, strict, False, global_metadata=of_all, ckpt_sharded_metadata=stored
    )
    merge(loaded, strategy.load(requested, path))
    return apply_factory_merges(loaded, factories), missing, unexpected


def _merged(whole: Any, merge_parts: Callable[[Any], Any], parts: Any) -> Any:
    """Return what a factory of sharded tensors makes of its loaded ``parts``.

    If they are views that fill the tensor ``whole``, from which the factory made them, return it.
    Otherwise ``merge_parts`` merges copies.
    """
    if isinstance(whole, Tensor) and isinstance(parts, list) and fills(parts, whole):
        return whole
    return merge_parts(parts)


def read_state(
    path: Path,
    state: dict[str, Any],
    strategy: PlainLoadStrategy,
    config: CheckpointConfig,
    context: ParallelContext,
    notes: list[str],
) -> dict[str, Any]:
    """Read a sharded state's values and the common state; all ranks call this together.

    Depending on ``--dist-ckpt-strictness``, append to ``notes`` sentences on the entries that only
    the checkpoint or only the run has.
    """
    raises = config.dist_ckpt_strictness == "raise_all"
    strict = StrictHandling("return_all" if raises else config.dist_ckpt_strictness)
    try:
        loaded, missing, unexpected = _load_state(state, path, strategy, strict, context)
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
            on_every_rank(refuse, f"{path} cannot be loaded")
        notes += [f"{text}." for text in differ]
    return dict(loaded)
