"""How sharded tensors reach the disk.

megatron-core's default writer forks helper processes and talks to them over queues; when a helper
dies (a full disk, a missing psutil) the job hangs. torch's own writer of the same format needs
none, and reports the failure of one rank on all of them. One thread for each rank: torch loses the
errors of a second one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from megatron_ext.checkpoint.unpickling import MetadataReader, PlainObjectsPlanner

BACKEND, VERSION = "torch_dist", 1


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's ``torch_dist`` format, written by torch's FileSystemWriter."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards; all ranks call this together.

        Raises:
            CheckpointException: on every rank, when one of them could not write.
        """
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
            ),
        )


class PlainLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """megatron-core's reader of ``torch_dist``, by a reader and a plan that run no code of a file.

    megatron-core makes both by itself; besides that, `load` does what its own does.
    """

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        """Fill a sharded state; all ranks call this together.

        Raises:
            CheckpointException: on every rank, when one of them could not read.
        """
        tensors = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(renamed, True)
        reader = MetadataReader(str(checkpoint_dir))
        planner = PlainObjectsPlanner(
            shapes_validation_sharded_tensors=[x for x in tensors if not x.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                x.key: x for x in tensors if x.allow_shape_mismatch
            },
        )
        load_state_dict(state, reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        whole = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: StateDict = _replace_sharded_keys_with_state_dict_keys(whole, flat, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: Path, metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Describe the stored tensors."""
        known = metadata or MetadataReader(str(checkpoint_dir)).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, known)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> ShardedStateDict:
        """Describe the stored tensors and objects."""
        metadata = MetadataReader(str(checkpoint_dir)).read_metadata()
        objects = (
            ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        )
        found = {entry.unique_key: entry for entry in objects}
        return {**found, **self.load_tensors_metadata(checkpoint_dir, metadata)}


def save_strategy(backend: str, group: ProcessGroup, *, fully_parallel: bool) -> Any:
    """The writer; with ``fully_parallel`` the replicas share the work."""
    strategy = InProcessSaveStrategy(backend, VERSION)
    return FullyParallelSaveStrategyWrapper(strategy, group) if fully_parallel else strategy


def load_strategy(group: ProcessGroup, *, fully_parallel: bool) -> Any:
    """The reader; with ``fully_parallel`` the replicas share the work."""
    strategy = PlainLoadStrategy()
    return FullyParallelLoadStrategyWrapper(strategy, group) if fully_parallel else strategy
