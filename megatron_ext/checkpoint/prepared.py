"""Plans what each rank writes of a checkpoint, so that other processes can do the writing.

A plan needs communication: ranks check that their shards form whole tensors, and choose which of
them writes a shard that several hold; rank 0 makes the index of the checkpoint. The plan is reused
as long as the structure of every rank's state stays the same; each rank checks its own without
communication.

No rank but rank 0 gets to know the shards of all ranks: with thousands of ranks that would be
gigabytes at each of them.
"""

from __future__ import annotations

import heapq
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as core
from megatron.core.dist_checkpointing.validation import (
    validate_sharding_integrity,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ext.checkpoint.storage import check_whole, one_line
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import largest_of_all_ranks
from megatron_ext.parallel.context import ParallelContext

BACKEND, VERSION = "torch_dist", 1
"""megatron-core's name and version of the format of checkpoints."""
Place = tuple[str, tuple[int, ...]]
"""A key that is the same for the same shard on all ranks, and different for others: the name of its
tensor, and its first index in it."""


@dataclass(frozen=True)
class RankPlan:
    """The part of one rank in every save of the same structure.

    Attributes:
        items: torch's plan of this rank's file.
        metadata: the index of all tensors on rank 0; None on other ranks.
    """

    items: SavePlan
    metadata: Metadata | None

    @cached_property
    def pickled(self) -> bytes:
        """Return the pickled pair of the two attributes."""
        return pickle.dumps((self.items, self.metadata))


@dataclass(frozen=True)
class PreparedSave:
    """The part of a checkpoint that one rank writes.

    Attributes:
        plan: what this rank writes.
        values: the value of each item of the plan: a tensor, or bytes.
        common: the common state on rank 0; empty on other ranks.
    """

    plan: RankPlan
    values: list[Tensor | bytes]
    common: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(value.nbytes for value in self.values if isinstance(value, Tensor))


class SavePreparer:
    """Plans what this rank writes of each checkpoint, and reuses the plan where it can.

    With ``--ckpt-fully-parallel-save``, the ranks of each group of ``replicas``, which hold the
    same weights (`replica_groups`), each write a part of them; otherwise one of them writes all.
    """

    def __init__(self, config: CheckpointConfig, replicas: Sequence[ProcessGroup]) -> None:
        self._config = config
        self._replicas = replicas
        self._structure: list[Any] | None = None
        self._places: list[tuple[int, tuple[int, ...] | None]] = []
        self._plan: RankPlan | None = None

    def prepare_alike(self, state: dict[str, Any]) -> PreparedSave | None:
        """Return this rank's part of a checkpoint by the previous plan, without communication.

        The result is None if the structure of ``state`` differs from the planned one; then call
        `prepare`. Tensor factories in ``state`` are replaced by the sharded tensors that they make.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        entries = list(nested_values(sharded))
        if [_structure_of(entry) for entry in entries] != self._structure:
            return None
        return self._with_values(entries, common)

    def prepare_together(self, state: dict[str, Any]) -> PreparedSave:
        """Return this rank's part of a checkpoint, by the previous plan if all ranks can use it.

        All ranks call this together. Errors are those of `prepare`.
        """
        prepared = self.prepare_alike(state)
        (any_differs,) = largest_of_all_ranks([int(prepared is None)])
        if any_differs:
            prepared = self.prepare(state)
        assert prepared is not None
        return prepared

    def prepare(self, state: dict[str, Any]) -> PreparedSave:
        """Plan a checkpoint of ``state``; return this rank's part. All ranks call this together.

        Raises:
            CheckpointError: on all ranks, if the state of one cannot be saved.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        entries = list(nested_values(sharded))
        structure = [_structure_of(entry) for entry in entries]
        self._decide(sharded, common, entries)
        self._structure = structure
        return self._with_values(entries, common)

    def _with_values(self, entries: list[Any], common: dict[str, Any]) -> PreparedSave:
        assert self._plan is not None
        values = [_value_of(entries[number], size) for number, size in self._places]
        is_first = torch.distributed.get_rank() == 0
        return PreparedSave(self._plan, values, common if is_first else {})

    def _decide(
        self, sharded: ShardedStateDict, common: dict[str, Any], entries: list[Any]
    ) -> None:
        self._structure = None
        # Warn of common state that differs between ranks.
        validate_sharding_integrity([], common_state_dict=common)
        recorder = _PlanRecorder()
        try:
            check_whole(entries)
            if self._config.ckpt_fully_parallel_save:
                share_writing(entries, self._replicas)
            _PlanningStrategy(recorder).save(sharded, Path())
        except (CheckpointException, CheckpointingException) as error:
            raise CheckpointError(f"no plan can be made: {one_line(error)}") from error
        numbers = {
            _index_of(entry): number
            for number, entry in enumerate(entries)
            if is_main_replica(entry.replica_id)
        }
        self._places = []
        for item in recorder.plan.items:
            offset = item.index.offset
            data = item.tensor_data
            number = numbers[item.index.fqn, None if offset is None else tuple(offset)]
            self._places.append((number, None if data is None else tuple(data.chunk.sizes)))
        self._plan = RankPlan(recorder.plan, recorder.metadata)


class _PlanningStrategy(core.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Plans a save in megatron-core's ``torch_dist`` format; ``recorder`` gets the plan."""

    def __init__(self, recorder: _PlanRecorder) -> None:
        super().__init__(BACKEND, VERSION)
        self._recorder = recorder

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Plan what each rank writes; if a rank fails, all raise a CheckpointException."""
        renamed, _, _ = core._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state(
            core.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=self._recorder,
            planner=core.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def replica_groups(context: ParallelContext) -> list[ProcessGroup]:
    """Return this rank's groups of ranks with the same dense weights, and with the same experts."""
    groups = [context.pgs.dp_cp, getattr(context.pgs, "expt_dp", None)]
    ranks = [[] if x is None else torch.distributed.get_process_group_ranks(x) for x in groups]
    return groups[: 1 if ranks[1] in ([], ranks[0]) else 2]


def share_writing(entries: Iterable[Any], groups: Sequence[ProcessGroup]) -> None:
    """Divide the writing of the shards that all ranks of a group hold among these ranks.

    The main replica of each shard, which is the one that is written, changes in place. All ranks
    of each group call this together. The first rank of a group tells which shards it would write;
    those that all ranks hold are dealt out, the largest first, each to the rank with the fewest
    bytes so far. Each rank does this for itself. megatron-core, in contrast, sends the shards of
    every rank to every rank.
    """
    own = by_place(entries)
    for group in groups:
        main = [
            key for key, held in own.items() if any(is_main_replica(x.replica_id) for x in held)
        ]
        rank = torch.distributed.get_rank(group)
        for key, writer in deal(own, main, group).items():
            for number, entry in enumerate(own.pop(key)):
                entry.replica_id = int(writer != rank or number > 0)


def by_place(entries: Iterable[Any]) -> dict[Place, list[ShardedTensor]]:
    """Return the sharded tensors among ``entries`` by their places.

    The two ends of a pipeline in a V shape are on one rank, which holds a tied embedding twice.
    """
    own = defaultdict[Place, list[ShardedTensor]](list)
    for entry in entries:
        if isinstance(entry, ShardedTensor):
            own[entry.key, tuple(entry.global_offset)].append(entry)
    return own


def deal(
    own: Mapping[Place, Sequence[ShardedTensor]], keys: Iterable[Place], group: ProcessGroup
) -> dict[Place, int]:
    """Deal out shards that all ranks of a group hold among these ranks; all call this together.

    Args:
        own: the shards of this rank.
        keys: the places to deal out, of which only those of the first rank matter.

    Returns:
        The rank in the group for each place, in the same order on all ranks.
    """
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return {}
    told = [{key: _bytes_of(own[key][0]) for key in keys}]
    torch.distributed.broadcast_object_list(told, group_src=0, group=group)
    ordered = sorted(told[0], key=lambda key: (-told[0][key], key))
    lacking = largest_of_all_ranks([0, *(int(key not in own) for key in ordered)], group)[1:]
    loads = [(0, rank) for rank in range(size)]
    dealt = dict[Place, int]()
    for key, is_lacking in zip(ordered, lacking, strict=True):
        if not is_lacking:
            load, dealt[key] = heapq.heappop(loads)
            heapq.heappush(loads, (load + told[0][key], dealt[key]))
    return dealt


def _bytes_of(entry: ShardedTensor) -> int:
    return int(math.prod(entry.local_shape) * entry.dtype.itemsize)


class _PlanRecorder(FileSystemWriter):
    """A torch storage writer that writes nothing, but keeps this rank's plan and rank 0's index.

    ``metadata`` is the index; it stays None on other ranks.
    """

    def __init__(self) -> None:
        super().__init__(Path())
        self.plan = SavePlan([])
        self.metadata: Metadata | None = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.plan = plan
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata


def _structure_of(entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, ShardedObject):
        return entry.unique_key, entry.replica_id
    assert isinstance(entry, ShardedTensor)
    own = entry.local_shape, entry.global_shape, entry.global_offset, entry.dtype
    return entry.key, entry.replica_id, *own


def _index_of(entry: Any) -> tuple[str, tuple[int, ...] | None]:
    if isinstance(entry, ShardedObject):
        return entry.unique_key, None
    return entry.key, tuple(entry.global_offset)


def _value_of(entry: Any, size: Iterable[int] | None) -> Tensor | bytes:
    """Return the data to write for one entry of a sharded state.

    Args:
        entry: a sharded tensor or a sharded object.
        size: shape in which to write a tensor; None for an object, which is pickled to bytes.
    """
    if size is None:
        return _NOTHING if entry.data is None else _stored(entry.data)
    data: Tensor = entry.data.detach()
    assert data.numel() == math.prod(size)
    return data.reshape(tuple(size))


def _stored(value: Any) -> bytes:
    """Return an object as megatron-core stores it: pickled, in a list of one element."""
    file = io.BytesIO()
    torch.save([value], file)
    return file.getvalue()


_NOTHING = _stored(None)
"""The stored bytes of a layer's ``_extra_state`` if it is None, as it is for most layers."""
