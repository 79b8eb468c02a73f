"""Plans what each rank writes of a checkpoint, so that other processes can do the writing.

A plan needs communication: ranks check that their shards form whole tensors, and choose which of
them writes a shard that several hold; rank 0 makes the index of the checkpoint. The plan is reused
as long as the structure of every rank's state stays the same; each rank checks its own without
communication.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ext.checkpoint.storage import one_line, save_strategy
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError


@dataclass(frozen=True)
class PreparedSave:
    """The part of a checkpoint that one rank writes.

    Attributes:
        plan: the pickled pair (torch's plan of this rank's file; on rank 0 the index of all files,
            else None).
        values: the value of each item of the plan: a tensor, or bytes.
        common: the common state on rank 0; empty on other ranks.
    """

    plan: bytes
    values: list[Tensor | bytes]
    common: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(value.nbytes for value in self.values if isinstance(value, Tensor))


class SavePreparer:
    """Plans what this rank writes of each checkpoint, and reuses the plan where it can.

    ``replicas`` is the group whose ranks divide the writing of weights that they share.
    """

    def __init__(self, config: CheckpointConfig, replicas: ProcessGroup) -> None:
        self._config = config
        self._replicas = replicas
        self._structure: list[Any] | None = None
        self._places: list[tuple[int, tuple[int, ...] | None]] = []
        self._plan = b""

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
        values = [_value_of(entries[number], size) for number, size in self._places]
        is_first = torch.distributed.get_rank() == 0
        return PreparedSave(self._plan, values, common if is_first else {})

    def _decide(
        self, sharded: ShardedStateDict, common: dict[str, Any], entries: list[Any]
    ) -> None:
        self._structure = None
        validate_sharding_integrity(determine_global_metadata(sharded)[1], common_state_dict=common)
        recorder = _PlanRecorder()
        strategy = save_strategy(self._config, self._replicas, lambda _: recorder)
        try:
            strategy.save(sharded, Path())
        except CheckpointException as error:
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
        self._plan = pickle.dumps((recorder.plan, recorder.metadata))


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
