"""Encodes clips and captions into a dataset of shards, in one or more processes.

If a run is killed, encoded clips are kept, and the same command continues the run. A later run
whose list has more rows also keeps them, and encodes only the new rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout

from megatron_ext import limits
from megatron_ext.data.part_pool import Advance, PartPool, Work
from megatron_ext.data.progress import Progress
from megatron_ext.disk.writing import lock_path, write_text
from megatron_ext.errors import DataError, MegatronExtError, say_to_stderr
from megatron_ext.video.config.encoding import (
    HASHED,
    PATCH,
    EncodeConfig,
)
from megatron_ext.video.data import shards
from megatron_ext.video.data.clips import Clip, list_folder, read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import (
    ClipEncoder,
    Dropped,
    PlannedClip,
    check_codec,
    encoder_of,
    plan_clips,
    rate_report,
    report,
    sample_rate,
)
from megatron_ext.video.data.geometry import Drop
from megatron_ext.video.data.manifest import (
    folders_of,
    make_manifest,
    sample_options,
    weights_stamp,
)
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.register import (
    REGISTER,
    Entry,
    Register,
    read_register,
    refuse_other_options,
    row_keys,
    write_register,
)
from megatron_ext.video.data.vae import needs_tiles, seam_report

Say = Callable[[str], None]
_PARTS = "parts"
"""The folder in a dataset that holds parts: encoded clips whose shard is not finished."""
_MOST_CLIPS_OF_A_PART = 16
_PARTS_OF_A_WORKER = 4
"""The least number of parts per worker.

With few parts, workers would wait long for the last one."""


def preprocess(options: VideoPreprocessOptions, say: Say = say_to_stderr) -> None:
    """Encode a list of clips into a dataset; ``say`` prints messages.

    Clips that were encoded before an error are kept for the next run.
    """
    with _one_thread():
        _preprocess(options, say)


def _preprocess(options: VideoPreprocessOptions, say: Say) -> None:
    start = time.monotonic()
    folder = Path(options.output)
    device = torch.device(options.device)
    codec = build_codec(options.codec, device, options.encode.clip_seed)
    check_codec(options.plan, codec, options.encode)
    clips = read_list(options.input, say)
    encoder = encoder_of(options, device, codec)
    with _locked(folder):
        about = sample_options(options, encoder)
        same = {**about, "weights": weights_stamp(options)}
        register = _register_of(folder, same)
        samples = _Samples(folder, about, register.fingerprint)
        for name in shards.names_in(folder):
            samples.add_shard(folder, name)
        for name in shards.names_in(folder / _PARTS):
            samples.add_shard(folder / _PARTS, name, check=True)
        planned, dropped = _plan(options, clips, register, samples, say)
        # Write the register before encoding, so that a run after a kill gives the same numbers.
        write_register(folder, register)
        samples.remove_unknown(folder)
        null = encoder.text_encoder.encode([""])
        shards.write_null(folder, null[0][0], null[1][0], options.storage)
        todo = _Todo(options, register, samples, planned)
        _say_seams(encoder, todo, say)
        work = partial(_encode_part, encoder, options, register.fingerprint)
        alone = options.workers == 1 or len(todo.parts) <= 1
        # Worker processes load models of their own, so free the memory of this process's models.
        del codec, encoder
        encode = partial(_encode_here, work) if alone else partial(_encode_in_workers, options, say)
        del work
        encoded = todo.run(encode, say)
        manifest = make_manifest(
            about,
            options.plan,
            register.buckets,
            [entry.fps for entries in register.shards().values() for entry in entries],
            [entry.key for entries in register.shards().values() for entry in entries],
        )
        manifest["folders"] = folders_of(options)
        kept = _publish(folder, manifest, register, samples, dropped)
    for line in [
        *report(dropped, len(clips)),
        *rate_report(list(planned.values()), options.encode),
    ]:
        say(line)
    seconds = time.monotonic() - start
    counts = f"{kept} clips in {len(register.shards())} shards, {len(dropped)} dropped"
    rate = f", {encoded / seconds:.1f} clips/s" if encoded else ", nothing to encode"
    say(f"{counts}, in {seconds:.1f} s{rate} -> {options.output}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder of a dataset, and keep it locked within a ``with`` block.

    Files that an earlier run left half written are removed. If the block raises an error of this
    package and nothing has been written, the folder is removed.
    """
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_path(lock), timeout=0):
            try:
                for half_written in folder.glob("*.writing.*"):
                    half_written.unlink()
                yield
            except MegatronExtError:
                if list(folder.iterdir()) == [lock]:
                    lock.unlink()
                    folder.rmdir()
                raise
    except Timeout:
        raise DataError(
            f"`--output` ({folder}) is being written by another run; wait for it, or give another "
            "folder."
        ) from None
    except OSError as error:
        raise DataError(
            f"`--output` ({folder}) cannot be written ({limits.cause(error, folder)}); what is "
            "encoded is kept, so mend this and run the same command again, or give another folder."
        ) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch compute with one thread within a ``with`` block, as worker processes do.

    Several threads would take sums in another order, so that samples would differ in their last
    bits. Also, OpenMP would hang in forked processes if several threads had run in this one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _register_of(folder: Path, options: Mapping[str, Any]) -> Register:
    """Read the `Register` of the dataset in ``folder``, or make a new one for an empty folder.

    DataError is raised if the stored register was made with other preprocessing options than
    ``options``, and if the folder holds a dataset without a register.
    """
    register = read_register(folder)
    if register is not None:
        before = {**register.options}
        # A flag that is newer than the register counts as its default.
        before["encode"] = {**asdict(EncodeConfig()), **before.get("encode", {})}
        if "latents" in options:
            before.setdefault("latents", options["latents"])
        refuse_other_options(folder, before, options)
        return register
    old = [folder / shards.MANIFEST, *(folder / f"{x}.json" for x in shards.names_in(folder))]
    if any(path.exists() for path in old):
        raise DataError(
            f"`--output` ({folder}) holds a dataset without {REGISTER}, which says what its clips "
            "are; train on it as it is, or give another folder."
        )
    return Register(options)


