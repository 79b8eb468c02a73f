"""Datasets of a run at addresses of object storage: their cache, and notes on their requests."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from megatron_ext.config.output import user_cache
from megatron_ext.data.indexed import Index, is_address, read_index
from megatron_ext.data.object_store import ObjectStore, open_remote_span
from megatron_ext.data.token_spans import TokenSpan, open_span
from megatron_ext.text.data.config import DataConfig
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run

INTERVAL = 600.0
"""Seconds between two notes on the requests of a run."""


def store_of(data: DataConfig) -> ObjectStore:
    """Return the reader of addresses, which knows what this process and its parent have asked."""
    given = data.object_storage_cache_path
    folder = user_cache() / "data" if given is None else Path(given)
    return _store(folder.absolute(), data.object_storage_cache_size)


@functools.cache
def _store(folder: Path, gibibytes: float) -> ObjectStore:
    return ObjectStore(folder, int(gibibytes * 2**30))


def index_of(data: DataConfig, prefix: str) -> Index:
    """Return the index of a dataset on a disk or at an address."""
    return store_of(data).index(prefix) if is_address(prefix) else read_index(prefix)


def open_tokens(data: DataConfig, prefix: str, first: int, end: int | None) -> TokenSpan:
    """Return the tokens of the sequences from ``first`` to ``end`` - 1 (None: to the last)."""
    if is_address(prefix):
        return open_remote_span(prefix, first, end, store_of(data))
    return open_span(prefix, first, end, mapped=data.mmap_bin_files)


class StorageNotes(Callback):
    """Tells how the requests to object storage went, of all ranks on the reporting rank's machine.

    Args:
        store: the store that the run reads from.
    """

    def __init__(self, run: Run, store: ObjectStore) -> None:
        super().__init__(run)
        self._store = store
        self._before = dict(store.counts())
        self._told = time.monotonic()

    def after_step(self) -> None:
        if time.monotonic() - self._told > INTERVAL:
            self._tell()

    def on_train_end(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        counts = {k: v - self._before[k] for k, v in self._store.counts().items()}
        self.run.reporters.say(note_of(counts))


def note_of(counts: dict[str, int]) -> str:
    """Return a sentence on the requests of a machine; see `block_cache.COUNTS`."""
    bad = counts["failed"] + counts["given_up"] + counts["short"]
    share = bad / max(1, counts["requests"])
    lost = counts["not_kept"]
    full = f"; {lost:,} pages found no space on the disk" if lost else ""
    return (
        f"object storage on this machine: {counts['requests']:,} requests, "
        f"{counts['bytes'] / 2**20:,.1f} MiB; {bad:,} repeated ({share:.1%}: {counts['failed']:,} "
        f"failed, {counts['given_up']:,} too slow, {counts['short']:,} cut short); readers waited "
        f"{counts['waited_us'] / 1e6:,.1f} s{full}"
    )


def storage_notes(run: Run) -> StorageNotes | None:
    """Return the notes of a run; None without addresses, and where nothing is printed."""
    store = store_of(run.config.section(DataConfig))
    return StorageNotes(run, store) if run.reporters.sinks and store.is_used else None
