"""Writes the page on the quality of datasets: one HTML file that loads nothing from a network."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_ext.extras.quality.measure import Duplicates, Excerpt, Quality
from megatron_ext.extras.quality.results import duplicates_sentence, percent
from megatron_ext.extras.quality.spans import LONG
from megatron_ext.inspect.pages.charts import column_chart
from megatron_ext.inspect.pages.page import page_of, write_page
from megatron_ext.inspect.pages.table import Table, moment, text_of

Bars = list[tuple[str, str, float, str]]
"""Rows of a table with bars: a word, a number, the bar's length in percent, and a note."""


def write_quality_page(quality: Quality, path: Path) -> None:
    """Write the page; raise an OSError if it cannot be written."""
    write_page(path, quality_page(quality, now=time.time()))


def quality_page(quality: Quality, *, now: float) -> str:
    """Return the page; ``now`` is the time of its creation, in seconds since the epoch."""
    names = [Path(prefix).name for prefix in quality.datasets]
    title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    texts = quality.texts
    sample = quality.span_sample
    return page_of(
        __package__,
        "quality.html",
        name=text_of(title, 200),
        datasets=[text_of(prefix, 1000) for prefix in quality.datasets],
        written=moment(now),
        sentences=_sentences(quality),
        tiles=_tiles(quality),
        notes=quality.notes,
        lengths=_length_chart(quality),
        languages=_language_bars(quality),
        exact=_groups(quality, quality.exact),
        exact_sentence=duplicates_sentence(quality.exact, quality),
        near=None if quality.near is None else _groups(quality, quality.near),
        near_sentence="" if quality.near is None else duplicates_sentence(quality.near, quality),
        near_threshold=quality.near_threshold,
        spans=_spans(quality),
        sampled="" if sample is None else f"{sample.tokens:,}",
        repeated="" if sample is None else percent(sample.repeated, sample.tokens),
        long=LONG,
        odd=_odd(quality),
        decoded="" if texts is None else f"{texts.documents:,}",
        tokens=_token_bars(quality, special=False),
        special=_token_bars(quality, special=True),
    )


def _sentences(quality: Quality) -> list[str]:
    """Return the most important results as sentences."""
    tokens = quality.token_figures
    sentences = [
        f"{quality.documents:,} documents with {quality.tokens:,} tokens were looked at.",
    ]
    if quality.near is not None:
        sentences.append(
            f"Exact and near duplicates: {duplicates_sentence(quality.near, quality)}."
        )
    else:
        sentences.append(f"Exact duplicates: {duplicates_sentence(quality.exact, quality)}.")
    of = "" if tokens.vocabulary is None else f" of the tokenizer's {tokens.vocabulary:,}"
    sentences.append(f"{tokens.distinct:,}{of} ids occur.")
    if tokens.outside:
        whose = "the tokenizer lacks" if tokens.vocabulary is not None else "are too large to count"
        sentences.append(f"⚠ {tokens.outside:,} tokens have ids that {whose}.")
    if quality.texts is not None and quality.texts.odd:
        sentences.append(
            f"{quality.texts.odd:,} of {quality.texts.documents:,} decoded documents have at least "
            "1 control or replacement character in 100."
        )
    return sentences


def _tiles(quality: Quality) -> list[tuple[str, str]]:
    tiles = [
        ("documents", f"{quality.documents:,}"),
        ("tokens", f"{quality.tokens:,}"),
        ("median length", f"{quality.lengths.get('median', 0):,.6g}"),
        ("empty documents", f"{quality.empty:,}"),
        ("exact copies", percent(quality.exact.documents, quality.documents)),
    ]
    if quality.near is not None:
        tiles.append(("exact and near", percent(quality.near.documents, quality.documents)))
    special = quality.token_figures.special
    if special is not None:
        count = sum(each.count for each in special)
        tiles.append(("special tokens", percent(count, quality.tokens)))
    if quality.span_sample is not None:
        sample = quality.span_sample
        tiles.append(("in repeated spans", percent(sample.repeated, sample.tokens)))
    return tiles


def _length_chart(quality: Quality) -> object:
    """Draw the number of documents by length, in bins that double in width."""
    columns = [
        (str(first) if first == last else f"{first:,}–{last:,}", str(_short(first)), count)
        for first, last, count in quality.length_bins
    ]
    title = "Documents by length in tokens, each column up to the next number"
    return column_chart(title, columns, unit="documents")


def _short(value: int) -> str:
    """Return a power of two in short form, such as "512" or "4k"."""
    for power, letter in ((30, "G"), (20, "M"), (10, "k")):
        if value >= 1 << power:
            return f"{value >> power}{letter}"
    return str(value)


def _language_bars(quality: Quality) -> Bars:
    languages = {} if quality.texts is None else quality.texts.languages or {}
    total = sum(languages.values())
    most = max(languages.values(), default=1)
    shown = list(languages.items())[:20]
    bars = [(k, f"{v:,}", 100 * v / most, percent(v, total)) for k, v in shown]
    rest = total - sum(count for _, count in shown)
    if rest:
        bars.append(("others", f"{rest:,}", 100 * rest / most, percent(rest, total)))
    return bars


def _token_bars(quality: Quality, *, special: bool) -> Bars:
    tokens = quality.token_figures
    frequencies = (tokens.special or []) if special else tokens.head
    most = max((each.count for each in frequencies), default=1)
    return [
        (
            f"{each.token}"
            if each.text is None
            else f"{each.token}  {text_of(repr(each.text), 60)}",
            f"{each.count:,}",
            100 * each.count / most,
            f"{100 * each.share:.3g}%",
        )
        for each in frequencies
    ]


def _excerpts(quality: Quality, columns: tuple[str, str], excerpts: list[Excerpt]) -> Table:
    table = Table((*columns, "beginning", "where"), numeric=frozenset(columns))
    for each in excerpts:
        texts = text_of(each.text), text_of(quality.places_of(each))
        table.rows.append((f"{each.count:,}", f"{each.tokens:,}", *texts))
    return table


def _groups(quality: Quality, duplicates: Duplicates) -> Table:
    return _excerpts(quality, ("documents", "tokens that could go"), duplicates.largest)


def _spans(quality: Quality) -> Table:
    return _excerpts(quality, ("times", "tokens"), quality.spans)


def _odd(quality: Quality) -> Table:
    table = Table(("share", "tokens", "beginning", "where"), numeric=frozenset({"share", "tokens"}))
    for each in quality.odd:
        share = f"{100 * (each.share or 0):.3g}%"
        table.rows.append(
            (share, f"{each.tokens:,}", text_of(each.text), text_of(quality.places_of(each)))
        )
    return table