class _Samples:
    """An index, by key, of the samples that are on disk in finished shards and parts.

    A part holds some samples of a shard that is not finished yet. Clips that were found to be
    damaged are also recorded here; they have no sample.

    Args:
        folder: folder of the dataset.
        about: settings of preprocessing, as the manifest stores them; needed to read shards.
        fingerprint: hash of the preprocessing options; shards made with others are ignored.

    Attributes:
        markers: for each finished shard, by name, the content of its ``.json`` file.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], fingerprint: str) -> None:
        self._folder = folder
        self._about = dict(about)
        self._fingerprint = fingerprint
        self._places: dict[str, tuple[shards.Shard, int]] = {}
        self._damaged: dict[str, list[Any]] = {}
        self.markers: dict[str, dict[str, Any]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._places or key in self._damaged

    def add_shard(self, folder: Path, name: str, *, check: bool = False) -> None:
        """Add the samples of the shard or part ``name`` in ``folder``.

        Do nothing if the shard or part is unfinished, damaged or made with other options. With
        ``check``, also do nothing if its files do not match the digest that a part's ``.json`` has.
        """
        try:
            marker = shards.read_json(folder / f"{name}.json")
            keys = list(marker["keys"])
            damaged = list(marker["dropped"])
            shard = shards.Shard(folder, name, self._about, len(keys))
            if marker["fingerprint"] != self._fingerprint or marker["clips"] != len(keys):
                return
            if check and marker["digest"] != _digest(folder, name):
                return
            self._damaged.update({row[3]: row for row in damaged})
        except (DataError, KeyError, IndexError, TypeError):
            return
        # All copies of a sample are equal. Prefer the first, which is in a shard, because parts are
        # removed.
        for row, key in enumerate(keys):
            self._places.setdefault(key, (shard, row))
        if folder == self._folder:
            self.markers[name] = marker

    def has_shard(self, name: str, entries: Sequence[Entry]) -> bool:
        """Tell whether the shard ``name`` is finished and was made from exactly ``entries``.

        The shard must hold the samples of ``entries`` in this order. Entries of damaged clips have
        no sample; the shard's ``.json`` must list exactly these as damaged.
        """
        marker = self.markers.get(name)
        whole = [entry.key for entry in entries if entry.key not in self._damaged]
        damaged = {entry.key for entry in entries} - set(whole)
        return (
            marker is not None
            and marker["keys"] == whole
            and {row[3] for row in marker["dropped"]} == damaged
        )

    def join(self, name: str, entries: Sequence[Entry], options: VideoPreprocessOptions) -> None:
        """Write the shard ``name`` with the samples of ``entries``, which are on disk already.

        The samples are copied from parts, or from finished shards that this shard replaces.
        """
        names = shards.other_fields(self._about)
        keys = [entry.key for entry in entries if entry.key not in self._damaged]
        with shards.ShardWriter(self._folder, name, names, options.storage) as writer:
            for key in keys:
                writer.copy(*self._places[key])
        damaged = [self._damaged[entry.key] for entry in entries if entry.key in self._damaged]
        marker = _marker(name, self._fingerprint, keys, damaged)
        shards.write_json(self._folder / f"{name}.json", marker)
        for key in keys:
            del self._places[key]
        self.add_shard(self._folder, name)

    def remove_unknown(self, folder: Path) -> None:
        """Remove the parts in the dataset ``folder`` from which this index takes no sample.

        Such a part is unfinished, damaged, made with other options, or copied to a shard already.
        """
        parts = folder / _PARTS
        finished = {shard.name for shard, _ in self._places.values()}
        for path in parts.glob("*") if parts.is_dir() else ():
            if _part_of(path) not in finished:
                path.unlink()


def _digest(folder: Path, name: str) -> str:
    """Return a hash of the content of all files of the part ``name``, except its ``.json``."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob(f"{name}_*")):
        with open(path, "rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def _part_of(path: Path) -> str:
    """Return the name of the part to which a file belongs: its name up to the first "_" or "."."""
    return path.name.partition("_")[0].partition(".")[0]


def _marker(
    name: str, fingerprint: str, keys: Sequence[str], damaged: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return the content of the ``.json`` that marks a shard or a part as finished.

    Args:
        name: name of the shard or the part.
        fingerprint: hash of the options with which the samples were made.
        keys: the keys of the samples, in order.
        damaged: for each clip that could not be decoded: number of its row in the list, its path,
            the error message, key of the missing sample.
    """
    return {
        "format": shards.FORMAT, "name": name, "fingerprint": fingerprint, "clips": len(keys),
        "keys": list(keys), "dropped": list(damaged),
    }  # fmt: skip


def _plan(
    options: VideoPreprocessOptions,
    clips: Sequence[Clip],
    register: Register,
    samples: _Samples,
    say: Say,
) -> tuple[dict[str, PlannedClip], list[Dropped]]:
    """Update the register to match the list of clips, and plan the clips still to encode.

    Return the planned samples by key, and the clips that are left out, with the reason. Rows that
    are in the register keep their numbers and shards. New rows get the next numbers and new shards.
    """
    keys = row_keys(clips, list_folder(options.input))
    _remove_missing_rows(options, dict(zip(keys, clips, strict=True)), register, samples, say)
    numbers = {entry.row: entry.number for entry in register.entries}
    following = count(max(numbers.values(), default=-1) + 1)
    for key in keys:
        if key not in numbers:
            numbers[key] = next(following)
    rows: dict[str, list[Entry]] = {}
    for entry in register.entries:
        rows.setdefault(entry.row, []).append(entry)
    whole = {
        row for row, entries in rows.items() if all(x.shard and x.key in samples for x in entries)
    }
    todo = [(clip, key) for clip, key in zip(clips, keys, strict=True) if key not in whole]
    if whole:
        say(f"{len(keys) - len(todo)} of {len(keys)} clips were encoded before.")
    progress = Progress(len(todo), 0, "clips", verb="Looked at")
    try:
        planned, dropped = plan_clips(
            [clip for clip, _ in todo],
            options.plan,
            options.encode,
            numbers=[numbers[key] for _, key in todo],
            workers=options.workers,
            tick=lambda done: progress.show(done, done),
            may_be_empty=bool(whole),
        )
    finally:
        progress.close()
    # A clip may give several samples, or none if it was dropped: make the entries of its row again.
    row_of_number = {number: row for row, number in numbers.items()}
    by_key = {p.key(row_of_number[p.number]): p for p in planned}
    for bucket in sorted({p.bucket for p in planned}):
        register.bucket_number(bucket)
    shard_of = {entry.key: entry.shard for entry in register.entries}
    fresh: dict[str, list[Entry]] = {row: [] for _, row in todo}
    for key, sample in by_key.items():
        fps = sample_rate(sample, options.encode)
        entry = Entry(key, sample.number, sample.clip.path, shard_of.get(key), fps)
        fresh[entry.row].append(entry)
    for clip, row in todo:
        if not fresh[row]:
            fresh[row] = [Entry(row, numbers[row], clip.path)]
    # Rows that were in the register keep their position; new rows follow.
    in_place: list[Entry] = []
    for row, entries in rows.items():
        in_place += fresh.pop(row, entries)
    register.entries = [*in_place, *chain.from_iterable(fresh.values())]
    _assign_shards(options, register, by_key, shards.names_in(Path(options.output)))
    return by_key, dropped


def _remove_missing_rows(
    options: VideoPreprocessOptions,
    listed: Mapping[str, Clip],
    register: Register,
    samples: _Samples,
    say: Say,
) -> None:
    """Remove rows that are no longer in the list from the register.

    ``listed`` has the clips of the list by key. A missing row that has a sample stays, unless
    ``--drop-missing`` is given. A finished shard that loses a row by this flag gets a new name,
    under which it is written again without the row. DataError is raised if, without the flag, the
    list has none of the register's rows although there are samples.
    """
    gone = [entry for entry in register.entries if entry.row not in listed]
    with_sample = [entry for entry in gone if entry.shard and entry.key in samples]
    if with_sample and len(gone) == len(register.entries) and not options.drop_missing:
        raise DataError(
            f"`--output` ({options.output}) holds {len(with_sample)} samples of clips that are "
            f"not in `--input` ({options.input}), and no other; give a list that has them too, "
            "another folder, or `--drop-missing` to replace them."
        )
    if with_sample:
        paths = {clip.path for clip in listed.values()}
        changed_rows = sum(entry.path in paths for entry in with_sample)
        what = "are taken out" if options.drop_missing else "stay (`--drop-missing` takes them out)"
        say(
            f"{len(with_sample)} samples of rows that are not in the list any more {what}; of "
            f"{changed_rows} the file is in the list, but file or row has changed. First: "
            f"{with_sample[0].path}."
        )
    taken_out = gone if options.drop_missing else [x for x in gone if x not in with_sample]
    keys = {entry.key for entry in taken_out}
    changed = {entry.shard for entry in taken_out if entry.shard in samples.markers}
    names = _new_names(register, shards.names_in(Path(options.output)))
    new_names = {name: next(names) for name in sorted(filter(None, changed))}
    register.entries = [
        replace(entry, shard=new_names.get(entry.shard or "", entry.shard))
        for entry in register.entries
        if entry.key not in keys
    ]


def _new_names(register: Register, on_disk: Iterable[str]) -> Iterator[str]:
    """Yield names for new shards, without end, numbered after all shards that exist.

    ``on_disk`` holds the names of the finished shards; the register also names unfinished ones.
    """
    names = {*on_disk, *register.shards()}
    first = max((shards.number_of(name) for name in names), default=-1) + 1
    return map(shards.shard_name, count(first))


def _assign_shards(
    options: VideoPreprocessOptions,
    register: Register,
    planned: Mapping[str, PlannedClip],
    on_disk: Iterable[str],
) -> None:
    """Assign planned samples that have no shard yet to new shards, by name, in the register.

    ``planned`` has the samples still to encode, by key. ``on_disk`` holds the names of the finished
    shards, which are not used again.
    """
    names = _new_names(register, on_disk)
    without = [x.key for x in register.entries if x.shard is None and x.key in planned]
    size = options.clips_per_shard
    shard_of = {}
    for start in range(0, len(without), size):
        shard_of.update(dict.fromkeys(without[start : start + size], next(names)))
    register.entries = [
        replace(entry, shard=shard_of.get(entry.key, entry.shard)) for entry in register.entries
    ]


@dataclass(frozen=True)
class _Part:
    """Clips of one shard that a worker encodes together.

    Attributes:
        name: the beginning of the names of the part's files. It is random, so that it differs from
            the names of parts of earlier runs.
        shard: name of the shard.
        buckets: for each clip, the number of its bucket in the manifest.
        keys: for each clip, the key of its sample.
    """

    name: str
    shard: str
    clips: list[PlannedClip]
    buckets: list[int]
    keys: list[str]

    def __str__(self) -> str:
        return f"the clips from {self.clips[0].clip.path} to {self.clips[-1].clip.path}"


Encode = Callable[["_Todo", Progress], None]


class _Todo:
    """The work that is left: unfinished shards, and the parts of them that must be encoded."""

    def __init__(
        self,
        options: VideoPreprocessOptions,
        register: Register,
        samples: _Samples,
        planned: Mapping[str, PlannedClip],
    ) -> None:
        self.options = options
        self.fingerprint = register.fingerprint
        self._samples = samples
        self.folder = Path(options.output) / _PARTS
        self._entries = {
            name: entries
            for name, entries in register.shards().items()
            if not samples.has_shard(name, entries)
        }
        missing = {
            name: [entry.key for entry in entries if entry.key not in samples]
            for name, entries in self._entries.items()
        }
        self._total = sum(map(len, register.shards().values()))
        self._missing = sum(map(len, missing.values()))
        share = -(-self._missing // (_PARTS_OF_A_WORKER * options.workers))
        size = max(1, min(_MOST_CLIPS_OF_A_PART, share))
        self.parts: list[_Part] = []
        for name, keys in missing.items():
            for start in range(0, len(keys), size):
                of_part = keys[start : start + size]
                clips = [planned[key] for key in of_part]
                buckets = [register.bucket_number(clip.bucket) for clip in clips]
                part = _Part(f"p{secrets.token_hex(6)}", name, clips, buckets, of_part)
                self.parts.append(part)
        self._parts_of: dict[str, list[_Part]] = {}
        for part in self.parts:
            self._parts_of.setdefault(part.shard, []).append(part)
        self._left = Counter(part.shard for part in self.parts)

    def run(self, encode: Encode, say: Say) -> int:
        """Finish all shards; return the number of clips that were encoded.

        ``encode(todo, progress)`` encodes all parts, here or in worker processes, and calls
        `finish` for each.
        """
        for name in self._entries:
            if not self._left[name]:
                self._join(name)
        if self.parts:
            self.folder.mkdir(exist_ok=True)
            earlier = self._total - self._missing
            progress = Progress(self._total, earlier, "clips", verb="Encoded")
            try:
                encode(self, progress)
            finally:
                progress.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._missing

    def finish(self, number: int) -> None:
        """Register the samples of an encoded part; after the last part of a shard, write the shard.

        ``number`` is the index of the part in ``parts``.
        """
        part = self.parts[number]
        self._samples.add_shard(self.folder, part.name)
        lost = [key for key in part.keys if key not in self._samples]
        if lost:
            raise DataError(
                f"{self.folder / part.name} was damaged before it was joined; check the disk and "
                "run the same command again."
            )
        self._left[part.shard] -= 1
        if not self._left[part.shard]:
            self._join(part.shard)

    def unfinished(self, numbers: Iterable[int]) -> list[int]:
        """Return which of the parts ``numbers`` (indices into ``parts``) are not on disk yet."""
        return [x for x in numbers if not (self.folder / f"{self.parts[x].name}.json").exists()]

    def _join(self, name: str) -> None:
        self._samples.join(name, self._entries[name], self.options)
        joined = {part.name for part in self._parts_of.get(name, ())}
        for path in self.folder.iterdir() if joined else ():
            if _part_of(path) in joined:
                path.unlink()


def _say_seams(encoder: ClipEncoder, todo: _Todo, say: Say) -> None:
    """Say how far the codec's tiles change latents, if it needs tiles for some clip to encode."""
    for part in todo.parts:
        for planned in part.clips:
            if not needs_tiles(encoder.codec, planned.bucket):
                continue
            with suppress(DataError):
                say(seam_report(encoder.codec, encoder.pixels(planned)))
                return


def _encode_here(work: Work, todo: _Todo, progress: Progress) -> None:
    """Encode the parts of ``todo`` in this process; ``work(part, advance)`` encodes one of them."""
    done = 0

    def advance(clips: int, _: int) -> None:
        nonlocal done
        done += clips
        progress.show(done, done)

    for number, part in enumerate(todo.parts):
        work(part, advance)
        todo.finish(number)


def _encode_in_workers(
    options: VideoPreprocessOptions, say: Say, todo: _Todo, progress: Progress
) -> None:
    """Encode the parts of ``todo`` in worker processes."""
    if options.device == "cuda":
        torch.cuda.empty_cache()
    pool = PartPool(
        workers=options.workers,
        start=partial(_start_encoding, options, todo.fingerprint),
        name_of=lambda number: str(todo.parts[number]),
        part_of=lambda number: todo.parts[number],
        place=options.output,
        unfinished=todo.unfinished,
        method=_method(options),
    )
    pool.run(range(len(todo.parts)), progress, say, todo.finish)


def _method(options: VideoPreprocessOptions) -> Literal["fork", "spawn"]:
    """Return "fork" or "spawn", the way to start worker processes.

    Forking is faster, but is used only if there is neither a GPU nor a model. A forked process
    cannot use a GPU that its parent has used, nor a library that has started threads in the parent;
    libraries that run models start threads.
    """
    plain = options.codec.codec == PATCH and options.text_encoder.text_encoder == HASHED
    plain = plain and options.image_encoder.image_encoder is None
    return "fork" if plain and options.device == "cpu" else "spawn"


def _start_encoding(options: VideoPreprocessOptions, fingerprint: str, worker: int) -> Work:
    """Load the models of a worker process; return the function that encodes a part.

    ``worker`` is the number of the worker, by which workers are spread evenly over the GPUs.
    ``fingerprint`` is the hash of the options, for the ``.json`` of parts.
    """
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", worker % torch.cuda.device_count())
    encoder = encoder_of(options, device)
    return partial(_encode_part, encoder, options, fingerprint)


def _encode_part(
    encoder: ClipEncoder,
    options: VideoPreprocessOptions,
    fingerprint: str,
    part: _Part,
    advance: Advance,
) -> None:
    """Encode one part and write its files; its ``.json`` lists the clips that cannot be decoded.

    ``advance`` is called after each clip, for the display of progress.

    Parts are temporary, so the function does not wait until their files have reached the disk.
    Instead, the ``.json`` has a digest, which shows whether a power failure has damaged the part.
    """
    folder = Path(options.output) / _PARTS
    names = shards.other_fields(sample_options(options, encoder))
    damaged: list[list[Any]] = []
    keys = []
    with shards.ShardWriter(folder, part.name, names, options.storage, durable=False) as writer:
        for planned, bucket, key in zip(part.clips, part.buckets, part.keys, strict=True):
            try:
                sample = encoder.sample(planned)
            except DataError as error:
                damaged.append([planned.number, planned.clip.path, str(error), key])
            else:
                writer.add(sample, bucket)
                keys.append(key)
            advance(1, 1)
    marker = _marker(part.name, fingerprint, keys, damaged)
    marker["digest"] = _digest(folder, part.name)
    shards.write_json(folder / f"{part.name}.json", marker, durable=False)


def _publish(
    folder: Path,
    manifest: Mapping[str, Any],
    register: Register,
    samples: _Samples,
    dropped: list[Dropped],
) -> int:
    """Write ``manifest.json``, and ``dropped.jsonl`` with the clips that are left out.

    Remove shards that no longer belong to the dataset. Return the number of samples. DataError is
    raised if no clip could be decoded.
    """
    names = list(register.shards())
    markers = {name: samples.markers[name] for name in names}
    damaged = [
        Dropped(number, path, Drop.UNREADABLE, detail)
        for marker in markers.values()
        for number, path, detail, _ in marker["dropped"]
    ]
    kept: int = sum(marker["clips"] for marker in markers.values())
    if not kept:
        raise DataError(
            f"None of the {len(damaged)} planned clips could be decoded; the first: "
            f"{damaged[0].detail}"
        )
    dropped += damaged
    dropped.sort(key=lambda drop: drop.number)
    lines = [json.dumps({**asdict(d), "reason": d.reason.value}) + "\n" for d in dropped]
    temporary = folder / f"dropped.jsonl.writing.{os.getpid()}"
    write_text(temporary, "".join(lines))
    os.replace(temporary, folder / "dropped.jsonl")
    content = {
        **manifest,
        "shards": [{"name": name, "clips": markers[name]["clips"]} for name in names],
        "dropped": dict(Counter(d.reason.value for d in dropped)),
    }
    shards.write_json(folder / shards.MANIFEST, content)
    for name in shards.names_in(folder):
        if name not in markers:
            with suppress(FileNotFoundError):
                (folder / f"{name}.json").unlink()
            for path in folder.glob(f"{name}_*"):
                path.unlink()
    return kept
