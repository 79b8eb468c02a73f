"""Chooses the newest state for a run: its snapshots, its checkpoints, or a fresh start.

A run that is restarted after a fault resumes from its snapshots if they are at least as new as its
newest checkpoint. If that checkpoint is damaged, the run reports it and uses the next older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.checkpoint import storage
from megatron_ext.checkpoint.compatibility import check_changes
from megatron_ext.checkpoint.files import iteration_in
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.run_record import goes_on, own_checkpoints
from megatron_ext.checkpoint.state import LoadedCheckpoint
from megatron_ext.checkpoint.stored import (
    CheckpointRef,
    Damaged,
    cause_of,
    fault_of,
    find,
)
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.events import append_event
from megatron_ext.disk.host_folder import generation
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.collectives import largest_of_all_ranks, on_first_rank
from megatron_ext.parallel.context import ParallelContext


class SnapshotStore(Protocol):
    """A place where a run keeps snapshots of its state, such as host memory.

    Attributes:
        stays: whether the snapshots remain after the run has ended.
        left: whether a killed run with the same save folder has left snapshots there.
        is_behind: whether the run has resumed from these snapshots with another number of replicas,
            so that it should take new ones at once.
    """

    stays: bool
    left: bool
    is_behind: bool

    def remove(self) -> None:
        """Remove the snapshots at the end of a run, unless ``stays`` is set."""


class SnapshotRecovery(Protocol):
    """Finds the snapshots of a store; the add-on ``resilience`` implements this protocol.

    All ranks call each method together.
    """

    @property
    def memory(self) -> SnapshotStore:
        """Return the store in which this object looks for snapshots."""

    def newest(self, newer_than: int, *, with_earlier: bool = False) -> Any:
        """Return the newest snapshots of one step that cover all ranks; None if none is new enough.

        The other methods take the result as ``chosen``.

        Args:
            newer_than: only snapshots of a later step than this are considered.
            with_earlier: whether to consider also snapshots of other runs, from which this run may
                start.
        """

    def source(self, chosen: Any) -> str:
        """Return where the snapshots ``chosen`` by `newest` come from, such as "memory"."""

    def state_of(self, chosen: Any) -> tuple[Any, Any, Any, Path]:
        """Return the state to resume from, and the folder of the snapshots.

        The result is (this rank's state with plain values, training counters, configuration of the
        run that took the snapshots, folder).
        """

    def publish(self, chosen: Any, save: str | None) -> CheckpointRef:
        """Write snapshots as a temporary checkpoint that loads with any number of replicas.

        A run that resumes with another number of replicas needs it, since snapshots themselves load
        only with the same number. ``save`` is the run's save folder, where the checkpoint may be
        written.
        """

    def remove_temporary(self, checkpoint: CheckpointRef) -> None:
        """Remove the checkpoint that `publish` has written."""


class Resume:
    """Finds and loads the state to resume from; all ranks call each method together.

    Attributes:
        saved_at: iteration of the newest checkpoint, 0 for none. Snapshots may be newer.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        config: RunConfig,
        context: ParallelContext,
    ) -> None:
        self._checkpoints = checkpoints
        self._run_config = config
        self._context = context
        self._config = config.checkpoint
        # A machine that joined later has no restarts of its own.
        (self._generation,) = largest_of_all_ranks([generation()])
        self._again = goes_on(config.fault_tolerance, self._generation)
        self._passes_over = self._again or config.fault_tolerance.may_be_restarted
        self._damaged: Damaged = {}
        self._own: CheckpointRef | None = None
        self.saved_at = 0

    def load(
        self, recoveries: Sequence[SnapshotRecovery], **parts: Any
    ) -> tuple[LoadedCheckpoint | None, str]:
        """Load the newest state; return what was loaded (None for a fresh start), and its source.

        The source is "memory" (snapshots), "peer" (a rank needed its neighbour's copy of its
        snapshot), "checkpoint" or "start".

        Args:
            recoveries: where to look for snapshots. When a run starts for the first time, it uses
                only stores whose snapshots stay after a run, or that a killed run has left.
            parts: the keyword arguments of `CheckpointManager.load`, such as model and optimizer.
        """
        checkpoint = self._find()
        while True:
            best = self._newest_snapshots(recoveries, checkpoint)
            if best is not None:
                self.saved_at = (
                    0 if checkpoint is None or checkpoint.weights_only else checkpoint.iteration
                )
                return self._from_snapshots(*best, parts), best[0].source(best[1])
            if checkpoint is None:
                return None, "start"
            if self._is_intact(checkpoint):
                loaded = self._loaded(checkpoint, parts)
                self.saved_at = 0 if loaded is None else loaded.iteration
                return loaded, "checkpoint"
            # The snapshots were older than the damaged checkpoint, but may be newer than the next
            # one.
            checkpoint = self._find()

    def _newest_snapshots(
        self, recoveries: Sequence[SnapshotRecovery], checkpoint: CheckpointRef | None
    ) -> tuple[SnapshotRecovery, Any] | None:
        """Return the newest snapshots that all ranks have, with the recovery that found them.

        The result is (recovery, snapshots), or None if no snapshots are at least as new as
        ``checkpoint``.
        """
        best = None
        newer_than = -1
        if checkpoint is not None and not checkpoint.weights_only:
            newer_than = checkpoint.iteration - 1
        for recovery in recoveries:
            store = recovery.memory
            continues = (store.stays or store.left) and self._continues(checkpoint)
            if self._again or continues:
                chosen = recovery.newest(newer_than, with_earlier=continues)
                if chosen is not None:
                    newer_than = chosen[0].iteration
                    best = (recovery, chosen)
        return best

    def _loaded(self, checkpoint: CheckpointRef, parts: dict[str, Any]) -> LoadedCheckpoint | None:
        """Load a checkpoint into ``parts``, the arguments of `load` such as model and optimizer.

        If this run itself wrote it, before a restart, also load optimizer and random states that
        the flags leave out: a restarted run needs them to continue.
        """
        return self._checkpoints.load(
            **parts,
            run_config=self._run_config,
            checkpoint=checkpoint,
            whole=checkpoint == self._own,
        )

    def _continues(self, checkpoint: CheckpointRef | None) -> bool:
        """Return whether the flags ask to continue from the newest state of an earlier run.

        They do not if the run only starts from another run's weights, or if they name an iteration.
        ``checkpoint`` is the checkpoint that the flags choose; None if there is none.
        """
        config = self._config
        asks = config.load is not None or config.resume_mode == "auto"
        explicit = config.finetune or config.ckpt_step is not None
        return asks and not explicit and (checkpoint is None or not checkpoint.weights_only)

    def _find(self) -> CheckpointRef | None:
        """Return the checkpoint to load, or None if there is none.

        If damaged checkpoints may be skipped, skip and report them, and prefer the newest that this
        run wrote itself before a restart. Otherwise the flags alone choose.
        """

        def look() -> tuple[CheckpointRef | None, CheckpointRef | None, Damaged]:
            if not self._passes_over:
                return None, find(self._config), {}
            own = self._newest_of_this_run()
            return own, own or find(self._config, self._damaged), self._damaged

        before = set(self._damaged)
        self._own, checkpoint, self._damaged = on_first_rank(look, "looking for a checkpoint")
        self._tell(path for path in self._damaged if path not in before)
        return checkpoint

    def _newest_of_this_run(self) -> CheckpointRef | None:
        """Return the newest complete checkpoint that this run wrote to ``--save``, or None."""
        if self._config.save is None:
            return None
        root = Path(self._config.save)
        for iteration in own_checkpoints(root, again=self._again):
            checkpoint = CheckpointRef(root, iteration, weights_only=False)
            fault = self._damaged.get(checkpoint.path) or fault_of(checkpoint.path)
            if fault is None:
                return checkpoint
            self._damaged[checkpoint.path] = fault
        return None

    def _is_intact(self, checkpoint: CheckpointRef) -> bool:
        """Return whether a checkpoint's files match their checksums, and report one that does not.

        If the run does not skip damaged checkpoints, raise a CheckpointError instead of reporting.
        """
        try:
            storage.verify(checkpoint, self._context)
        except CheckpointError as error:
            if not self._passes_over:
                raise
            self._damaged[checkpoint.path] = cause_of(error)
            self._tell([checkpoint.path])
            return False
        return True

    def _tell(self, folders: Any) -> None:
        for folder in folders if self._context.rank == 0 else ():
            fault = self._damaged[folder]
            print(f"> {folder} is passed over: {fault}", flush=True)
            append_event(
                self._config.save,
                "checkpoint_refused",
                iteration=iteration_in(folder),
                path=str(folder),
                cause=fault,
                generation=self._generation,
            )

    def _from_snapshots(
        self, recovery: SnapshotRecovery, chosen: Any, parts: dict[str, Any]
    ) -> LoadedCheckpoint | None:
        if chosen[0].layout != self._context.layout:
            checkpoint = recovery.publish(chosen, self._config.save)
            self._own = checkpoint
            loaded = self._loaded(checkpoint, parts)
            recovery.remove_temporary(checkpoint)
            recovery.memory.is_behind = True
            return loaded
        values, progress, stored, path = recovery.state_of(chosen)
        notes = check_changes(
            path, self._run_config, stored, weights_only=False, with_optimizer=True
        )
        notes += self._checkpoints.restore(values, **parts)
        return LoadedCheckpoint(chosen[0].iteration, progress, stored, path, notes)
