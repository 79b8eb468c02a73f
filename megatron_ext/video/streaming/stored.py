"""Saves and loads the critic and the replicas' videos in checkpoints of a streaming run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.utils._pytree import tree_map_only

from megatron_ext.checkpoint.adapters import BASE, FrozenBase, leave_out_base, put_back_base
from megatron_ext.checkpoint.compatibility import check_unexpected, weights_in
from megatron_ext.checkpoint.state import CRITIC, apply_state, chunk_keys, sharded_state
from megatron_ext.checkpoint.unpickling import common_state_of, stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import on_every_rank, on_first_rank, union_of_all_ranks
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.sequence import StreamingSequence

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.video.streaming.networks import TrainedNetwork

SEQUENCE, CACHE, PROGRESS = "streaming_sequence", "streaming_cache", "streaming_progress"
_FIRST_ALONE = "--independent-first-frame"


def _settings(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two groups of flags: one for loading a checkpoint's sequence, one for its cache.

    Sequence or cache can be loaded only if the flags of its group are as in the checkpoint.
    """
    streaming = config.section(StreamingConfig)
    sequence = {
        "--micro-batch-size": config.training.batch_sizes[0],
        "--latent-size": list(streaming.latent_size),
        "--frame-block": streaming.frame_block,
        _FIRST_ALONE: streaming.independent_first_frame,
        "--chunk-frames": streaming.chunk_frames,
        "--text-length": config.section(TextEncoderConfig).text_length,
    }
    cache = {
        "--window-frames": streaming.window_frames,
        "--sink-frames": streaming.sink_frames,
        "--cp-comm-type": list(config.parallel.cp_comm_type),
    }
    return sequence, cache


