"""Opens datasets at addresses of object storage through a cache, and reports on the requests."""

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
"""Seconds between two reports on the requests of a run."""


def store_of(data: DataConfig) -> ObjectStore:
    """Return the reader of datasets in object storage; equal flags give the same object."""
    given = data.object_storage_cache_path
    folder = user_cache() / "data" if given is None else Path(given)
    return _store(folder.absolute(), data.object_storage_cache_size)


@functools.cache
def _store(folder: Path, gibibytes: float) -> ObjectStore:
    return ObjectStore(folder, int(gibibytes * 2**30))


def index_of(data: DataConfig, prefix: str) -> Index:
    """Return the index of a dataset on a disk or in object storage."""
    return store_of(data).index(prefix) if is_address(prefix) else read_index(prefix)


def open_tokens(data: DataConfig, prefix: str, first: int, end: int | None) -> TokenSpan:
    """Open the tokens of a dataset's sequences [first, end).

    If ``end`` is None, the range extends to the last sequence.
    """
    if is_address(prefix):
        return open_remote_span(prefix, first, end, store_of(data))
    return open_span(prefix, first, end, mapped=data.mmap_bin_files)


class StorageNotes(Callback):
    """Reports the requests to object storage that all ranks on this rank's machine have made.

    A report is made about every `INTERVAL` seconds, and at the end of training.

    Args:
        store: the store from which the run reads.
    """

    def __init__(self, run: Run, store: ObjectStore) -> None:
        super().__init__(run)
        self._store = store
        self._before = dict(store.counts())
        self._last_report = time.monotonic()

    def after_step(self) -> None:
        if time.monotonic() - self._last_report > INTERVAL:
            self._report()

    def on_train_end(self) -> None:
        self._report()

    def _report(self) -> None:
        self._last_report = time.monotonic()
        counts = {k: v - self._before[k] for k, v in self._store.counts().items()}
        self.run.reporters.say(note_of(counts))


def note_of(counts: dict[str, int]) -> str:
    """Return a sentence on a machine's requests to object storage.

    ``counts`` has a number for each name in `block_cache.COUNTS`, such as requests and bytes.
    """
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
    """Return the callback that reports requests to object storage.

    Return None if the run reads nothing from there, or if this rank prints nothing.
    """
    store = store_of(run.config.section(DataConfig))
    return StorageNotes(run, store) if run.reporters.sinks and store.is_used else None
