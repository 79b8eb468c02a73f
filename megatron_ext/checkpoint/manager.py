"""Saves and loads a run's checkpoints; `storage` handles files, `compatibility` checks the fit."""

from __future__ import annotations

import dataclasses
import shutil
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_ext.checkpoint import adapters, compatibility, publish, storage
from megatron_ext.checkpoint import state as run_state
from megatron_ext.checkpoint.background import BackgroundSaves
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.by_layer import by_layer
from megatron_ext.checkpoint.compatibility import check_changes
from megatron_ext.checkpoint.files import folder_of
from megatron_ext.checkpoint.optimizer_boxes import cut_weights
from megatron_ext.checkpoint.optimizer_state import (
    GATHERED,
    give_groups_on_host,
    has_main_weights,
    is_distributed,
)
from megatron_ext.checkpoint.prepared import replica_groups
from megatron_ext.checkpoint.remote import bring, remote_of
from megatron_ext.checkpoint.shared_reading import strategy_of
from megatron_ext.checkpoint.state import EMA, Chunks, ExtraState, LoadedCheckpoint, chunk_keys
from megatron_ext.checkpoint.stored import (
    CheckpointRef,
    find,
    read_settings,
    stored_progress,
)
from megatron_ext.checkpoint.unpickling import common_state_of, index_shared, stored_entries
from megatron_ext.checkpoint.writing import CheckpointWriter
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.writing import own_folder
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.collectives import on_every_rank, on_first_rank, union_of_all_ranks
from megatron_ext.parallel.context import ParallelContext


