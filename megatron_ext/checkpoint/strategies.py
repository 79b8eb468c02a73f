"""How sharded tensors reach the disk.

megatron-core's default writer forks helper processes and talks to them over queues; when a helper
dies (a full disk, a missing psutil) the job hangs. torch's own writer of the same format needs
none, and reports the failure of one rank on all of them. One thread for each rank: torch loses the
errors of a second one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

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


def save_strategy(backend: str, group: ProcessGroup, *, fully_parallel: bool) -> Any:
    """The writer; with ``fully_parallel`` the replicas share the work."""
    strategy = InProcessSaveStrategy(backend, VERSION)
    return FullyParallelSaveStrategyWrapper(strategy, group) if fully_parallel else strategy


def load_strategy(backend: str, group: ProcessGroup, *, fully_parallel: bool) -> Any:
    """The reader; with ``fully_parallel`` the replicas share the work."""
    strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, backend, VERSION)
    return FullyParallelLoadStrategyWrapper(strategy, group) if fully_parallel else strategy
