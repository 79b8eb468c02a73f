"""Downloads what a run loads from object storage, once per machine, before its ranks start.

Each address such as ``s3://bucket/run`` has a local folder, the staging folder. Checkpoints are
copied to it, and then loaded from there like any others.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.files import published
from megatron_ext.checkpoint.publish import check_save_folder
from megatron_ext.checkpoint.remote import RemoteFolder, remote_of
from megatron_ext.checkpoint.stored import passes_over_damaged
from megatron_ext.config.output import CheckpointConfig, split_address, staging_folder
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import generation
from megatron_ext.disk.iterations import iteration_of
from megatron_ext.errors import CheckpointError, held_signals, leave_signals_to

T = TypeVar("T")


def _apart(work: Callable[[], T]) -> T:
    """Run ``work`` in a forked process, and return its result.

    fsspec's file systems start threads, and the caller must have none when it forks the ranks
    later.
    """
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, context, leave_signals_to, (os.getpid(),)) as pool:
        try:
            with held_signals():
                result = pool.submit(work)
            return result.result()
        except KeyboardInterrupt:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            raise


def _step_in(address: str) -> int | None:
    return iteration_of(split_address(address)[1])


def fetched(flag: str, given: str, step: int | None = None) -> Path:
    """Return the local folder of checkpoints for the value of a flag.

    A path is returned as it is. If the value is an address, such as ``s3://bucket/run``, download a
    checkpoint to the address's staging folder on this machine, and return that folder.

    Args:
        flag: name of the flag, for error messages.
        given: value of the flag, a path or an address.
        step: iteration to download. None stands for the one at the end of the address, as in
            ``s3://bucket/run/iter_0000100``, or for the latest if it ends otherwise.
    """
    if "://" not in given:
        return Path(given)
    root = split_address(given)[0]
    remote = RemoteFolder(flag, root, staging_folder(root))
    _apart(partial(remote.fetch, _step_in(given) if step is None else step))
    return staging_folder(given)


def stage(config: RunConfig, *, is_first: bool) -> list[str]:
    """Download the checkpoints that the run loads from addresses such as ``s3://bucket/run``.

    Every process calls this, but each machine downloads once. Return log messages on the copies
    and on skipped checkpoints, the same in all processes. The process with ``is_first``, which is
    rank 0, also checks whether ``--save`` is writable.

    Raises:
        CheckpointError: an address cannot be used.
    """
    checkpoint = config.checkpoint
    if not checkpoint.addresses:
        return []
    _check_machines(config)
    needs_base = FrozenBase.of_run(config.lora, config.training.seed) is not None
    writes = is_first and not config.planning.dry_run
    return _apart(partial(_stage, checkpoint, needs_base=needs_base, writes=writes))


def _check_machines(config: RunConfig) -> None:
    """Raise a CheckpointError if an elastic run on several machines lacks a shared save folder.

    With `--peer-checkpoint-interval` or `--non-persistent-save-interval`, such a run needs a shared
    folder. If ``--save`` is an address, each machine has a staging folder of its own instead.
    """
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    address = config.checkpoint.addresses.get("save")
    settings = config.checkpoint
    keeps = settings.peer_checkpoint_interval or settings.non_persistent_save_interval
    if several and address is not None and keeps and config.fault_tolerance.is_elastic:
        raise CheckpointError.about(
            "--save",
            address,
            "gives several machines no common folder, which an elastic run needs for the "
            "state in their memory",
            "give a folder that all share, or leave out `--peer-checkpoint-interval` and "
            "`--non-persistent-save-interval`",
        )


def _stage(config: CheckpointConfig, *, needs_base: bool, writes: bool) -> list[str]:
    notes = list[str]()
    for address in dict.fromkeys(config.addresses.values()):
        own = (name for name, other in config.addresses.items() if other == address)
        flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in own)
        notes.append(f"{address} ({flags}) has its copy on disk in {staging_folder(address)}.")
    if "save" in config.addresses and writes and config.save is not None:
        # A run on this machine may be writing there. Runs on other machines cannot be seen.
        check_save_folder(config.save)
        target = remote_of(config, Path(config.save))
        assert target is not None
        target.check_writable()
        target.fetch_records()
    goes_on_in_save = config.resume_mode == "auto" or generation() > 0
    weights = config.addresses.get("pretrained_checkpoint", "")
    order = [
        (config.save if goes_on_in_save else None, None),
        (config.load, config.ckpt_step),
        (config.pretrained_checkpoint and str(_root(config)), _step_in(weights)),
    ]
    has_checkpoint = False
    for number, (folder, step) in enumerate(order):
        if folder is None or (has_checkpoint and not (needs_base and number == 2)):
            continue
        remote = remote_of(config, Path(folder))
        if remote is None:
            has_checkpoint = has_checkpoint or bool(published(Path(folder)))
            continue
        fetched = remote.fetch(step, passes_over=passes_over_damaged(config))
        has_checkpoint = has_checkpoint or fetched is not None
        notes += remote.notes
    return notes


def _root(config: CheckpointConfig) -> Path:
    """Return the path in ``--pretrained-checkpoint``; for an address, its staging folder."""
    address = config.addresses.get("pretrained_checkpoint")
    if address is None:
        return Path(config.pretrained_checkpoint or "")
    return staging_folder(split_address(address)[0])


def copy_records(config: CheckpointConfig, *, is_first: bool) -> None:
    """Upload the records of a finished run, such as metrics, if ``--save`` is an address.

    Only rank 0, the process with ``is_first``, uploads. If that fails, only a note is printed.
    """
    remote = None if config.save is None else remote_of(config, Path(config.save))
    if remote is None or not is_first:
        return
    try:
        remote.copy_records()
    except (CheckpointError, OSError) as error:
        print(f"note: the records in {remote.root} could not be copied: {error}", flush=True)
