"""Checkpoints in object storage, at an address such as ``s3://bucket/run``, through fsspec.

A run writes to a folder on its machine, the staging folder, as if that were its save folder, and
uploads from there. Object storage cannot rename, so completeness needs another sign: a checkpoint
in the object store is whole if it has a manifest and the files listed there have their sizes. The
manifest is uploaded after all other files, and the tracker last. An upload that a killed run left
without a manifest is ignored and removed.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megatron_ext.checkpoint import files, publish, storage
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import TRACKER, Files, folder_of, published
from megatron_ext.checkpoint.manifest import (
    MANIFEST,
    is_part,
    is_shard,
    manifest_of,
    part_of,
    with_parts,
    write_manifest,
)
from megatron_ext.checkpoint.stored import candidates, passes_over_damaged
from megatron_ext.config.output import CheckpointConfig, split_address, staging_folder
from megatron_ext.data.requests import file_system
from megatron_ext.disk.iterations import iteration_of
from megatron_ext.disk.reading import UnreadableFile, kind_of, parse_json, read_bytes
from megatron_ext.disk.writing import cleared, open_descriptor, own_folder, write_bytes, write_text
from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.parallel.collectives import on_every_rank, on_first_rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES = (1.0, 4.0)
"""Seconds to wait before the second and the third attempt; fsspec may retry within each attempt."""
_LOCK = ".staging.lock"


def remote_of(config: CheckpointConfig, folder: Path) -> RemoteFolder | None:
    """Return the object-store folder of which ``folder`` is the local copy, the staging folder.

    Return None if ``folder`` belongs to no address that the flags in ``config`` give.
    """
    for name, address in config.addresses.items():
        root = split_address(address)[0]
        if staging_folder(root) == folder.absolute():
            return _remote(f"--{name.replace('_', '-')}", root, folder)
    return None


@functools.cache
def _remote(flag: str, address: str, folder: Path) -> RemoteFolder:
    return RemoteFolder(flag, address, folder)


def bring(config: CheckpointConfig) -> None:
    """Download the checkpoints that the flags name by address, on every machine.

    All ranks call this together.
    """
    for folder, step, _ in candidates(config):
        remote = remote_of(config, Path(folder))
        if remote is not None:
            fetch = functools.partial(remote.fetch, step, passes_over=passes_over_damaged(config))
            on_every_rank(fetch, f"{remote.address} cannot be read")


class RemoteFolder:
    """The checkpoints and records of a run in an object store, and their local staging folder.

    Records are the files beside the checkpoints, such as metrics, configuration and reports.

    Attributes:
        flag: the flag that gave the address.
        address: the folder in the object store, such as ``s3://bucket/run``.
        root: the staging folder.
        notes: messages on checkpoints that were skipped.
    """

    def __init__(self, flag: str, address: str, root: Path) -> None:
        self.flag = flag
        self.address = address
        self.root = root
        self.notes: list[str] = []
        self._copied: dict[str, tuple[int, int]] = {}

    @property
    def _place(self) -> tuple[Any, str]:
        """Return an fsspec file system opened in this process, and the path of `address` in it."""
        return file_system(self.address, f"`{self.flag}` ({self.address})", CheckpointError)

    def _tried(self, what: str, work: Callable[[], T]) -> T:
        """Call ``work`` until it succeeds, and return its result; wait between calls (`PAUSES`).

        ``what`` names the file or folder for the error message.

        Raises:
            FileNotFoundError: ``work`` raised it; this is not tried again.
            CheckpointError: all attempts failed with other errors.
        """
        for pause in (*PAUSES, None):
            try:
                return work()
            except FileNotFoundError:
                raise
            except Exception as error:
                if pause is None:
                    why = storage.one_line(error)
                    raise CheckpointError(f"{self.address}/{what}: {why}") from error
                time.sleep(pause)
        raise AssertionError

    def _entries(self, name: str = "") -> dict[str, dict[str, Any]]:
        """Return fsspec's entry for each file and folder in the remote folder ``name``, by name.

        An empty ``name`` stands for the folder at the address. Without such a folder, return {}.
        """
        fs, place = self._place
        path = f"{place}/{name}".rstrip("/")

        def look() -> list[dict[str, Any]]:
            fs.invalidate_cache()
            return list(fs.ls(path, detail=True))

        try:
            listing = self._tried(name, look)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = ((entry["name"].strip("/"), entry) for entry in listing)
        # Object storage may list an empty object that stands for the folder itself.
        return {x.rpartition("/")[2]: entry for x, entry in named if x != path.strip("/")}

    def _read(self, name: str) -> bytes | None:
        fs, place = self._place
        try:
            return bytes(self._tried(name, lambda: fs.cat_file(f"{place}/{name}")))
        except FileNotFoundError:
            return None

    def _put(self, path: Path, name: str) -> None:
        """Upload a file, and raise a CheckpointError if it does not arrive whole."""
        fs, place = self._place
        target = f"{place}/{name}"
        size = path.stat().st_size

        def put() -> None:
            if not fs.async_impl:
                # Object storage has no folders. Some clients would try to create them as buckets.
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)
            fs.invalidate_cache()
            arrived = fs.info(target)["size"]
            if arrived != size:
                raise OSError(f"{arrived} bytes have arrived instead of {size}")

        try:
            self._tried(name, put)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.address}/{name}: {storage.one_line(error)}") from error

    def _remove(self, name: str) -> None:
        """Remove a remote folder, its manifest first.

        If the removal is interrupted, what is left does not look like a whole checkpoint.
        """
        fs, place = self._place
        for path, recursive in ((f"{place}/{name}/{MANIFEST}", False), (f"{place}/{name}", True)):
            try:
                self._tried(name, functools.partial(fs.rm, path, recursive=recursive))
            except FileNotFoundError:
                continue

    def _iterations(self) -> list[int]:
        """Return the iterations of whole and partial remote checkpoints, in ascending order."""
        iterations = map(iteration_of, self._entries())
        return sorted(iteration for iteration in iterations if iteration is not None)

    def check_writable(self) -> None:
        """Raise a CheckpointError if nothing can be written to the address.

        Also remove checkpoints there that killed runs have not uploaded completely.
        """
        probe = self.root / ".probe"
        probe.parent.mkdir(parents=True, exist_ok=True)
        write_text(probe, "megatron_ext")
        fs, place = self._place
        try:
            self._put(probe, probe.name)
            self._tried(probe.name, lambda: fs.rm_file(f"{place}/{probe.name}"))
        except (CheckpointError, OSError) as error:
            raise CheckpointError.about(
                self.flag,
                self.address,
                f"cannot be written ({storage.one_line(error)})",
                "give an address that can, or the storage's credentials",
            ) from error
        finally:
            probe.unlink()
        for iteration in self._iterations():
            name = folder_of(self.root, iteration).name
            if MANIFEST not in self._entries(name):
                self._remove(name)

    def upload(self, folder: Path, iteration: int, listed: Files, own: Files) -> None:
        """Upload a checkpoint that is not published yet; all ranks call this together.

        Each rank uploads its own files. Then rank 0 uploads the files that belong to no rank, and
        last the manifest.

        Args:
            folder: the local folder of the checkpoint.
            iteration: its iteration.
            listed: its files, for the manifest, on rank 0.
            own: the files of this rank.

        Raises:
            CheckpointError: on all ranks, if an upload fails on one. The manifest is not uploaded
                then.
        """
        name = folder_of(self.root, iteration).name

        def put(names: Iterable[str]) -> None:
            for file in names:
                self._put(folder / file, f"{name}/{file}")

        def finish() -> None:
            common = [x for x, entry in listed.items() if not (is_shard(x) or is_part(entry))]
            put([*common, *write_manifest(folder, listed)])

        what = f"{self.address} cannot be written"
        on_first_rank(lambda: self._remove(name), what)
        on_every_rank(lambda: put(own), what)
        on_first_rank(finish, what)

    def finish(
        self,
        iteration: int,
        config: CheckpointConfig,
        best: Sequence[BestCheckpoint],
        superseded: Collection[int],
    ) -> None:
        """Upload the tracker and the records, and remove old checkpoints from the object store.

        All ranks call this together, after the checkpoint of ``iteration`` has been published in
        the staging folder. `publish.expired` decides which are old; `publish.tidy` explains the
        other arguments.
        """
        shutil.rmtree(publish.temporary_folder_of(self.root, iteration), ignore_errors=True)

        def work() -> None:
            self._put(self.root / TRACKER, TRACKER)
            self.copy_records()
            older = [other for other in self._iterations() if other < iteration]
            kept = {entry.iteration for entry in best}
            retain = config.save_retain_interval
            keep = config.keep_last
            limits: dict[str, Any] = {"retain": retain, "keep": keep, "superseded": superseded}
            for other in publish.expired(older, **limits, best=kept):
                try:
                    self._remove(folder_of(self.root, other).name)
                except CheckpointError as error:
                    logger.warning("An old checkpoint could not be removed: %s", error)

        on_first_rank(work, f"{self.address} cannot be written")

    def copy_records(self) -> None:
        """Upload records (metrics, configuration, events, reports) that are not uploaded yet.

        A record that has changed since this process uploaded it is uploaded again.
        """
        paths = [*self.root.glob("[!.]*"), *self.root.glob("postmortem_*/*")]
        for path in paths:
            if not path.is_file() or path.name == TRACKER:
                continue
            name = str(path.relative_to(self.root))
            facts = path.stat()
            stamp = facts.st_size, facts.st_mtime_ns
            if self._copied.get(name) != stamp:
                self._put(path, name)
                self._copied[name] = stamp

    def fetch_records(self) -> None:
        """Download each record that is missing in the staging folder, or shorter than in the store.

        Records are files beside the checkpoints, such as metrics. A run that is resumed on another
        machine needs them, since it appends to them.
        """
        fs, place = self._place
        self.root.mkdir(parents=True, exist_ok=True)
        for name, entry in self._entries().items():
            path = self.root / name
            if entry["type"] != "file" or name.startswith(".") or name == TRACKER:
                continue
            if not path.is_file() or path.stat().st_size < entry["size"]:
                self._tried(
                    name, functools.partial(fs.get_file, f"{place}/{name}", str(cleared(path)))
                )

    def fetch(self, step: int | None = None, *, passes_over: bool = False) -> int | None:
        """Download the checkpoint of iteration ``step``; for None, the one that the tracker names.

        Without a tracker, None stands for the latest complete checkpoint.

        Return the iteration of the downloaded checkpoint, or None if no checkpoint can be loaded.
        If ``step`` is None, also write this iteration to the tracker in the staging folder.

        Args:
            passes_over: whether to skip a damaged checkpoint, add a message to `notes`, and try the
                next older one.

        Raises:
            CheckpointError: there is no checkpoint of ``step``, or it is damaged and not skipped.
        """
        with self._exclusive():
            here = published(self.root)
            whole = [i for i in self._iterations() if self._listed(i) is not None]
            for other in here:
                self._drop_unless_same(other, other in whole)
            tracker = (self._read(TRACKER) or b"").decode(errors="replace").strip()
            newest = int(tracker) if step is None and tracker.isdigit() else step
            if step is not None and step not in whole:
                raise CheckpointError.about(
                    self.flag,
                    self.address,
                    f"holds no checkpoint of iteration {step}, but those of {whole}",
                    "give another iteration",
                )
            usable = [i for i in reversed(whole) if newest is None or i <= newest]
            for number, iteration in enumerate(usable):
                fault = self._download(iteration)
                if fault is None:
                    if step is None:
                        files.write_durably(self.root / TRACKER, str(iteration))
                    return iteration
                where = f"{self.address}/{folder_of(self.root, iteration).name}"
                if not passes_over:
                    older = [i for i in usable[number + 1 :] if self._size_fault(i) is None]
                    advice = f"`--ckpt-step {older[0]}`" if older else "another address"
                    raise CheckpointError(f"{where} cannot be loaded: {fault}; give {advice}.")
                self.notes.append(f"{where} is passed over: {fault}")
        return None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold a file lock in this context, so that one process per machine downloads at a time."""
        self.root.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_descriptor(self.root / _LOCK, os.O_RDWR | os.O_CREAT), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            yield

    def _listed(self, iteration: int) -> bytes | None:
        """Return the manifest of a checkpoint in the store; None if the upload was not finished."""
        return self._read(f"{folder_of(self.root, iteration).name}/{MANIFEST}")

    def _drop_unless_same(self, iteration: int, is_there: bool) -> None:
        """Remove a checkpoint from the staging folder unless its manifest equals the remote one.

        ``is_there`` says whether the object store has a complete checkpoint of this iteration; if
        it has none, the local one is removed, too.
        """
        folder = folder_of(self.root, iteration)
        own = folder / MANIFEST
        if is_there and own.is_file() and read_bytes(own) == self._listed(iteration):
            return
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

    def _remote_files(self, iteration: int) -> Files:
        folder = folder_of(self.root, iteration).name
        place = f"{self.address}/{folder}/{MANIFEST}"
        content = parse_json(self._listed(iteration) or b"", place)
        if not isinstance(content, dict):
            raise UnreadableFile(place, f"it holds {kind_of(content)} instead of an object")
        root = manifest_of(content, place)

        def read(name: str) -> Files:
            stored = self._read(f"{folder}/{name}") or b""
            return part_of(stored, root[name], f"{self.address}/{folder}/{name}")

        return with_parts(root, read)

    def _size_fault(self, iteration: int) -> str | None:
        """Describe the first remote file that is missing or has a wrong size; None if all fit."""
        there = self._entries(folder_of(self.root, iteration).name)
        try:
            for name, expected in self._remote_files(iteration).items():
                size = there.get(name, {"size": None})["size"]
                if size is None:
                    return f"{name} is missing"
                if size != expected["bytes"]:
                    return f"{name} has {size} bytes instead of {expected['bytes']}"
        except MegatronExtError as error:
            return str(error).rstrip(".")
        return None

    def _download(self, iteration: int) -> str | None:
        """Download a checkpoint to the staging folder, unless it is there already.

        Return None on success, otherwise the reason why it cannot be downloaded.
        """
        final = folder_of(self.root, iteration)
        if (fault := self._size_fault(iteration)) is not None:
            return fault
        listed = self._remote_files(iteration)
        if final.is_dir() and files.size_fault(final, listed) is None:
            return None
        temporary = publish.temporary_folder_of(self.root, iteration)
        if final.is_dir():
            # The staging folder may hold a published checkpoint with only the files of this
            # machine's ranks.
            shutil.rmtree(temporary, ignore_errors=True)
            os.rename(final, temporary)
        own_folder(temporary)
        try:
            for name, expected in listed.items():
                if not files.is_plain_name(name):
                    return f"{MANIFEST} names {name}, which does not lie in its folder"
                self._get(f"{final.name}/{name}", temporary / name, expected)
        except (CheckpointError, OSError) as error:
            return str(error).rstrip(".")
        write_bytes(temporary / MANIFEST, self._listed(iteration) or b"")
        os.rename(temporary, final)
        return None

    def _get(self, name: str, path: Path, expected: dict[str, Any]) -> None:
        """Download the file ``name`` to ``path`` and verify it, unless ``path`` is whole already.

        ``expected`` has the file's size and checksum, as in a manifest.
        """
        fs, place = self._place

        def get() -> None:
            fs.get_file(f"{place}/{name}", str(cleared(path)))
            if not files.is_unchanged(path, expected):
                raise OSError("it does not match its checksum")

        if not path.is_file() or not files.is_unchanged(path, expected):
            self._tried(name, get)