class StreamingState:
    """The state of a streaming run that is saved besides its generator.

    The names of the critic's state in the checkpoint begin with ``critic.``. The teacher does not
    change and is not saved. Each data-parallel replica has its own sequence, whose cache is sharded
    over tensor- and context-parallel ranks. A run with another model-parallel layout rebuilds the
    cache from the stored frames. A run with another number of replicas begins new sequences, whose
    numbers continue after the stored ones, so that no prompt is used twice.

    Attributes:
        steps: number of completed training steps.
    """

    def __init__(
        self,
        critic: TrainedNetwork,
        sequence: StreamingSequence,
        context: ParallelContext,
        config: RunConfig,
    ) -> None:
        self._critic = critic
        self._sequence = sequence
        self._context = context
        self._sequence_flags, self._cache_flags = _settings(config)
        self._flags = config.checkpoint
        self._left_out: list[str] = []
        self.steps = 0

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """Return the sharded state of critic, sequence, cache and progress for a checkpoint.

        ``with_optimizer`` includes the critic's optimizer and learning rate schedule.
        """
        state = self._critic_state(metadata, with_optimizer=with_optimizer, is_loading=False)
        # Copy to the CPU: later passes change the originals, and the load may be on other devices.
        stands: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda x: x.detach().to("cpu", copy=True), self._sequence.state_dict()
        )
        cache = stands.pop("cache", None)
        progress = {
            "steps": self.steps,
            "coming": self._sequence.coming,
            "settings": {**self._sequence_flags, **self._cache_flags},
        }
        return {**state, PROGRESS: progress, **self._objects(stands, cache)}

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """Check that the checkpoint in ``path`` fits; return the sharded state to load from it.

        Sequence and cache are left out if the checkpoint has none for this layout.
        """

        def names() -> set[str]:
            entries = set(stored_entries(path))
            if not any(name.startswith(f"{CRITIC}.") for name in entries):
                raise CheckpointError(
                    f"{path} holds no critic, so it is not of a run with `--task streaming`; give "
                    "it as `--pretrained-checkpoint` to start from its weights."
                )
            return entries

        stored = on_first_rank(names, f"{path} cannot be read")
        base = self._critic.base
        if base is not None:
            # Adapters of the critic fit only the weights with which they were trained.
            recorded = FrozenBase.recorded(common_state_of(path)[CRITIC])
            if recorded is not None:
                base.check(path, recorded, "--critic-checkpoint")
        state = self._critic_state(metadata, with_optimizer=with_optimizer, is_loading=True)
        # Refuse a critic with fewer blocks than the stored one.
        keys = chunk_keys(self._critic.chunks)
        chunks = {k: state[CRITIC][k] for k in keys if k in state[CRITIC]}
        what = f"{path} cannot be compared with the critic"
        own = on_every_rank(lambda: weights_in(chunks), what)
        ours = union_of_all_ranks(own, self._context)
        self._left_out = on_first_rank(lambda: check_unexpected(path, ours, self._flags), what)
        objects = self._objects(None, None)
        return {**state, **{k: v for k, v in objects.items() if v.unique_key in stored}}

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """Restore critic, sequence and progress.

        Without ``with_optimizer``, the critic's optimizer and schedule are not restored. A sentence
        on each thing that is not loaded from the checkpoint is appended to ``notes``.
        """
        critic = self._critic
        progress = loaded[PROGRESS]
        notes += self._left_out
        if critic.base is not None:
            put_back_base(loaded[CRITIC], critic.chunks)
        both = critic.optimizer, critic.scheduler
        apply_state(loaded[CRITIC], critic.chunks, *both, with_optimizer=with_optimizer)
        self.steps = int(progress["steps"])
        first, sample = progress["coming"]
        self._sequence.first = int(first), int(sample)
        # Checkpoints of earlier versions lack this flag.
        settings = {_FIRST_ALONE: False, **progress["settings"]}
        changes = _changes(settings, self._sequence_flags)
        if SEQUENCE not in loaded:
            changes = ["The number of data-parallel replicas has changed"]
        if changes:
            notes.append(f"{', '.join(changes)}, so that new video sequences begin.")
            return
        stands = dict(loaded[SEQUENCE])
        changes = _changes(settings, self._cache_flags)
        if CACHE not in loaded:
            changes = ["The layout has changed"]
        if stands and changes:
            notes.append(f"{', '.join(changes)}, so that the cache of past frames is made anew.")
        elif stands:
            device = self._sequence.like.device
            stands["cache"] = tree_map_only(torch.Tensor, lambda x: x.to(device), loaded[CACHE])
        self._sequence.load_state_dict(stands)

    def _critic_state(
        self, metadata: dict[str, Any], *, with_optimizer: bool, is_loading: bool
    ) -> dict[str, Any]:
        critic = self._critic
        optimizer = critic.optimizer if with_optimizer else None
        state = sharded_state(critic.chunks, optimizer, metadata=metadata, is_loading=is_loading)
        if critic.base is not None:
            leave_out_base(state, chunk_keys(critic.chunks))
        add_prefix_for_sharding(state, f"{CRITIC}.")
        if with_optimizer and not is_loading:
            state["opt_param_scheduler"] = critic.scheduler.state_dict()
        if critic.base is not None and not is_loading:
            state[BASE] = critic.base.record()
        return {CRITIC: state}

    def _objects(self, stands: dict[str, Any] | None, cache: Any) -> dict[str, ShardedObject]:
        """Return megatron-core's sharded objects for the sequence's state and this rank's cache.

        The state, ``stands``, is the same on all ranks of a replica, so the first of them writes
        it; every rank writes its own ``cache``. Pass None for both to load them.
        """
        groups = self._context.pgs
        sizes = groups.dp.size(), groups.cp.size(), groups.tp.size()
        ranks = groups.dp.rank(), groups.cp.rank(), groups.tp.rank()
        peer = ranks[1] * sizes[2] + ranks[2]
        return {
            SEQUENCE: ShardedObject(SEQUENCE, stands, sizes[:1], ranks[:1], replica_id=peer),
            CACHE: ShardedObject(CACHE, cache, sizes, ranks),
        }


def _changes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a clause for each flag whose value differs from that in the checkpoint."""
    return [
        f"`{name}` was {stored.get(name)} and is {value}"
        for name, value in now.items()
        if stored.get(name) != value
    ]
