"""Prints the quality of datasets as lines, and writes JSON and a list of duplicates to drop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from megatron_ext.disk.writing import cleared, open_new, write_bytes, write_error
from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.extras.quality.measure import Duplicates, Quality
from megatron_ext.extras.quality.spans import LONG

_ROWS = 1 << 16
_TEXT = 72


def check_output(flag: str, path: Path | None) -> None:
    """Raise a ConfigError early if a file cannot be written, before hours of work are lost.

    The file of ``--duplicates-out`` must also end in ``.parquet`` or ``.jsonl``, which selects its
    format. If ``path`` is None, nothing is checked.
    """
    if path is None:
        return
    if (wrong := write_error(flag, str(path), is_file=True)) is not None:
        raise ConfigError(wrong)
    if path.is_dir():
        raise ConfigError(f"`{flag}` ({path}) is a folder; give the name of a file.")
    if flag != "--duplicates-out":
        return
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"`{flag}` ({path}) must end in .parquet or .jsonl; rename it.")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"`{flag}` ({path}) needs the package pyarrow, which is not installed; run `pip "
                "install pyarrow`, or give a name that ends in .jsonl."
            ) from None


def write_json(quality: Quality, path: Path) -> None:
    """Write all statistics as one JSON object."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    _replace(path, orjson.dumps(quality.as_json(), option=option) + b"\n")


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_bytes(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_duplicates(quality: Quality, documents: Documents, path: Path) -> int:
    """Write a row for each document in each duplicate group, and return the number of rows.

    The columns are ``group``, a number from 0 on; ``dataset``, a prefix; ``document``, its number
    in the dataset; and ``kind``: "first" for the one to keep, "exact" if it equals an earlier one,
    else "near". The rows of a group are adjacent.
    """
    duplicates = quality.exact if quality.near is None else quality.near
    batches = (list(rows) for rows in _batches(duplicates, quality.exact, documents))
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    try:
        if path.suffix == ".jsonl":
            with open_new(temporary, "wb") as file:
                for rows in batches:
                    file.writelines(orjson.dumps(row) + b"\n" for row in rows)
                    count += len(rows)
        else:
            import pyarrow as pa
            from pyarrow import parquet

            names = {"group": pa.int64(), "dataset": pa.string(), "document": pa.int64()}
            schema = pa.schema({**names, "kind": pa.string()})
            with parquet.ParquetWriter(cleared(temporary), schema) as writer:
                for rows in batches:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    count += len(rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _batches(
    duplicates: Duplicates, exact: Duplicates, documents: Documents
) -> Iterator[Iterator[dict[str, object]]]:
    """Yield the rows of `write_duplicates` in batches, with groups ordered by their first document.

    ``duplicates`` has the groups to write, which may contain near duplicates. ``exact``, the groups
    of exact duplicates only, decides the ``kind`` of a row.
    """
    all_positions = np.arange(len(duplicates.leaders))
    is_grouped = np.zeros(len(all_positions), dtype=np.bool_)
    later = duplicates.leaders != all_positions
    is_grouped[later] = is_grouped[duplicates.leaders[later]] = True
    grouped = np.flatnonzero(is_grouped)
    leaders, groups = np.unique(duplicates.leaders[grouped], return_inverse=True)
    order = np.argsort(groups, kind="stable")
    grouped = grouped[order]
    groups = groups[order]

    def row(position: int, group: int) -> dict[str, object]:
        dataset, document = documents.place(position)
        kind = "near" if exact.leaders[position] == position else "exact"
        kind = "first" if position == leaders[group] else kind
        return {"group": group, "dataset": dataset, "document": document, "kind": kind}

    for start in range(0, len(grouped), _ROWS):
        some = slice(start, start + _ROWS)
        yield map(row, grouped[some].tolist(), groups[some].tolist())


def percent(part: float, whole: float) -> str:
    """Return a percentage such as "1.25%"; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.3g}%" if whole else "–"


def duplicates_sentence(duplicates: Duplicates, quality: Quality) -> str:
    """Return a sentence on how many documents and tokens could be removed."""
    if not duplicates.groups:
        return "none"
    return (
        f"{duplicates.groups:,} groups; {duplicates.documents:,} documents "
        f"({percent(duplicates.documents, quality.documents)}) with {duplicates.tokens:,} tokens "
        f"({percent(duplicates.tokens, quality.tokens)}) could go"
    )


def lines(quality: Quality) -> list[str]:
    """Return the statistics as lines for a terminal."""
    datasets = len(quality.datasets)
    output = [
        f"quality    {quality.documents:,} documents with {quality.tokens:,} tokens in "
        f"{datasets} {'dataset' if datasets == 1 else 'datasets'}; {quality.empty:,} are empty",
        "lengths    " + ", ".join(f"{k} {v:,.6g}" for k, v in quality.lengths.items()),
        f"exact      {duplicates_sentence(quality.exact, quality)}",
    ]
    output += _group_lines(quality, quality.exact)
    if quality.near is not None:
        output.append(
            f"near       {duplicates_sentence(quality.near, quality)}, exact ones included "
            f"(Jaccard similarity {quality.near_threshold:g})"
        )
        output += _group_lines(quality, quality.near)
    output += _token_lines(quality) + _text_lines(quality) + _span_lines(quality)
    return output + [f"note       {note}" for note in quality.notes]


def _group_lines(quality: Quality, duplicates: Duplicates) -> list[str]:
    lines = []
    for group in duplicates.largest[:3]:
        lines.append(f"  {group.count} documents: {quality.places_of(group)}")
        lines.append(f"    {group.text[:_TEXT]!r}")
    return lines


def _token_lines(quality: Quality) -> list[str]:
    tokens = quality.token_figures
    of = "" if tokens.vocabulary is None else f" of {tokens.vocabulary:,}"
    head = ", ".join(
        f"{each.token if each.text is None else repr(each.text)} {100 * each.share:.3g}%"
        for each in tokens.head[:8]
    )
    lines = [f"tokens     {tokens.distinct:,}{of} ids occur; the most frequent: {head}"]
    if tokens.special is not None:
        share = percent(sum(each.count for each in tokens.special), quality.tokens)
        each_one = ", ".join(f"{s.text!r} {s.count:,}" for s in tokens.special[:8])
        lines.append(f"special    {share} of tokens{': ' if each_one else ''}{each_one}")
    return lines


def _text_lines(quality: Quality) -> list[str]:
    texts = quality.texts
    if texts is None:
        return []
    lines = [
        f"characters {percent(texts.control, texts.characters)} are control or replacement "
        f"characters; {texts.odd:,} of {texts.documents:,} documents have 1 in 100 or more"
    ]
    for odd in quality.odd[:3]:
        lines.append(
            f"  {quality.places_of(odd)} ({100 * (odd.share or 0):.3g}%): {odd.text[:_TEXT]!r}"
        )
    if texts.languages is not None:
        total = sum(texts.languages.values())
        shares = (f"{k} {percent(v, total)}" for k, v in list(texts.languages.items())[:12])
        lines.append(f"languages  {', '.join(shares)}")
    return lines


def _span_lines(quality: Quality) -> list[str]:
    sample = quality.span_sample
    if sample is None:
        return []
    lines = [
        f"repeated   {percent(sample.repeated, sample.tokens)} of tokens lie in spans of {LONG} or "
        "more that occur elsewhere too; the longest:"
    ]
    for span in quality.spans[:5]:
        lines.append(f"  {span.tokens} tokens, {span.count} times: {quality.places_of(span)}")
        lines.append(f"    {span.text[:_TEXT]!r}")
    return lines if quality.spans else [lines[0].removesuffix("; the longest:")]
