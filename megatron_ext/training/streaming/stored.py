"""Critic and sequence in the checkpoint of a streaming run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing import ShardedObject, load_common_state_dict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext.checkpoint.frozen import BASE, FrozenBase, leave_out_base, put_back_base
from megatron_ext.checkpoint.state import apply_state, chunk_keys, sharded_state
from megatron_ext.streaming.sequence import StreamingSequence

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext
    from megatron_ext.training.streaming.networks import TrainedNetwork

CRITIC, SEQUENCE, CACHE, COUNT = (
    "critic",
    "streaming_sequence",
    "streaming_cache",
    "streaming_steps",
)


class StreamingState:
    """What a streaming run holds besides its generator; a `checkpoint.companion.Companion`.

    The generator lies in the checkpoint as any run's model, the critic under names that begin with
    ``critic.``. The teacher does not change and is not saved. Each data-parallel replica has its
    own sequence, whose cache is cut over tensor- and context-parallel ranks.

    Args:
        critic: see `TrainedNetwork`.
        sequence: of this replica.
        context: of this rank.

    Attributes:
        steps: training steps done.
    """

    def __init__(
        self, critic: TrainedNetwork, sequence: StreamingSequence, context: ParallelContext
    ) -> None:
        self._critic, self._sequence, self._context = critic, sequence, context
        self.steps = 0

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """See `Companion`."""
        state = self._critic_state(metadata, with_optimizer=with_optimizer, is_loading=False)
        stands = dict(self._sequence.state_dict())
        cache = stands.pop("cache", None)
        return {**state, COUNT: self.steps, **self._objects(stands, cache)}

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """See `Companion`; objects of another layout are left out."""
        if self._critic.base is not None:
            check_base(path, self._critic.base)
        stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
        state = self._critic_state(metadata, with_optimizer=with_optimizer, is_loading=True)
        wanted = self._objects(None, None)
        return {**state, **{k: v for k, v in wanted.items() if v.unique_key in stored}}

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """See `Companion`."""
        critic = self._critic
        if critic.base is not None:
            put_back_base(loaded[CRITIC], critic.chunks)
        apply_state(
            loaded[CRITIC],
            critic.chunks,
            critic.optimizer,
            critic.scheduler,
            with_optimizer=with_optimizer,
        )
        self.steps = int(loaded[COUNT])
        stands = loaded.get(SEQUENCE)
        if stands is None:
            notes.append(
                "The number of data-parallel replicas has changed, so that new video sequences "
                "begin."
            )
            return
        if CACHE in loaded:
            stands = {**stands, "cache": loaded[CACHE]}
        else:
            notes.append("The layout has changed, so that the cache of past frames is made anew.")
        self._sequence.load_state_dict(stands)

    def _critic_state(
        self, metadata: dict[str, Any], *, with_optimizer: bool, is_loading: bool
    ) -> dict[str, Any]:
        critic = self._critic
        state = sharded_state(
            critic.chunks,
            critic.optimizer if with_optimizer else None,
            metadata=metadata,
            is_loading=is_loading,
        )
        if critic.base is not None:
            leave_out_base(state, chunk_keys(critic.chunks))
        add_prefix_for_sharding(state, f"{CRITIC}.")
        if with_optimizer and not is_loading:
            state["opt_param_scheduler"] = critic.scheduler.state_dict()
        if critic.base is not None and not is_loading:
            state[BASE] = critic.base.record()
        return {CRITIC: state}

    def _objects(self, stands: dict[str, Any] | None, cache: Any) -> dict[str, ShardedObject]:
        """The sequence of a replica, which its first rank writes, and the cache of each rank."""
        groups = self._context.pgs
        sizes = groups.dp.size(), groups.cp.size(), groups.tp.size()
        ranks = groups.dp.rank(), groups.cp.rank(), groups.tp.rank()
        peer = ranks[1] * sizes[2] + ranks[2]
        return {
            SEQUENCE: ShardedObject(SEQUENCE, stands, sizes[:1], ranks[:1], replica_id=peer),
            CACHE: ShardedObject(CACHE, cache, sizes, ranks),
        }


def check_base(path: Path, base: FrozenBase) -> None:
    """Refuse adapters of the critic that were trained on other weights.

    Raises:
        CheckpointError: the checkpoint's base is not the critic's.
    """
    recorded = FrozenBase.recorded(load_common_state_dict(str(path))[CRITIC])
    if recorded is not None:
        base.check(path, recorded, "--critic-checkpoint")
