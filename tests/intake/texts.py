"""Leaves of rows of texts, in the forms of files that tools/preprocess_data.py reads."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ext.text.preprocess import run
from megatron_ext.text.preprocess.jobs import Job, Say, encode_part
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.tokenizers import TokenizerConfig
from tests.intake.judge import Heard
from tests.intake.leaves import Change
from tests.intake.leaves import changes as changes_of
from tests.text import tiny

WEB = {"text": "A page.", "url": "example.org/a", "score": 0.5, "meta": {"lang": "en", "hops": [1]}}
BOOK = {"title": "A book", "text": ["Part one.", "Part two."], "year": 1999, "author": None}
WIDE = {"text": "A row.", **{f"column_{number}": number for number in range(12)}}
BYTES = {"tokenizer_type": "ByteLevelTokenizer", "vocab_size": 512}
MERGES = {"tokenizer_type": "HuggingFaceTokenizer"}

FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "lines": ("lines", BYTES, {"append_eod": True}, [WEB, {**WEB, "text": "Another."}]),
    "lines of a trained tokenizer": ("lines", MERGES, {"append_eod": True}, [WEB, WEB]),
    "two keys": ("lines", BYTES, {"json_keys": ("text", "title")}, [BOOK, {**BOOK, "year": 7}]),
    "sentences": ("lines", BYTES, {"split_sentences": True}, [{**WEB, "text": "One. Two."}]),
    "many other keys": ("lines", BYTES, {}, [WIDE]),
    "lines to set aside": ("lines", BYTES, {"on_bad_line": "quarantine"}, [WEB, WEB, BOOK]),
    "an array": ("array", BYTES, {}, [WEB, {**BOOK, "text": "One."}]),
    "a byte-order mark": ("marked", BYTES, {}, [WEB]),
    "a mark before each line": ("marked lines", BYTES, {}, [WEB, WEB]),
    "blank lines at the end": ("blank end", BYTES, {}, [WEB]),
    "lines of Windows": ("returns", BYTES, {}, [WEB, WEB]),
    "no end of line": ("open", BYTES, {}, [WEB, WEB]),
    "a packed file": ("packed", BYTES, {}, [WEB, WEB]),
    "a table": ("table", BYTES, {}, [WEB]),
    "a table of two keys": ("table", BYTES, {"json_keys": ("text", "title")}, [BOOK]),
}
"""By a name of the case: the form of the file, flags of the tokenizer and of the tool, rows."""


def bases() -> Iterator[tuple[str, Any]]:
    for name, (form, tokenizer, options, rows) in FILES.items():
        yield name, {"form": form, "tokenizer": tokenizer, "options": options, "rows": rows}


def changes(content: Any, dice: random.Random) -> Iterator[Change]:
    for change in changes_of(content["rows"], dice):
        # An Arrow list holds items of one type.
        if (
            content["form"] == "table"
            and change.kind == "type"
            and isinstance(change.path[-1], int)
        ):
            continue
        yield replace(change, path=("rows", *change.path))


def names_whole(change: Change, text: str) -> bool:
    """Return whether a text says that the key of a row is not used which holds the leaf."""
    lines = text.splitlines()
    unused = "\n".join(x for x in lines if x.startswith(("Keys of the lines", "Columns of")))
    return f" {change.path[2]} (" in unused


def hear(content: Any, folder: Path) -> Heard:
    settings = TokenizerConfig(**content["tokenizer"])
    if settings.tokenizer_type == "HuggingFaceTokenizer":
        settings = replace(settings, tokenizer_model=str(tiny.hf_folder()))
    options = PreprocessOptions(
        inputs=[str(_written(content["form"], content["rows"], folder))],
        output_prefix=str(folder / "out"),
        tokenizer=settings,
        **content["options"],
    )
    printed: list[str] = []
    # A pool of processes for each of some thousand files would take most of the time.
    with mock.patch.object(run, "encode_parts", _encode_here):
        report = run.preprocess(options, printed.append)
    run.run_or_explain(lambda: report, printed.append)
    if report.rejected_path is not None:
        printed += report.rejected_path.read_text(encoding="utf-8").splitlines()
    return Heard([tiny.read_pair(prefix) for prefix in report.prefixes], "\n".join(printed))


def _encode_here(job: Job, numbers: list[int], say: Say) -> None:
    for number in numbers:
        encode_part(job, number, lambda read, documents: None)


def _written(form: str, rows: list[Any], folder: Path) -> Path:
    """Return the file of rows, written in a form."""
    lines = [json.dumps(row) for row in rows]
    whole = "\n".join(lines) + "\n"
    texts = {
        "lines": whole,
        "array": json.dumps(rows, indent=1),
        "marked": "\ufeff" + whole,
        "marked lines": "".join(f"\ufeff{line}\n" for line in lines),
        "blank end": whole + "\n \n",
        "returns": whole.replace("\n", "\r\n"),
        "open": whole.removesuffix("\n"),
    }
    if form in texts:
        path = folder / "rows.jsonl"
        path.write_bytes(texts[form].encode())
    elif form == "packed":
        path = folder / "rows.jsonl.gz"
        path.write_bytes(gzip.compress(whole.encode()))
    else:
        import pyarrow
        from pyarrow import parquet

        path = folder / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
