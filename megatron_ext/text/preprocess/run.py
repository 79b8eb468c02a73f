"""One preprocessing run from options to published datasets."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.errors import ConfigError, DataError, MegatronExtError, say_to_stderr
from megatron_ext.text.preprocess import inputs
from megatron_ext.text.preprocess.encode import (
    BadLine,
    TextEncoder,
    choose_engine,
    parse_line,
    sentence_splitter,
)
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import (
    PartMarker,
    WorkDirectory,
    publish_datasets,
    publish_rejected,
    read_marker,
)
from megatron_ext.text.preprocess.workers import Job, encode_parts
from megatron_ext.text.tokenizers import build_tokenizer
from megatron_ext.text.tokenizers.base import NO_TOKEN
from megatron_ext.text.tokenizers.fast import InexactEngine

_SAMPLE_PLACES = 24
_SAMPLE_BYTES = 8192

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """The outcome of a run; `tokens` sums all keys, `prefixes` has one dataset for each key."""

    prefixes: Sequence[str]
    documents: int
    tokens: int
    input_bytes: int
    rejected: int
    rejected_path: Path | None
    resumed_parts: int
    seconds: float


def preprocess(options: PreprocessOptions, say: Say = say_to_stderr) -> Report:
    """Tokenize the input into one dataset for each key.

    Raises:
        ConfigError, DataError: bad options or input; finished parts are kept for the next run.
    """
    start = time.monotonic()
    # Every worker is a process of its own; threads inside the libraries would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(options.tokenizer)
    if options.append_eod and tokenizer.eod == NO_TOKEN:
        raise ConfigError(
            f"`--append-eod` needs an end-of-document token, but {tokenizer.kind} "
            f"({tokenizer.path}) names none; set eos_token in it, or leave the flag out."
        )
    identity = {
        "keys": list(options.json_keys),
        "append_eod": options.append_eod,
        "streams": options.streams,
        "split": [options.split_sentences, options.keep_newlines, options.lang],
        "tokenizer": dict(tokenizer.unique_identifiers),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    with planned(options, identity, say) as (folder, parts, done):
        resumed = len(done)
        fast, line = choose_engine(tokenizer, _samples(parts, options.json_keys), options.engine)
        say(line)
        splitter = None
        if options.split_sentences:
            splitter = sentence_splitter(options.lang, keep_newlines=options.keep_newlines)
        encoder = TextEncoder(
            tokenizer, fast, options.json_keys, options.streams, splitter, options.append_eod
        )
        dtypes = [optimal_dtype(tokenizer.vocab_size)] * len(options.json_keys)
        job = Job(options, folder, parts, dtypes, encoder)
        try:
            run_parts(job, done)
        except InexactEngine as error:
            say(f"Starting over with {tokenizer.kind}'s own library: {error}.")
            for path in folder.glob("p[0-9]*.*"):
                path.unlink()
            done, resumed = {}, 0
            job = replace(job, encoder=replace(encoder, fast=None))
            run_parts(job, done)
        return publish_job(job, done, resumed, start)


@contextmanager
def planned(
    options: PreprocessOptions, identity: dict[str, Any], say: Say
) -> Iterator[tuple[Path, list[Part], dict[int, PartMarker]]]:
    """Lock the work directory; yield it, the parts of the input, and markers of finished parts.

    The parts of an interrupted run with the same input and settings (``identity``) are resumed;
    otherwise the input is cut anew.
    """
    files = inputs.expand(options.inputs)
    resumable = not any(map(inputs.is_stream, files))
    with WorkDirectory(options.output_prefix, resumable=resumable) as work:
        identities = [inputs.identity_of(path) for path in files]
        fingerprint = {"inputs": identities, "on_bad_line": options.on_bad_line, **identity}
        parts = work.resumed_parts(fingerprint)
        if parts is not None:
            done = work.finished(len(parts))
            if done:
                say(f"Resuming: {len(done)} of {len(parts)} parts are finished already.")
            yield work.folder, parts, done
            return
        work.clear()
        named = [(path, path) for path in files]
        for i, source in enumerate(inputs.needs_spool(files, options.workers)):
            shown = "standard input" if source == "-" else source
            verb = "Copying" if inputs.is_stream(source) else "Unpacking"
            say(f"{verb} {shown} into {work.folder}, to share it among {options.workers} workers.")
            target = work.folder / f"unpacked{i}.jsonl"
            inputs.spool(source, target)
            named = [(str(target), shown) if path == source else (path, s) for path, s in named]
        parts = inputs.cut(named, options.workers, options.part_megabytes, options.smallest_part)
        work.begin(fingerprint, parts)
        yield work.folder, parts, {}


def _samples(parts: Sequence[Part], keys: Sequence[str]) -> list[str]:
    """Return texts from places all over the input; skip bad lines, which the run reports later."""
    chosen = [parts[i * len(parts) // _SAMPLE_PLACES] for i in range(_SAMPLE_PLACES) if parts]
    lines = [line for i, part in enumerate(chosen) for line in _lines_at(part, i)]
    if not lines and parts:  # documents longer than the samples: one of them will do
        lines = next(inputs.blocks(parts[0]), (b"", 0))[0].split(b"\n")[:1]
    texts: list[str] = []
    for line in lines:
        try:
            texts.extend(text for key in parse_line(line, keys) for text in key)
        except BadLine:
            continue
    return texts


def _lines_at(part: Part, place: int) -> list[bytes]:
    """Return whole lines from one place of a part, or from its beginning if it is packed."""
    if part.packing != "plain":
        return next(inputs.blocks(part), (b"", 0))[0][:_SAMPLE_BYTES].split(b"\n")[:-1]
    within = part.num_bytes * (place * 37 % _SAMPLE_PLACES) // _SAMPLE_PLACES
    with open(part.path, "rb") as stream:
        stream.seek(part.start + within)
        return stream.read(_SAMPLE_BYTES).split(b"\n")[1 if within else 0 : -1]


def run_parts(job: Job, done: dict[int, PartMarker]) -> None:
    """Encode the unfinished parts in worker processes and add their markers to `done`."""
    todo = [i for i in range(len(job.parts)) if i not in done]
    encode_parts(job, todo)
    for i in todo:
        marker = read_marker(job.folder, i)
        if marker is None:
            raise DataError(
                f"Part {i} in {job.folder} was damaged before it was joined; check the disk and "
                "run the same command again."
            )
        done[i] = marker


def publish_job(job: Job, done: Mapping[int, PartMarker], resumed: int, start: float) -> Report:
    """Publish datasets and refused lines of a job; return a report, timed from ``start``."""
    markers = [done[i] for i in range(len(job.parts))]
    return Report(
        prefixes=publish_datasets(job.options, job.folder, markers, job.dtypes),
        documents=sum(marker.documents for marker in markers),
        tokens=sum(marker.tokens for marker in markers),
        input_bytes=sum(part.num_bytes for part in job.parts),
        rejected=sum(marker.rejected for marker in markers),
        rejected_path=publish_rejected(job.options, job.folder, job.parts, markers),
        resumed_parts=resumed,
        seconds=time.monotonic() - start,
    )


def run_or_explain(run: Callable[[], Report], say: Say = say_to_stderr) -> int:
    """Call ``run`` and print its report or its errors, one per line; return the exit code."""
    try:
        report = run()
    except MegatronExtError as error:
        for sentence in error.messages:
            say(f"error: {sentence}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        say("Interrupted; finished parts are kept, so run the same command again to go on.")
        return 130
    rate = report.input_bytes / report.seconds / 1e6
    say(
        f"{report.documents} documents, {report.tokens} tokens, {report.input_bytes / 1e6:.1f} MB "
        f"in {report.seconds:.1f} s ({rate:.1f} MB/s) -> {', '.join(report.prefixes)}"
    )
    if report.rejected_path is not None:
        say(f"{report.rejected} bad lines are in {report.rejected_path}, each with its reason.")
    return 0
