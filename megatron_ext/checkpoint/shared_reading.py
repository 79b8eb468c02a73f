"""Divides the reading of weights among the ranks that hold the same ones.

Each reads a part and sends it to the others, so that a file system delivers every byte once instead
of once a replica. megatron-core, in contrast, lets every rank know the shards of all replicas, and
sends objects such as random states from every rank to every rank of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from torch.distributed import ProcessGroup

from megatron_ext.checkpoint.prepared import by_place, deal, replica_groups
from megatron_ext.checkpoint.storage import PlainLoadStrategy
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.parallel.context import ParallelContext


def strategy_of(config: CheckpointConfig, context: ParallelContext) -> PlainLoadStrategy:
    """Return what reads the state of a run: with ``--ckpt-fully-parallel-load`` shared."""
    shared = config.ckpt_fully_parallel_load
    return SharedLoadStrategy(replica_groups(context)) if shared else PlainLoadStrategy()


class SharedLoadStrategy(PlainLoadStrategy):
    """Loads like `PlainLoadStrategy`, and shares the reading of weights in groups of ranks.

    Args:
        groups: this rank's groups of ranks with the same weights (`prepared.replica_groups`).
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        super().__init__()
        self._groups = groups

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *async_strategy: str
    ) -> StateDict:
        """Load a sharded state's values; if a rank fails, all raise its error."""
        entries = {id(entry): entry for entry in nested_values(sharded_state_dict)}
        own = by_place(entries.values())
        shared = list[tuple[ProcessGroup, int, list[ShardedTensor]]]()
        for group in self._groups:
            for place, reader in deal(own, own, group).items():
                shared.append((group, reader, own.pop(place)))
        received = set[int]()
        for group, reader, held in shared:
            is_reader = torch.distributed.get_rank(group) == reader
            received |= {id(entry) for entry in held[int(is_reader) :]}
        read = [entry for key, entry in entries.items() if key not in received]
        values = super().load(dict(enumerate(read)), checkpoint_dir, *async_strategy)
        loaded = {id(entry): values[number] for number, entry in enumerate(read)}
        for group, reader, held in shared:
            source = loaded.get(id(held[0]))
            if source is None:
                source = _target(held[0])
            sent = source.contiguous()
            torch.distributed.broadcast(sent, group_src=reader, group=group)
            for entry in held:
                target = loaded.setdefault(id(entry), _target(entry))
                if target is not sent:
                    target.copy_(sent)
        result: StateDict = dict_list_map_outplace(lambda x: loaded[id(x)], sharded_state_dict)
        return result


def _target(entry: ShardedTensor) -> Any:
    """Return the tensor that a sharded tensor's values are to be read into."""
    if entry.data is None:
        entry.init_data("cpu")
    return entry.data.detach()
