"""Totals of the previewed steps by source, and warnings about suspicious data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from megatron_ext.inspect.preview.rows import Document, Row, Step, documents_of, target_exists
from megatron_ext.inspect.preview.text import SpanSplitter

COLUMNS = ("source", "documents", "trained", "untrained", "trained %", "sum of weights")
NEAR = 3
"""How many trained tokens before an untrained one are searched for the token that ends the turn."""


@dataclass
class Share:
    """Counts of documents and of their predicted tokens, and the sum of the tokens' weights.

    A predicted token is untrained if its weight is 0. A document that is spread over several rows
    is counted once in each of them.
    """

    documents: int = 0
    trained: int = 0
    untrained: int = 0
    weight: float = 0.0

    @property
    def targets(self) -> int:
        return self.trained + self.untrained

    def add(self, document: Document) -> None:
        targets = document.targets
        self.documents += 1
        self.trained += document.trained
        self.untrained += len(targets) - document.trained
        self.weight += float(targets.astype(np.float64).sum())


@dataclass
class Summary:
    """Totals over all data-parallel ranks.

    Attributes:
        empty_rows: rows that hold only padding.
        by_source: counts of each source, in order of appearance; ``whole`` is their total.
        lengths: tokens of the shortest and longest document; None without documents.
        heaviest: the largest weight of a token, at least 0.
    """

    rows: int = 0
    empty_rows: int = 0
    positions: int = 0
    padding: int = 0
    by_source: dict[str, Share] = field(default_factory=dict)
    whole: Share = field(default_factory=Share)
    lengths: tuple[int, int] | None = None
    heaviest: float = 0.0

    @property
    def filled(self) -> float:
        return 1 - self.padding / self.positions if self.positions else 0.0


def source_of(document: Document) -> str:
    return "unknown" if document.provenance is None else document.provenance.source


def summarize(steps: Sequence[Step], eod: int) -> Summary:
    """Count the steps' rows, documents and tokens; ``eod`` is the end-of-document token's id."""
    summary = Summary()
    for row in (row for step in steps for row in step.rows):
        documents = documents_of(row, eod)
        summary.rows += 1
        summary.empty_rows += not documents
        summary.positions += row.size
        summary.padding += int(row.is_padding.sum())
        summary.heaviest = max(summary.heaviest, float(row.weights.max(initial=0)))
        for document in documents:
            summary.whole.add(document)
            summary.by_source.setdefault(source_of(document), Share()).add(document)
            size = len(document.ids)
            shortest, longest = summary.lengths or (size, size)
            summary.lengths = min(shortest, size), max(longest, size)
    return summary


def table(summary: Summary) -> Table:
    shown = Table(COLUMNS[0], title="what the loss trains", title_justify="left")
    for name in COLUMNS[1:]:
        shown.add_column(name, justify="right")
    for source, share in summary.by_source.items():
        shown.add_row(source, *cells(share))
    shown.add_section()
    shown.add_row("all", *cells(summary.whole), style="bold")
    return shown


def cells(share: Share) -> list[str]:
    percent = f"{100 * share.trained / share.targets:.1f}" if share.targets else "-"
    counts = [f"{count:,}" for count in (share.documents, share.trained, share.untrained)]
    return [*counts, percent, f"{share.weight:,.6g}"]


def sentences(summary: Summary, steps: Sequence[Step]) -> list[str]:
    lines = [
        f"{summary.rows:,} rows, {summary.empty_rows:,} of them empty; {summary.positions:,} "
        f"positions, {100 * summary.filled:.1f}% filled, {summary.padding:,} padding"
    ]
    if summary.lengths is not None:
        shortest, longest = summary.lengths
        lines.append(f"documents of {shortest:,} to {longest:,} tokens, as the rows cut them")
    for step in steps:
        line = (
            f"step {step.iteration}: N = {step.targets:,} targets, D = {step.weight:,.6g} weight, "
            f"{step.num_microbatches} micro-batches on each rank"
        )
        depths = [f"{weight:,.6g}" for weight in step.mtp_weights]
        lines.append(line + (f"; of the MTP depths {', '.join(depths)}" if depths else ""))
    return lines


def name_of(document: Document) -> str:
    provenance = document.provenance
    if provenance is None:
        return f"document {document.number} of its row"
    return str(provenance)


def warnings_of(steps: Sequence[Step], splitter: SpanSplitter, eod: int) -> list[str]:
    """Return a sentence for each kind of suspected fault, with its count and first example.

    ``splitter`` tells which tokens are special; ``eod`` is the end-of-document token's id.
    """
    rows = [(step, row, documents_of(row, eod)) for step in steps for row in step.rows]
    conversations = [x for _, row, documents in rows if row.samples is not None for x in documents]

    def place(step: Step, row: Row) -> str:
        return f"step {step.iteration}, rank {row.dp_rank}, micro-batch {row.microbatch + 1}"

    masked = [
        f"{place(step, row)}, row {row.number + 1}"
        for step, row, documents in rows
        if documents and not row.weights.any()
    ]
    return [
        *_some(masked, "rows train no token at all", "they cost compute and teach nothing"),
        *_conversation_warnings(conversations),
        *_turn_ends(conversations, splitter),
        *_some(
            [place(step, row) for step, row, _ in rows if _crosses(row)],
            "rows have attention or a multi-token target that crosses into another document",
            "this is a fault of the data loader",
        ),
    ]


def _some(examples: Sequence[str], what: str, advice: str) -> Iterator[str]:
    if examples:
        yield f"{len(examples)} {what} (the first: {examples[0]}); {advice}."


def _conversation_warnings(documents: Sequence[Document]) -> Iterator[str]:
    yield from _some(
        [name_of(document) for document in documents if not document.trained],
        "conversations have no trained token",
        "check the roles of their messages and their `loss_mask`, or whether truncation took all "
        "of the answer",
    )
    full = [name_of(d) for d in documents if d.trained == len(d.targets) and len(d.targets)]
    if full and len(full) == len(documents):
        yield (
            f"every token of all {len(full)} conversations is trained, prompts included; the mask "
            "of the data is all ones, so check how it was made."
        )
    else:
        yield from _some(
            full,
            "conversations are trained from end to end, prompts included",
            "check the roles of their messages",
        )
    cut = [d for d in documents if d.provenance is not None and d.provenance.cut]
    taken = sum(d.provenance.cut for d in cut if d.provenance is not None)
    yield from _some(
        [name_of(document) for document in cut],
        f"conversations are cut to `--sft-max-length`, {taken} tokens in all are lost",
        "raise it and `--seq-length` to keep them whole",
    )


def _turn_ends(documents: Sequence[Document], splitter: SpanSplitter) -> Iterator[str]:
    """Yield a warning for each special token that follows trained ones but is never trained itself.

    Such a token is probably the end of a turn, which the model then does not learn to write.
    """
    ends: dict[int, str] = {}
    trained: set[int] = set()
    for document in documents:
        weighs = document.targets > 0
        ids = document.ids[-len(weighs) :]
        trained |= set(np.unique(ids[weighs]).tolist())
        for after in (np.flatnonzero(weighs[:-1] & ~weighs[1:]) + 1).tolist():
            # A template may train one or two newlines after the end of a turn.
            last = range(max(0, after - NEAR), after)
            if not any(weighs[i] and splitter.is_special(int(ids[i])) for i in last):
                ends.setdefault(int(ids[after]), name_of(document))
    for token, example in ends.items():
        if token not in trained and splitter.is_special(token):
            yield (
                f"{splitter.text_of(token)} ({token}) follows what is trained, but is never "
                f"trained itself (the first: {example}), so the model does not learn to end its "
                "turn; check the chat template and the mask."
            )


def _crosses(row: Row) -> bool:
    """Return whether attention or an MTP target crosses from one document into the next."""
    if row.samples is not None:
        both = (row.samples[1:] >= 0) & (row.samples[:-1] >= 0)
        if (both & (row.samples[1:] != row.samples[:-1]) & row.reaches[1:]).any():
            return True
    depths = zip(row.mtp_labels, row.mtp_weights, strict=True)
    for depth, (labels, weights) in enumerate(depths, start=1):
        learns = weights > 0
        if (learns & ~target_exists(row, depth)).any():
            return True
        if (labels[:-depth] != row.labels[depth:])[learns[:-depth]].any():
            return True
    return False
