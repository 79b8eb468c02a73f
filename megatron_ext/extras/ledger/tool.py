"""The program tools/ledger.py: prints or exports which documents a run has read."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_ext import limits
from megatron_ext.config.flags import NATURAL
from megatron_ext.disk.events import read_events
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import ConfigError, MegatronExtError, tell_errors
from megatron_ext.extras.ledger.counts import Use, check_of, compare, uses
from megatron_ext.extras.ledger.documents import Documents, Rows
from megatron_ext.extras.ledger.ledger import Ledger, Read
from megatron_ext.extras.ledger.step_record import Steps
from megatron_ext.text.data.prefixes import plain_prefix
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer

_SHOWN_STAGES = 8
"""Largest number of stages (see `_stages`) that are shown in separate rows even if similar."""
_SHOWN_ROWS = 50
_EXPORTED = 1 << 14
"""Number of samples that are exported at once."""


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return the parser of the program's flags."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="save folder of the run")
    parser.add_argument(
        "--checkpoint",
        type=int,
        help="take only what the checkpoint of this iteration has read",
    )
    parser.add_argument(
        "--with-lost",
        action="store_true",
        help="count steps too that do not, or no longer, count in the weights",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--document",
        nargs=2,
        metavar=("PREFIX", "N"),
        help="where document N of a dataset was read",
    )
    modes.add_argument("--step", type=int, help="the documents of a step")
    modes.add_argument("--spike", action="store_true", help="the documents of each spike")
    modes.add_argument(
        "--compare", type=Path, help="save folder of a run that goes on from this one, or a branch"
    )
    modes.add_argument("--export", type=Path, help="write a row for each part of a document")
    parser.add_argument(
        "--text", action="store_true", help="with --step or --spike, show the texts"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="with --text, let transformers run code of the folder of the run's tokenizer",
    )
    parser.add_argument(
        "--characters",
        type=NATURAL.integer,
        default=300,
        help="characters of each text to show; 0 for all (300)",
    )
    return parser


def run(args: argparse.Namespace, console: Console) -> None:
    """Answer the question that the flags ask; raise a MegatronExtError if that is impossible."""
    ledger = Ledger(args.folder, args.checkpoint)
    texts = None
    if args.text:
        texts = Texts(ledger, args.characters, trust_remote_code=args.trust_remote_code)
    if texts is not None and not args.spike and args.step is None:
        raise ConfigError("`--text` shows the texts of a step; give `--step` or `--spike` too.")
    if args.document is not None:
        prefix, number = args.document
        _show_document(ledger, plain_prefix(prefix), number, console, with_lost=args.with_lost)
    elif args.step is not None:
        steps, first, end = ledger.step(args.step)
        _show_samples(ledger, steps, args.step, (first, end), console, texts)
    elif args.spike:
        _show_spikes(ledger, console, texts)
    elif args.compare is not None:
        _show_comparison(ledger, Ledger(args.compare), console)
    elif args.export is not None:
        console.print(export(ledger, args.export, with_lost=args.with_lost))
    else:
        _show_use(ledger, console, with_lost=args.with_lost)
    if args.step is None and args.compare is None and not args.spike:
        for each in ledger.unknown(with_lost=args.with_lost):
            console.print(f"{_named(each)}: the order is not known, so they are left out.")


def _stages(totals: Sequence[Use]) -> Iterator[list[Use]]:
    """Yield the `Use` objects of each stage as a list.

    A stage is a part of the run with one mixture of sources and one sample length. If there are
    more than `_SHOWN_STAGES`, consecutive stages that differ only in the weights of their mixtures
    share one list.
    """
    by_stage: dict[tuple[int, int], list[Use]] = defaultdict(list)
    for use in totals:
        by_stage[use.stage, use.seq_length].append(use)
    group = list[Use]()
    before = None
    for (_, length), own in by_stage.items():
        kind = length, {use.source for use in own}
        if group and (len(by_stage) <= _SHOWN_STAGES or kind != before):
            yield group
            group = []
        group = [*group, *own]
        before = kind
    yield group


def _show_use(ledger: Ledger, console: Console, *, with_lost: bool) -> None:
    totals = uses(ledger)
    history = ledger.history
    title = f"{ledger.folder}: {history.iteration:,} steps, {history.samples:,} samples"
    table = Table("from sample", "length", "source", "samples", "tokens", "of all", "epochs",
                  title=title)  # fmt: skip
    reasons = dict.fromkeys(reason for use in totals for reason in use.others) if with_lost else {}
    for reason in reasons:
        table.add_column(f"samples, {reason}")
    for group in _stages(totals):
        _add_rows(table, group, list(reasons))
        table.add_section()
    if len({use.stage for use in totals}) > 1:
        _add_rows(table, totals, list(reasons), everything=True)
    console.print(table)
    others = [each for each in [*history.steps, *history.lost] if each.reason is not None]
    for each in others[:_SHOWN_ROWS]:
        console.print(f"{_named(each)}: no part of the weights ({each.reason}).")
    if len(others) > _SHOWN_ROWS:
        console.print(f"{len(others) - _SHOWN_ROWS:,} more are no part of the weights.")
    repeated, missed = check_of(ledger)
    console.print(f"{repeated} samples were read more than once, {missed} were missed.")


def _add_rows(
    table: Table, group: Sequence[Use], reasons: Sequence[str], *, everything: bool = False
) -> None:
    total = sum(use.counted * use.seq_length for use in group) or 1
    for source in dict.fromkeys(use.source for use in group):
        own = [use for use in group if use.source == source]
        tokens = sum(use.counted * use.seq_length for use in own)
        table.add_row(
            "all" if everything else f"{group[0].stage:,}",
            "" if everything else f"{own[0].seq_length}",
            source,
            f"{sum(use.counted for use in own):,}",
            f"{tokens:,}",
            f"{tokens / total:.2%}",
            f"{tokens / own[0].tokens:.3f}",
            *(f"{sum(use.others[reason] for use in own):,}" for reason in reasons),
        )


def _named(steps: Steps) -> str:
    first = steps.iteration + 1
    last = steps.done
    which = f"Step {first}" if first == last else f"Steps {first} to {last}"
    return f"{which} (samples {steps.sample:,} to {steps.stop - 1:,})"


def _show_document(
    ledger: Ledger, prefix: str, number: str, console: Console, *, with_lost: bool
) -> None:
    if not number.isdigit():
        raise ConfigError(
            f"`--document` ({prefix} {number}) must end with the number of a document, from 0 on."
        )
    reads = ledger.reads_of(prefix, int(number), with_lost=with_lost)
    counted = [read for read in reads if read.reason is None]
    documents = ledger.documents_of(prefix)
    length = documents.length(int(number))
    begin, end = documents.range_of(int(number))
    name = f"Document {number} of {prefix} ({length:,} tokens)"
    if begin >= end:
        console.print(f"{name} is not in the split that is trained.")
        return
    times = np.zeros(length, dtype=np.int64)
    for read in counted:
        times[read.begin : read.end] += 1
    steps, samples = (len({getattr(r, x) for r in counted}) for x in ("step", "sample"))
    answer = (
        f"was read in {steps:,} steps and {samples:,} samples: {(times > 0).mean():.1%} of its "
        f"tokens, each {times.min()} to {times.max()} times, {times.mean():.2f} on average."
    )
    console.print(f"{name} {answer if counted else 'was read in no step that counts.'}")
    if reads:
        console.print(_reads_table(reads, with_lost=with_lost))


def _reads_table(reads: Sequence[Read], *, with_lost: bool) -> Table:
    table = Table("step", "sample", "tokens of the document")
    if with_lost:
        table.add_column("counts")
    for read in reads[:_SHOWN_ROWS]:
        where = f"{read.begin:,} to {read.end - 1:,}"
        counts = [read.reason or "yes"] if with_lost else []
        step = "?" if read.step is None else f"{read.step:,}"
        table.add_row(step, f"{read.sample:,}", where, *counts)
    if len(reads) > _SHOWN_ROWS:
        table.caption = f"and {len(reads) - _SHOWN_ROWS:,} more; --export has all"
    return table


class Texts:
    """Decodes the tokens of documents with the tokenizer of the run's configuration.

    Args:
        characters: number of characters after which a text is cut; 0 for no limit.
        trust_remote_code: whether code in the tokenizer's folder may run. The run's configuration
            file cannot allow this.
    """

    def __init__(self, ledger: Ledger, characters: int, *, trust_remote_code: bool) -> None:
        self._characters = characters
        settings = ledger.section(TokenizerConfig)
        for note in [] if trust_remote_code else ledger.withheld[TokenizerConfig]:
            print(f"note: {note}", file=sys.stderr)
        settings = dataclasses.replace(settings, trust_remote_code=trust_remote_code)
        self._tokenizer: Tokenizer = build_tokenizer(settings)

    def of(self, documents: Documents, begin: int, length: int) -> str:
        """Return ``length`` tokens of a dataset as a quoted text, cut after ``characters``.

        ``begin`` is the index of the first one in the dataset's file.
        """
        ids = documents.read(begin, length).tolist()
        valid = [i for i in ids if 0 <= i < self._tokenizer.vocab_size]
        text = self._tokenizer.detokenize(valid, skip_special_tokens=False)
        shown = text[: self._characters] if self._characters else text
        return repr(shown) + ("…" if len(shown) < len(text) else "")


def _show_samples(
    ledger: Ledger,
    steps: Steps,
    step: int,
    samples: tuple[int, int],
    console: Console,
    texts: Texts | None,
) -> None:
    order = ledger.order_of(steps)
    rows = ledger.rows(order, *samples)
    length = order.seq_length(samples[0])
    note = "" if steps.reason is None else f", no part of the weights ({steps.reason})"
    table = Table("sample", "place", "source", "document", "tokens of the document",
                  title=f"step {step}{note}: samples {samples[0]:,} to {samples[1] - 1:,} of "
                  f"{length:,} tokens")  # fmt: skip
    if texts is not None:
        table.add_column("text", overflow="fold")
    for sample, column, source, document, begin, tokens in zip(*_lists(rows), strict=True):
        own = order.sources[source]
        documents = ledger.documents(ledger.name_of(own), own.tokens)
        first = int(documents.starts[document])
        whole = int(documents.starts[document + 1]) - first
        where = f"{begin:,} to {begin + tokens - 1:,} of {whole:,}"
        shown = [] if texts is None else [texts.of(documents, first + begin, tokens)]
        table.add_row(
            f"{sample:,}", f"{column:,}", documents.prefix, f"{document:,}", where, *shown
        )
    console.print(table)


def _lists(rows: Rows) -> Iterator[list[int]]:
    names = ("samples", "columns", "sources", "documents", "begins", "lengths")
    return (getattr(rows, name).tolist() for name in names)


def _show_spikes(ledger: Ledger, console: Console, texts: Texts | None) -> None:
    events = [event for event in read_events(ledger.folder) if event["kind"] == "spike"]
    if not events:
        console.print(f"{ledger.folder} tells of no spike; `--on-spike log` looks for them.")
    for event in events:
        leaped = ", ".join(
            f"{name} {event[name]:.6g} (limit {event['limits'][name]:.6g})"
            for name in event["leaped"]
        )
        console.print(f"Spike in step {event['iteration']}: {leaped}, {event['action']}.")
        step = event["iteration"]
        first = event["first_sample"]
        end = event["last_sample"] + 1
        steps = ledger.steps_with(step, first)
        if steps is None:
            console.print(f"Its samples, {first:,} to {end - 1:,}, are not in the record.")
        else:
            _show_samples(ledger, steps, step, (first, end), console, texts)


def _show_comparison(first: Ledger, second: Ledger, console: Console) -> None:
    branch, rows = compare(first, second)
    table = Table(
        "source", f"up to step {branch}", f"later in {first.folder}", f"later in {second.folder}",
        "later in both", "again", "missed", title="samples",
    )  # fmt: skip
    for each in rows:
        counts = (each.before, each.first, each.second, each.both, each.repeated, each.lost)
        table.add_row(each.source, *(f"{count:,}" for count in counts))
    console.print(table)
    repeated, lost = (sum(getattr(each, name) for each in rows) for name in ("repeated", "lost"))
    console.print(
        f"{second.folder} goes its own way after step {branch}. It read {repeated} samples again "
        f"that {first.folder} had read up to there, and missed {lost}."
    )


def export(ledger: Ledger, path: Path, *, with_lost: bool) -> str:
    """Write a parquet file with a row for each part of a document that a sample contains.

    ``with_lost`` adds the rows of steps whose updates are not part of the weights. The result is a
    sentence on what was written.

    Raises:
        ConfigError: pyarrow is missing, or the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            f"`--export` ({path}) needs pyarrow, which is not installed; run `pip install pyarrow`."
        ) from None
    whole = pa.int64()
    text = pa.dictionary(pa.int32(), pa.string())
    names = ("step", "sample", "place", "document", "begin", "length")
    schema = pa.schema([*((name, whole) for name in names), ("source", text), ("reason", text)])
    count = 0
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open_new(temporary, "wb") as file, pq.ParquetWriter(file, schema) as writer:
            for block in _blocks(ledger, with_lost=with_lost):
                writer.write_table(pa.table(block).cast(schema))
                count += len(block["step"])
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"`--export` ({path}) cannot be written ({limits.cause(error, path)}); give another "
            "path."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return f"wrote {count:,} rows to {path}"


def _blocks(ledger: Ledger, *, with_lost: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows to export in blocks of samples, each a dict from column name to values.

    ``with_lost`` adds the rows of steps whose updates are not part of the weights.
    """
    for steps in ledger.steps(with_lost=with_lost):
        if steps.order is None:
            continue
        order = ledger.order_of(steps)
        names = np.array([ledger.name_of(source) for source in order.sources], dtype=object)
        for first in range(steps.sample, steps.stop, _EXPORTED):
            rows = ledger.rows(order, first, min(first + _EXPORTED, steps.stop))
            step: Any = np.full(len(rows.samples), None)
            if steps.batch is not None:
                step = steps.iteration + 1 + (rows.samples - steps.sample) // steps.batch
            yield {
                "step": step,
                "sample": rows.samples,
                "place": rows.columns,
                "document": rows.documents,
                "begin": rows.begins,
                "length": rows.lengths,
                "source": names[rows.sources],
                "reason": np.full(len(rows.samples), steps.reason, dtype=object),
            }


def main(argv: Sequence[str], description: str) -> int:
    """Answer a question about a run's record; return 0, or 2 after an error, which is printed."""
    args = parser_of(description).parse_args(argv)
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False, markup=False)
    try:
        run(args, console)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2
    return 0
