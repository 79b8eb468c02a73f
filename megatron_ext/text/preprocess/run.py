"""Runs preprocessing, from the options to the published datasets.

The input is cut into parts, which are encoded separately. Each finished part has a marker, a file
with counts of what was encoded. After an interruption, the same command encodes the other parts.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError, MegatronExtError, say_to_stderr
from megatron_ext.text.preprocess import inputs
from megatron_ext.text.preprocess.datasets import publish_datasets, publish_rejected
from megatron_ext.text.preprocess.encode import EMPTY, ENDS_WITHIN, TWICE, UNREAD
from megatron_ext.text.preprocess.folders import key_of_texts, write_list
from megatron_ext.text.preprocess.inputs import Part, Source
from megatron_ext.text.preprocess.jobs import Build, Encoding, Job, Say, unfinished
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.packed import is_stream, packing_of
from megatron_ext.text.preprocess.parts import (
    REFUSED,
    PartMarker,
    WorkDirectory,
    read_marker,
    replace_file,
)
from megatron_ext.text.preprocess.starts import is_array, unpack_array
from megatron_ext.text.preprocess.tables import unread_columns
from megatron_ext.text.preprocess.texts import TextEncoding
from megatron_ext.text.preprocess.workers import encode_parts
from megatron_ext.text.tokenizers.fast import InexactEngine

_MOST_REMARKS = 40
"""The largest number of JSON keys, or of reasons of refused lines, that one sentence lists."""


@dataclass(frozen=True)
class Report:
    """The outcome of a preprocessing run.

    Attributes:
        prefixes: the prefixes of the datasets that together hold all lines; empty if no dataset was
            published, because there is no token.
        shown: the same prefixes for display; numbered shards are shortened to a brace pattern, such
            as `{00000..00007}`.
        tokens: number of tokens of all keys together.
        rejected_path: the file of refused lines; None if there are none.
        remarks: sentences on parts of the input that were not used, or used in a surprising way.
        resumed_parts: number of parts that an earlier run had finished.
        seconds: duration of the run.
    """

    prefixes: Sequence[str]
    shown: Sequence[str]
    documents: int
    tokens: int
    input_bytes: int
    rejected: int
    rejected_path: Path | None
    remarks: Sequence[str]
    resumed_parts: int
    seconds: float


def preprocess(options: PreprocessOptions, say: Say = say_to_stderr) -> Report:
    """Tokenize the input into one dataset for each JSON key; ``say`` gets progress sentences.

    Raises:
        ConfigError, DataError, MachineFault: options or input are bad, or workers die. Finished
            parts are kept for the next run of the same command.
    """
    start = time.monotonic()
    with encoded(options, TextEncoding, say) as (job, done, resumed):
        report = publish_job(job, done, resumed, start)
    if not report.tokens:
        raise DataError(
            [
                f"`--input` ({' '.join(options.inputs)}) gives no token, with {report.documents} "
                f"empty documents and {report.rejected} refused lines; give files with texts.",
                *report.remarks,
                *_where_rejected(report),
            ]
        )
    return report


@contextmanager
def encoded(
    options: PreprocessOptions, build: Build, say: Say, encoding: Encoding | None = None
) -> Iterator[tuple[Job, dict[int, PartMarker], int]]:
    """Encode all parts; yield (job, {part number: marker of the part}, number of resumed parts).

    Resumed parts are those that an earlier run had finished. The work directory is removed at the
    end of the ``with`` block, unless an error leaves parts that a later run can resume. If
    ``encoding`` is None, ``build(options)`` makes the `Encoding`.
    """
    # Workers are processes, one per core; threads inside the libraries would compete with them.
    with _without_threads():
        encoding = encoding or build(options)
        with planned(options, encoding.identity, say) as (work, parts, done):
            job = _job(options, work, parts, encoding, say)
            resumed = len(done)
            try:
                run_parts(job, done, say)
            except InexactEngine as error:
                kind = options.tokenizer.tokenizer_type
                say(f"Starting over with {kind}'s own library: {error}.")
                work.restart()
                done = {}
                resumed = 0
                encoder = encoding.encoder(fast=False)
                job = replace(job, key=work.key, encoder=encoder, fast=False)
                run_parts(job, done, say)
            yield job, done, resumed


@contextmanager
def _without_threads() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _job(
    options: PreprocessOptions,
    work: WorkDirectory,
    parts: Sequence[Part],
    encoding: Encoding,
    say: Say,
) -> Job:
    fast = encoding.choose_engine(parts, say)
    encoder = encoding.encoder(fast=fast)
    return Job(options, work.folder, work.key, parts, encoding, encoder, fast)


def plan_for_slurm(options: PreprocessOptions, build: Build, say: Say = say_to_stderr) -> None:
    """Cut the input into parts, and write the script of a Slurm job array that encodes them.

    ``build(options)`` makes the `Encoding`. The script gets the name that ``--slurm-script`` gives;
    it is not submitted.
    """
    from megatron_ext.text.preprocess.slurm import write_script

    encoding = build(options)
    with planned(options, encoding.identity, say) as (work, parts, _):
        if not work.resumable:
            raise ConfigError(
                "`--slurm-script` needs inputs that can be read again, but one is a stream; write "
                "it to a file first, or leave the flag out."
            )
        job = _job(options, work, parts, encoding, say)
        todo = unfinished(job, range(len(parts)))
        if not todo:
            raise ConfigError(
                f"`--slurm-script` ({options.slurm_script}) would hold no work, since none of the "
                f"{len(parts)} parts of the input is left to encode; run without the flag to join "
                "them."
            )
        write_script(job, todo, Path(options.slurm_script or ""), say)
        work.keep = True


@contextmanager
def planned(
    options: PreprocessOptions, identity: dict[str, Any], say: Say
) -> Iterator[tuple[WorkDirectory, list[Part], dict[int, PartMarker]]]:
    """Lock the work directory; yield (the directory, parts of the input, {part number: marker}).

    Only finished parts have a marker. The parts of an interrupted run are used again if it had the
    same input and settings; otherwise the input is cut into new parts. ``identity`` holds the
    settings that determine the tokens.
    """
    files = inputs.expand(options.inputs)
    resumable = not any(map(is_stream, files))
    with WorkDirectory(options.output_prefix, resumable=resumable) as work:
        identities = [inputs.identity_of(path) for path in files]
        fingerprint = {"inputs": identities, "on_bad_line": options.on_bad_line, **identity}
        parts = work.resumed_parts(fingerprint)
        if parts is not None:
            replace_file(work.folder / "started", str(time.time()))
            done = work.finished(len(parts))
            if done:
                say(f"Resuming: {len(done)} of {len(parts)} parts are finished already.")
            yield work, parts, done
            return
        work.clear()
        replace_file(work.folder / "started", str(time.time()))
        sources = _sources(options, files, work.folder, say)
        size = options.part_megabytes
        smallest = options.smallest_part
        parts = inputs.cut(sources, options.all_workers, size, smallest, options.columns)
        work.begin(fingerprint, parts)
        yield work, parts, {}


def _sources(
    options: PreprocessOptions, files: Sequence[str], folder: Path, say: Say
) -> list[Source]:
    """Return the files to cut into parts: the inputs themselves, or files made from them.

    A stream is copied. If there are more workers than inputs, files that cannot be cut (compressed
    files, and tables of one group) are unpacked. The items of a JSON array, and the names of a
    folder's texts, are written to a file, one per line. ``folder`` is where such files are written.
    The paths are absolute, so that a run resumed from another current folder reads the same files.
    """
    workers = options.all_workers
    copied = inputs.needs_spool(files, workers, options.columns)
    sources = []
    unread: Counter[str] = Counter()
    for i, path in enumerate(files):
        shown = "standard input" if path == "-" else path
        target = Path(os.path.abspath(folder)) / f"unpacked{i}.jsonl"
        if path in copied:
            verb = "Copying" if is_stream(path) else "Unpacking"
            say(f"{verb} {shown} into {folder}, to share it among {workers} workers.")
            inputs.spool(path, target, options.columns)
            path = str(target)
        packing = packing_of(path)
        unread.update(unread_columns(path, packing, options.columns))
        if is_array(path, packing):
            say(f"{shown} is a JSON array; writing its items into {folder}, one in a line.")
            lines = target.with_name(f"items{i}.jsonl")
            unpack_array(path, packing, shown, lines)
            target.unlink(missing_ok=True)
            sources.append(Source(str(lines), shown, "array"))
        elif path == str(target):
            sources.append(Source(path, shown, packing))
        elif packing == "texts":
            key_of_texts(path, options.columns)
            write_list(os.path.abspath(path), target)
            sources.append(Source(str(target), shown, "texts"))
        else:
            sources.append(Source(os.path.abspath(path), shown, packing))
    if unread:
        names = ", ".join(f"{name} ({files} files)" for name, files in sorted(unread.items()))
        say(f"Columns of the tables that are not used: {names}.")
    return sources


def run_parts(job: Job, done: dict[int, PartMarker], say: Say) -> None:
    """Encode the parts that ``done`` lacks, by local workers, Slurm or Ray.

    ``done`` maps the number of each finished part to its marker; those of the new parts are added.
    """
    todo = [i for i in range(len(job.parts)) if i not in done]
    if todo:
        encode = encode_parts if job.options.executor == "local" else _encode_elsewhere
        encode(job, todo, say)
    for i in todo:
        marker = read_marker(job.folder, job.key, i)
        if marker is None:
            raise DataError(
                f"Part {i} in {job.folder} was damaged before it was joined; check the disk and "
                "run the same command again."
            )
        done[i] = marker


def _encode_elsewhere(job: Job, todo: Sequence[int], say: Say) -> None:
    from megatron_ext.text.preprocess import cluster, ray_tasks, slurm

    by_slurm = job.options.executor == "slurm"
    executor = slurm.SlurmArrays if by_slurm else ray_tasks.RayTasks
    cluster.encode_on(executor(job, todo, say), job, todo, say)


def publish_job(
    job: Job,
    done: Mapping[int, PartMarker],
    resumed: int,
    start: float,
    *,
    may_be_empty: bool = False,
) -> Report:
    """Publish the datasets and the refused lines of a job; return a report.

    ``done`` maps the number of each part to its marker, ``resumed`` is how many of them an earlier
    run had finished, and ``start`` is the `time.monotonic()` of the run's start. Datasets without
    any token are published only if ``may_be_empty``; otherwise the report has no prefixes.
    """
    markers = [done[i] for i in range(len(job.parts))]
    prefixes = []
    if may_be_empty or any(marker.tokens for marker in markers):
        prefixes = publish_datasets(job.options, job.folder, markers, job.encoding.dtypes)
    return Report(
        prefixes=prefixes,
        shown=_short(job.options, prefixes),
        documents=sum(marker.documents for marker in markers),
        tokens=sum(marker.tokens for marker in markers),
        input_bytes=sum(part.num_bytes for part in job.parts),
        rejected=sum(marker.rejected for marker in markers),
        rejected_path=publish_rejected(job.options, job.folder, job.parts, markers),
        remarks=_remarks(markers, Path(f"{job.options.output_prefix}_remarks.json")),
        resumed_parts=resumed,
        seconds=time.monotonic() - start,
    )


def _remarks(markers: Sequence[PartMarker], path: Path) -> list[str]:
    """Return the report's sentences on blank and refused lines, unused keys, empty texts and so on.

    ``markers`` hold the counts of each part. If there are more than `_MOST_REMARKS` names of one
    kind (keys, or reasons of refused lines), all names are also written to the file ``path``.
    """
    skipped = sum(marker.skipped for marker in markers)
    within = sum(sum(marker.tally.get(ENDS_WITHIN, {}).values()) for marker in markers)
    counted = {
        "Reasons of refused lines": _counted(markers, REFUSED),
        "Keys of the lines that were not used": _counted(markers, UNREAD),
        "Keys that lines have twice, of which the last value was used": _counted(markers, TWICE),
        "Empty texts, stored as documents without a token": _counted(markers, EMPTY),
    }
    remarks = []
    if skipped:
        remarks.append(f"{skipped} blank lines at the end of inputs were skipped.")
    remarks += [f"{what}: {_named(counts)}." for what, counts in counted.items() if counts]
    if within:
        remarks.append(
            f"The end-of-document token is spelled out {within} times within texts, and was stored "
            "as that token there too."
        )
    if any(len(counts) > _MOST_REMARKS for counts in counted.values()):
        named = {what: counts for what, counts in counted.items() if counts}
        replace_file(path, json.dumps(named, indent=1, ensure_ascii=False) + "\n")
        remarks.append(f"All of these names, with the number of lines of each, are in {path}.")
    else:
        path.unlink(missing_ok=True)  # An earlier run may have written it.
    return remarks


def _counted(markers: Sequence[PartMarker], kind: str) -> dict[str, int]:
    """Return {name: count} of one kind of counts, such as `REFUSED`, summed over all parts.

    The largest counts come first, and zeros are left out.
    """
    counts: Counter[str] = Counter()
    for marker in markers:
        counts.update(marker.tally.get(kind, {}))
    counts = +counts  # Drop zeros: encoders tally every key.
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _named(counts: Mapping[str, int]) -> str:
    """Return the first `_MOST_REMARKS` names with counts, and how many more there are, as text."""
    shown = [f"{name} ({count})" for name, count in list(counts.items())[:_MOST_REMARKS]]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])])


def _where_rejected(report: Report) -> list[str]:
    if report.rejected_path is None:
        return []
    return [f"{report.rejected} bad lines are in {report.rejected_path}, each with its reason."]


def _short(options: PreprocessOptions, prefixes: Sequence[str]) -> Sequence[str]:
    shards = len(prefixes) // len(options.json_keys)
    if options.shard_tokens is None or shards == 1:
        return prefixes
    numbers = f"{{00000..{shards - 1:05}}}"
    return [options.dataset_prefix(key, numbers) for key in options.json_keys]


def run_or_explain(run: Callable[[], Report | None], say: Say = say_to_stderr) -> int:
    """Call ``run``; report its result or its errors with ``say``; return the program's exit code.

    The code is 0 after success, 2 after a ConfigError, 130 after Ctrl-C and 1 after any other error
    of this package. If ``run`` returns None, nothing is reported.
    """
    try:
        report = run()
    except MegatronExtError as error:
        for sentence in error.messages:
            say(f"error: {sentence}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        say("Interrupted; finished parts are kept, so run the same command again to go on.")
        return 130
    if report is None:
        return 0
    rate = report.input_bytes / report.seconds / 1e6
    say(
        f"{report.documents} documents, {report.tokens} tokens, {report.input_bytes / 1e6:.1f} MB "
        f"in {report.seconds:.1f} s ({rate:.1f} MB/s) -> {', '.join(report.shown)}"
    )
    if report.shown != report.prefixes:
        say(f"Train on the shards with `--data-path {report.shown[0]}`; bash writes them out.")
    for sentence in (*_where_rejected(report), *report.remarks):
        say(sentence)
    return 0