class CheckpointManager:
    """Saves and loads checkpoints; all ranks call each method together.

    Args:
        base: if checkpoints hold only adapters, the identity of the frozen weights under them.
        section: name of a second network, such as `CRITIC`. If only weights are loaded, each one is
            first looked up with this prefix, then without it.
        background: writes checkpoints while training goes on; None to save before `save` returns.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: ParallelContext,
        base: adapters.FrozenBase | None = None,
        section: str | None = None,
        background: BackgroundSaves | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._base = base
        self._background = background
        self._writer: CheckpointWriter | None = None
        averages = [run_state.PREFIX] if config.pretrained_average else []
        self._names = averages if section is None else [f"{section}.", *averages]

    def save(
        self,
        iteration: int,
        *,
        model: Chunks,
        progress: dict[str, Any],
        run_config: dict[str, Any],
        optimizer: MegatronOptimizer | None = None,
        scheduler: OptimizerParamScheduler | None = None,
        ema: ShardedEMA | None = None,
        extra_state: ExtraState | None = None,
        best: Sequence[BestCheckpoint] = (),
        superseded: Collection[int] = (),
        waits: bool = False,
    ) -> Path:
        """Write a checkpoint to a temporary folder, verify and publish it, then remove old ones.

        Return the folder of the checkpoint. If one rank cannot write, all ranks raise a
        CheckpointError. Optimizer, scheduler, averages and extra state are saved if they are given.

        Args:
            progress: counters of the run, such as consumed samples, as values for JSON.
            run_config: the resolved configuration, as sections of plain values.
            best: the checkpoints with the lowest validation losses, lowest first; none is removed.
            superseded: iterations to remove, since they are no longer among the best.
            waits: whether to wait until the checkpoint is complete. Otherwise, a manager with a
                ``background`` returns as soon as the state is copied to host memory.
        """
        config = self._config
        if config.save is None:
            raise CheckpointError("There is no folder to save to; give `--save`.")
        root = Path(config.save)

        def state() -> dict[str, Any]:
            values = self._state(model, optimizer, scheduler, run_config, ema, extra_state)
            return {**values, **run_state.common_state(iteration, progress, run_config)}

        background = None
        counters = (progress, run_config)
        if waits or self._background is None:
            what = f"`--save` ({root}) cannot be written"
            on_first_rank(lambda: publish.prepare(root, iteration), what)
        else:
            background = self._background
        try:
            if background is None:
                self._write(root, iteration, state, *counters)
            else:
                kept = tuple(best), tuple(superseded)
                background.begin(iteration, state, *counters, *kept)
        except CheckpointError as error:
            raise CheckpointError(
                f"The checkpoint of iteration {iteration} could not be saved: "
                f"{storage.one_line(error)}; mend this or give another `--save`."
            ) from error
        if background is None:
            what = f"{root / publish.BEST_TRACKER} not written"
            on_first_rank(lambda: publish.tidy(root, iteration, config, best, superseded), what)
            remote = remote_of(config, root)
            if remote is not None:
                remote.finish(iteration, config, best, superseded)
        return folder_of(root, iteration)

    def _write(
        self,
        root: Path,
        iteration: int,
        state: Callable[[], dict[str, Any]],
        progress: dict[str, Any],
        run_config: dict[str, Any],
    ) -> None:
        """Write and publish a checkpoint; if one rank fails, all raise a CheckpointError."""
        temporary = publish.temporary_folder_of(root, iteration)
        remote = remote_of(self._config, root)
        if self._writer is None:
            replicas = replica_groups(self._context)
            self._writer = CheckpointWriter(self._config, replicas, self._context.pgs.mp)
        try:
            if remote is not None:
                # Each machine has a staging folder of its own.
                root.mkdir(parents=True, exist_ok=True)
                own_folder(temporary)
            listed, own = self._writer.write(state(), temporary, progress, run_config)
            if remote is not None:
                remote.upload(temporary, iteration, listed, own)
            what = f"{temporary} not published"
            on_first_rank(lambda: publish.publish(root, iteration, listed), what)
        except CheckpointError:
            if self._context.rank == 0 or remote is not None:
                # The half-written checkpoint may be what fills the disk.
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def state_in_memory(
        self,
        *,
        model: Chunks,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None,
        run_config: dict[str, Any],
        ema: ShardedEMA | None,
        extra_state: ExtraState | None,
    ) -> dict[str, Any]:
        """Return all state of this rank in the format of `flat_state`, for a checkpoint in memory.

        The tensors are the live ones, not copies. ``--no-save-optim`` and ``--no-save-rng`` have no
        effect. All ranks call this together: ``extra_state``, and random states that differ between
        replicas, may need communication.
        """
        whole = dataclasses.replace(self._config, no_save_optim=False, no_save_rng=False)
        saver = CheckpointManager(whole, self._context, self._base)
        return saver._state(model, optimizer, scheduler, run_config, ema, extra_state, flat=True)

    def restore(
        self,
        values: dict[str, Any],
        *,
        model: Chunks,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None,
        ema: ShardedEMA | None,
        extra_state: ExtraState | None,
    ) -> list[str]:
        """Copy this rank's state from a checkpoint in memory into the objects that are given.

        Arguments that are None are skipped. Afterwards nothing refers to the memory of ``values``.

        Args:
            values: the state that `state_in_memory` returned, as read from a snapshot.

        Returns:
            Log messages on the parts of ``extra_state`` that were not restored but start anew.
        """
        notes = list[str]()
        copied = {*chunk_keys(model), "optimizer", EMA}
        # The run keeps these values as they are, so they must not share the memory of the snapshot.
        values = {
            key: value if key in copied else tree_map_only(Tensor, Tensor.clone, value)
            for key, value in values.items()
        }
        recorded = adapters.FrozenBase.recorded(values)
        if recorded is not None:
            self._restore_base(Path("the memory checkpoint"), recorded, model)
            adapters.put_back_base(values, model)
        run_state.apply_state(values, model, optimizer, scheduler, with_optimizer=True)
        if ema is not None:
            run_state.load_averages(ema, model, values[EMA])
        if extra_state is not None:
            extra_state.load(values, with_optimizer=True, notes=notes)
        run_state.restore_random_state(self._context, values["rng_state"])
        return notes

    def _state(
        self,
        model: Chunks,
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        run_config: dict[str, Any],
        ema: ShardedEMA | None,
        extra_state: ExtraState | None,
        *,
        flat: bool = False,
    ) -> dict[str, Any]:
        """Return all state to save, except counters and configuration; what is None is left out.

        ``run_config`` only tells whether random states differ between replicas, and whether weights
        are frozen. Flags may leave out optimizer and random states. With ``flat``, optimizer state
        and averages have the format of `flat_state`.
        """
        config = self._config
        kept = None if config.no_save_optim else optimizer
        reshardable = config.dist_ckpt_optim_fully_reshardable
        metadata = run_state.content_metadata(kept, reshardable=reshardable, flat=flat)
        cut = run_state.sharding_of(metadata, self._context)
        state = run_state.sharded_state(model, kept, metadata=cut, is_loading=False)
        freezes = compatibility.freezes(run_config)
        if ema is not None:
            how = {"frozen": freezes, "distributed": is_distributed(optimizer)}
            state[EMA] = run_state.averages_to_save(ema, model, state, cut, **how)
        if freezes and not flat:
            by_layer(state.get("optimizer", {}))
        if extra_state is not None:
            state |= extra_state.state_to_save(cut, with_optimizer=not config.no_save_optim)
        if self._base is not None:
            adapters.leave_out_base(state, chunk_keys(model))
            state[adapters.BASE] = self._base.record()
        state["content_metadata"] = metadata
        if scheduler is not None and not config.no_save_optim:
            state["opt_param_scheduler"] = scheduler.state_dict()
        if not config.no_save_rng:
            apart = run_config.get("training", {}).get("data_parallel_random_init", False)
            state["rng_state"] = run_state.random_state(self._context, every_replica=apart)
        cut_weights(state, chunk_keys(model))
        return state

    def load(
        self,
        *,
        model: Chunks,
        optimizer: MegatronOptimizer | None = None,
        scheduler: OptimizerParamScheduler | None = None,
        ema: ShardedEMA | None = None,
        extra_state: ExtraState | None = None,
        run_config: RunConfig | None = None,
        checkpoint: CheckpointRef | None = None,
        whole: bool = False,
    ) -> LoadedCheckpoint | None:
        """Load the checkpoint that the flags choose (`find`); return None if there is none.

        The model changes only after the checkpoint has been verified and found to fit. Averages
        start from the loaded weights if the checkpoint has no averages or only weights are loaded.
        Arguments that are None are skipped, and all but the model if only weights are loaded.

        Args:
            run_config: the flags to compare with the stored ones; None compares none.
            checkpoint: a verified checkpoint to load instead of the one that the flags choose.
            whole: load optimizer and random states even if the flags leave them out.
        """
        if whole:
            self._config = dataclasses.replace(self._config, no_load_optim=False, no_load_rng=False)
        if checkpoint is None:
            checkpoint = self._chosen_checkpoint()
            if checkpoint is None:
                return None
        with index_shared(checkpoint.path):
            return self._load(checkpoint, model, optimizer, scheduler, ema, extra_state, run_config)

    def _load(
        self,
        checkpoint: CheckpointRef,
        model: Chunks,
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        ema: ShardedEMA | None,
        extra_state: ExtraState | None,
        run_config: RunConfig | None,
    ) -> LoadedCheckpoint:
        """Load ``checkpoint``, whose files are verified; the arguments are those of `load`."""
        path = checkpoint.path
        notes = list[str]()
        averaged = self._config.pretrained_average and checkpoint.weights_only
        if averaged and not run_state.holds_averages(path):
            notes.append(f"{path} holds no averaged weights, so its weights are taken.")
        common = common_state_of(path)
        arguments = common.get("args", Namespace())
        recorded = adapters.FrozenBase.recorded(common)
        if checkpoint.weights_only and recorded is not None:
            raise CheckpointError(
                f"{path} holds adapters without the weights under them, so that no run can start "
                "from it; merge them first with `tools/lora.py merge`."
            )
        freeze = run_config.freeze if run_config is not None and optimizer is not None else None
        with_optimizer = compatibility.loads_optimizer(
            checkpoint, self._config, arguments, notes, freeze
        )
        if run_config is not None:
            used = optimizer is not None and with_optimizer
            compare = partial(
                check_changes, weights_only=checkpoint.weights_only, with_optimizer=used
            )
            what = f"{path} cannot be compared with the run"
            notes += on_first_rank(lambda: compare(path, run_config, read_settings(path)), what)
            if optimizer is not None and not (with_optimizer or checkpoint.weights_only):
                notes.append(
                    "The optimizer starts anew, and the learning rate at the beginning of its "
                    "schedule."
                )
        with_averages = not checkpoint.weights_only and run_state.goes_on_averaging(
            path, ema, notes
        )
        kept = optimizer if with_optimizer else None, ema if with_averages else None
        state, new = self._requested_state(checkpoint, model, *kept, common, notes)
        if (goes_on := extra_state if not checkpoint.weights_only else None) is not None:
            metadata = run_state.sharding_of(common["content_metadata"], self._context)
            state |= goes_on.state_to_load(path, metadata, with_optimizer=with_optimizer)
        if recorded is not None:
            self._restore_base(path, recorded, model)
        cut_weights(state, chunk_keys(model))
        strategy = strategy_of(self._config, self._context)
        loaded = storage.read_state(path, state, strategy, self._config, self._context, notes)
        if recorded is not None:
            adapters.put_back_base(loaded, model)
        notes += adapters.new_branches(path, new)
        for chunk, values in new.items():
            loaded[chunk].update(values)
        run_state.apply_state(loaded, model, optimizer, scheduler, with_optimizer=with_optimizer)
        if ema is not None:
            run_state.load_averages(ema, model, loaded[EMA]) if with_averages else ema.restart()
        if goes_on is not None:
            goes_on.load(loaded, with_optimizer=with_optimizer, notes=notes)
        if "rng_state" in state:
            run_state.restore_random_state(self._context, loaded["rng_state"])
        if self._base is not None and recorded is None:
            self._base = adapters.FrozenBase.at(path, average=averaged)
        result = _result(checkpoint, common, notes)
        if ema is not None and not with_averages:
            result.progress.update(run_state.NEW_AVERAGE)
        return result

    def _chosen_checkpoint(self) -> CheckpointRef | None:
        """Return the checkpoint that the flags choose, after its files have been verified."""
        bring(self._config)
        checkpoint = on_first_rank(lambda: find(self._config), "looking for a checkpoint")
        if checkpoint is not None:
            storage.verify(checkpoint, self._context)
        return checkpoint

    def _restore_base(self, path: Path, recorded: adapters.FrozenBase, model: Chunks) -> None:
        """Load the frozen weights under a checkpoint's adapters from ``--pretrained-checkpoint``.

        Without that flag the model keeps its random weights. Raise a CheckpointError if these
        weights are not the ``recorded`` ones, on which the adapters were trained.
        """
        given = self._config.pretrained_checkpoint
        average = self._config.pretrained_average
        own = self._base or adapters.FrozenBase(None, "unknown seed")
        if given is not None:
            look = partial(adapters.FrozenBase.given, given, average=average)
            own = on_first_rank(look, f"{given} cannot be read")
        own.check(path, recorded, "--pretrained-checkpoint")
        config = dataclasses.replace(self._config, load=None, save=None)
        CheckpointManager(config, self._context).load(model=model)
        self._base = own

    def _requested_state(
        self,
        checkpoint: CheckpointRef,
        model: Chunks,
        optimizer: MegatronOptimizer | None,
        ema: ShardedEMA | None,
        common: dict[str, Any],
        notes: list[str],
    ) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Prepare the load of a checkpoint, after checking that it fits the model.

        Args:
            optimizer, ema: None if their state is not to be loaded.
            common: the checkpoint's common state.
            notes: log messages are appended to it.

        Returns:
            (the sharded state to fill; the model's weights that were left out of it because the
            checkpoint lacks them, by chunk key and weight name, see `leave_out_new`).

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        path = checkpoint.path
        layout = self._context.layout
        arguments = common.get("args", Namespace())
        keys = chunk_keys(model)
        strictness = self._config.dist_ckpt_strictness
        is_of_adapters = adapters.FrozenBase.recorded(common) is not None
        names = self._names if checkpoint.weights_only else []
        stored = dict(common.get("content_metadata") or {})
        metadata = run_state.sharding_of(stored, self._context)
        if optimizer is not None and stored.get(run_state.SHARDING) == GATHERED:
            give_groups_on_host(optimizer, layout)

        def check() -> set[str]:
            bare = run_state.sharded_state(model, None, metadata=metadata, is_loading=True)
            if checkpoint.weights_only:
                adapters.check_new_branches(path, adapters.leave_out_new(path, bare, keys))
            adapters.check_adapters(path, bare, keys, strictness)
            if is_of_adapters:
                adapters.leave_out_base(bare, keys, stored_entries(path))
            run_state.take_named(path, bare, keys, names)
            if ema is not None:
                bare[EMA] = run_state.averages_to_load(path, ema, model, bare, metadata)
            compatibility.check_model(path, bare, arguments, layout, self._config)
            if optimizer is not None:
                kinds = {"distributed": is_distributed(optimizer)}
                kinds["has_main_weights"] = has_main_weights(optimizer)
                compatibility.check_optimizer(path, stored, arguments, layout, **kinds)
            return compatibility.weights_in(bare)

        what = f"{path} cannot be compared with the model"
        names_of_all = union_of_all_ranks(on_every_rank(check, what), self._context)
        unexpected = partial(compatibility.check_unexpected, path, names_of_all, self._config)
        notes += on_first_rank(unexpected, what)
        state = run_state.sharded_state(model, optimizer, metadata=metadata, is_loading=True)
        if ema is not None:
            state[EMA] = run_state.averages_to_load(path, ema, model, state, metadata)
        if compatibility.freeze_of(arguments).is_used:
            by_layer(state.get("optimizer", {}))
        new = adapters.leave_out_new(path, state, keys) if checkpoint.weights_only else {}
        run_state.take_named(path, state, keys, names)
        if is_of_adapters:
            adapters.leave_out_base(state, keys, stored_entries(path))
        if compatibility.loads_random(checkpoint, self._config, arguments, layout, notes):
            apart = getattr(arguments, "data_parallel_random_init", False)
            state["rng_state"] = run_state.random_state(self._context, every_replica=apart)
        return state, new


def _result(
    checkpoint: CheckpointRef, common: dict[str, Any], notes: list[str]
) -> LoadedCheckpoint:
    """Return the iteration, counters and configuration of a loaded checkpoint, with the notes.

    If only weights were loaded, the iteration is 0 and the counters are empty.
    """
    iteration = 0
    progress = dict[str, Any]()
    if not checkpoint.weights_only:
        progress = stored_progress(checkpoint.path, common.get("args", Namespace()))
        iteration = int(common["iteration"])
    stored = read_settings(checkpoint.path)
    return LoadedCheckpoint(iteration, progress, stored, checkpoint.path, notes)
