"""Totals of the previewed steps, by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from megatron_ext.inspect.preview.collect import Step
from megatron_ext.inspect.preview.documents import Document, documents_of


@dataclass
class Share:
    """What one source, or all, put into the steps.

    Attributes:
        documents: pieces of documents, as the rows cut them.
        trained, untrained: tokens that are predicted with and without a weight.
        weight: sum of the weights.
    """

    documents: int = 0
    trained: int = 0
    untrained: int = 0
    weight: float = 0.0

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return self.trained + self.untrained

    def add(self, document: Document) -> None:
        """Count a document."""
        targets = document.targets
        self.documents += 1
        self.trained += document.trained
        self.untrained += len(targets) - document.trained
        self.weight += float(targets.astype(np.float64).sum())


@dataclass
class Summary:
    """Totals over all data-parallel ranks.

    Attributes:
        rows, empty_rows: in all, and of padding only.
        positions, padding: in all, and those that hold nothing.
        by_source: in the order in which sources appear.
        whole: of all sources.
        lengths: of the shortest and longest document, in tokens; None without documents.
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
        """Share of the positions that hold a token."""
        return 1 - self.padding / self.positions if self.positions else 0.0


def source_of(document: Document) -> str:
    """The file or prefix of a document."""
    return "unknown" if document.origin is None else document.origin.source


def summarize(steps: Sequence[Step], eod: int) -> Summary:
    """Count what the steps hold.

    Args:
        steps: as `collect` gives them.
        eod: id that ends a document in a stream.
    """
    found = Summary()
    for row in (row for step in steps for row in step.rows):
        documents = documents_of(row, eod)
        found.rows += 1
        found.empty_rows += not documents
        found.positions += row.size
        found.padding += int(row.is_padding.sum())
        found.heaviest = max(found.heaviest, float(row.weights.max(initial=0)))
        for document in documents:
            for share in (
                found.whole,
                found.by_source.setdefault(source_of(document), Share()),
            ):
                share.add(document)
            size = len(document.ids)
            shortest, longest = found.lengths or (size, size)
            found.lengths = min(shortest, size), max(longest, size)
    return found


def table(summary: Summary) -> Table:
    """Trained, untrained and padding tokens, one line for each source and one for all."""
    shown = Table("source", title="what the loss trains", title_justify="left")
    for name in ("documents", "trained", "untrained", "trained %", "sum of weights"):
        shown.add_column(name, justify="right")
    for source, share in summary.by_source.items():
        shown.add_row(source, *cells(share))
    shown.add_section()
    shown.add_row("all", *cells(summary.whole), style="bold")
    return shown


def cells(share: Share) -> list[str]:
    """A line of the table, without its name."""
    percent = f"{100 * share.trained / share.targets:.1f}" if share.targets else "-"
    return [
        f"{share.documents:,}",
        f"{share.trained:,}",
        f"{share.untrained:,}",
        percent,
        f"{share.weight:,.6g}",
    ]


def sentences(summary: Summary, steps: Sequence[Step]) -> list[str]:
    """The other totals, one on a line."""
    found = [
        f"{summary.rows:,} rows, {summary.empty_rows:,} of them empty; {summary.positions:,} "
        f"positions, {100 * summary.filled:.1f}% filled, {summary.padding:,} padding"
    ]
    if summary.lengths is not None:
        shortest, longest = summary.lengths
        found.append(f"documents of {shortest:,} to {longest:,} tokens, as the rows cut them")
    for step in steps:
        line = (
            f"step {step.iteration}: N = {step.targets:,} targets, D = {step.weight:,.6g} weight, "
            f"{step.num_microbatches} micro-batches on each rank"
        )
        depths = [f"{weight:,.6g}" for weight in step.mtp_weights]
        found.append(line + (f"; of the MTP depths {', '.join(depths)}" if depths else ""))
    return found
