"""Takes snapshots of a run's state at fixed intervals of steps, for resuming after a fault."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.host_folder import SNAPSHOTS, TAKEN_OVER
from megatron_ext.errors import CheckpointError
from megatron_ext.extras.resilience.memory import Machines, MemoryCheckpoints
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run


def snapshot_stores(
    config: CheckpointConfig, context: ParallelContext, host_folder: Path | None
) -> list[MemoryCheckpoints]:
    """Return the stores of snapshots that the flags request; all ranks call this together.

    Each store has its own folder and interval. The folder is on the machine's disk, or in
    ``host_folder``, which is in memory; None means that there is no folder in memory.

    Raises:
        CheckpointError: the flags require snapshots in memory, but ``host_folder`` is None.
    """
    stores = []
    # A run that does not load from its save folder is not a restart of the killed run.
    same = config.load is None or os.path.realpath(config.load) == os.path.realpath(
        config.save or ""
    )
    left = same and host_folder is not None and (host_folder / TAKEN_OVER).exists()

    def add(folder: Path, interval: int, **kind: Any) -> None:
        machines = Machines.of(folder, context)
        stores.append(MemoryCheckpoints(folder, interval, machines, context, **kind))

    def in_memory(name: str, flag: str) -> Path:
        if host_folder is None:
            raise CheckpointError(
                f"`{flag}` needs a folder in memory, but neither /dev/shm nor the temporary folder "
                "can be written; leave it out, or make one writable."
            )
        return host_folder / name

    if config.peer_checkpoint_interval is not None:
        folder = in_memory(SNAPSHOTS[0], "--peer-checkpoint-interval")
        add(folder, config.peer_checkpoint_interval, neighbours=True, left=left)
    interval = config.non_persistent_save_interval
    if interval is not None and config.non_persistent_ckpt_type == "in_memory":
        folder = in_memory(SNAPSHOTS[1], "--non-persistent-ckpt-type in_memory")
        add(folder, interval, left=left)
    if interval is not None and config.non_persistent_local_ckpt_dir is not None:
        root = Path(config.non_persistent_local_ckpt_dir)
        folder = _folder_of_run(root, config.save or config.load or "")
        earlier = {_folder_of_run(root, config.load)} - {folder} if config.load else set()
        add(folder, interval, stays=True, earlier=earlier)
    return stores


def _folder_of_run(root: Path, checkpoints: str) -> Path:
    """Return the folder of a run's snapshots, which depends on the folder of its checkpoints.

    So runs that share ``root`` do not collide, and a later run finds the snapshots of an earlier
    one.
    """
    path = os.path.realpath(checkpoints)
    digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
    return root / f"{os.path.basename(path)}_{digest}"


class Snapshots(Callback):
    """The snapshots of a run; all ranks call each method together.

    Args:
        settle: function that waits for the last step's update and counts the step in the progress.
    """

    def __init__(self, run: Run, settle: Callable[[], None]) -> None:
        super().__init__(run)
        self._settle = settle

    def on_train_start(self) -> None:
        """Reserve the memory for all snapshots, and print its size; called before the first step.

        Then discard all snapshots from which a restart of this run must not resume:

        - those of steps after the one at which this run starts: they belong to another run, or are
          useless because some ranks have none of that step;
        - those taken in another parallel layout, such as with another number of replicas. If this
          run has resumed from such snapshots, it takes new ones before it discards them.
        """
        for store in self.run.stores:
            state = self.state()
            num_bytes = store.prepare(*state)
            if self.run.context.rank == 0:
                print(
                    f"> snapshots after every {store.interval} steps: {store.num_copies} for each "
                    f"rank, {num_bytes / 2**20:.1f} MiB on this machine, in {store.folder}",
                    flush=True,
                )
            if store.is_behind:
                store.take(self.run.progress.iteration, *state)
                store.wait()
            store.discard_others(self.run.progress.iteration)

    def after_save(self) -> None:
        """Take the snapshots that are due after this step."""
        iteration = self.run.progress.iteration
        stores = [store for store in self.run.stores if due(iteration, store.interval)]
        if stores:
            self._settle()
            with self.run.context.recorder.phase("save"):
                state = self.state()
                for store in stores:
                    store.take(iteration, *state)

    def on_train_end(self) -> None:
        """Complete all copies; called after the last step.

        The snapshots stay until the run's last checkpoint has been written.
        """
        for store in self.run.stores:
            store.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return what a snapshot holds: the present state, the counters, and the configuration."""
        run = self.run
        assert run.optimizer is not None and run.checkpoints is not None
        with run.parameter_gather.paused():
            state = run.checkpoints.state_in_memory(
                model=run.chunks,
                optimizer=run.optimizer,
                scheduler=run.scheduler,
                run_config=run.config_values,
                ema=run.ema,
                extra_state=run.runner.extra_state,
            )
        return state, run.progress.to_dict(), run.config_values
