"""Checks that preprocessing writes the files of one plain process, whatever its flags are."""

import argparse
import glob
import random
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests.combinations.execute import Ended, execute, judge_all, work_directory
from tests.combinations.options import SECTIONS

FORMS = (
    "plain", "gzip", "zstd", "several", "glob", "stdin", "parquet", "arrow", "no last newline"
)  # fmt: skip
USUAL = "--tokenizer-type SentencePieceTokenizer --tokenizer-model {data}/sentencepiece.model"


@dataclass(frozen=True)
class Case:
    """Flags that decide the files, flags that must not, and the form of the input."""

    content: tuple[str, ...]
    how: tuple[str, ...]
    form: str

    @property
    def source(self) -> str:
        """Return the name of the input among the files of `inputs.py`."""
        words = " ".join(self.content)
        if "--sft" not in words:
            return "documents"
        kinds = {
            "prompt-response": "chats_questions",
            "prompt-completion": "chats_completions",
            "sharegpt": "chats_shared",
            "alpaca": "chats_alpaca",
        }
        return next((name for kind, name in kinds.items() if kind in words), "chats")

    def words(self, data: Path, how: Iterable[str]) -> list[str]:
        """Return flags without input and output; the usual tokenizer where none is drawn."""
        parts = [*self.content, *how]
        if not any("--tokenizer-type" in part for part in parts):
            parts.insert(0, USUAL)
        return [word for part in parts for word in part.format(data=data).split()]


def draw(dice: random.Random) -> Case:
    """Draw up to three flags about the files and up to four that must not change them."""

    def few(name: str, most: int) -> tuple[str, ...]:
        chosen: dict[str, str] = {}
        for text in dice.sample(SECTIONS[name], dice.randint(0, most)):
            names = {word for word in text.split() if word.startswith("--")}
            if not names & chosen.keys():
                chosen |= dict.fromkeys(names, text)
        return tuple(dict.fromkeys(chosen.values()))

    return Case(few("preprocess files", 3), few("preprocess how", 4), dice.choice(FORMS))


def given(source: Path, form: str, folder: Path) -> list[str]:
    text = source.read_bytes()
    rows = text.splitlines(keepends=True)
    if form == "gzip":
        import gzip

        (folder / "in.jsonl.gz").write_bytes(gzip.compress(text))
        return ["in.jsonl.gz"]
    if form == "zstd":
        import zstandard

        (folder / "in.jsonl.zst").write_bytes(zstandard.compress(text))
        return ["in.jsonl.zst"]
    if form in ("several", "glob"):
        for number in range(3):
            part = rows[number * len(rows) // 3 : (number + 1) * len(rows) // 3]
            (folder / f"part_{number}.jsonl").write_bytes(b"".join(part))
        return ["part_*.jsonl"] if form == "glob" else [f"part_{i}.jsonl" for i in range(3)]
    if form in ("parquet", "arrow"):
        import json

        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist([json.loads(row) for row in rows])
        size = max(1, len(rows) // 5)
        if form == "parquet":
            pyarrow.parquet.write_table(table, folder / "in.parquet", row_group_size=size)
            return ["in.parquet"]
        with pyarrow.ipc.new_stream(str(folder / "in.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=size)
        return ["in.arrow"]
    name = "input" if form == "stdin" else "in.jsonl"
    (folder / name).write_bytes(text.rstrip(b"\n") if form == "no last newline" else text)
    return ["-"] if form == "stdin" else [name]


def run(words: list[str], folder: Path, name: str, limit: float) -> Ended:
    from megatron_ext.text.preprocess.cli import main

    stdin = folder / "input"
    return execute(
        lambda: main(words), folder, name=name, limit=limit, stdin=stdin if stdin.exists() else None
    )


def judge(case: Case, data: Path, limit: float) -> tuple[str, str]:
    """Return "equal", "refused" or the kind of failure, and the command or what differs."""
    source = data / f"{case.source}.jsonl"
    with work_directory(data) as folder:
        inputs = given(source, case.form, folder)
        mine = [*case.words(data, case.how), "--input", *inputs, "--output-prefix", "mine"]
        engine = [] if case.source != "documents" else ["--engine native"]
        plain = [*case.words(data, engine), "--input", str(source)]
        command = "python tools/preprocess_data.py " + shlex.join(mine)
        first = run(mine, folder, "a", limit)
        if problem := _problem(first):
            return problem, f"{command}\n{first.err[-1500:]}"
        second = run([*plain, "--output-prefix", "plain"], folder, "b", limit)
        if problem := _problem(second):
            return f"plain: {problem}", f"{command}\n{second.err[-1500:]}"
        if first.code != 0:
            return "refused", first.err.strip()
        if second.code != 0:
            return "only plain is refused", f"{command}\n{second.err[-1500:]}"
        how = " ".join(case.how)
        deals = "--partitions" in how and "--keep-sequential" not in how
        if differs := _difference(folder, sequential=not deals):
            return "differs", f"{command}\n{differs}"
        left = list(folder.glob("*.parts*")) + [x for x in folder.glob("*.tmp*") if x.is_file()]
        return ("left behind", f"{command}\n{left}") if left else ("equal", "")


def _problem(ended: Ended) -> str | None:
    if ended.code is None:
        return "hang"
    if "Traceback" in ended.err:
        return "traceback"
    if ended.code not in (0, 1, 2):
        return f"exit code {ended.code}"
    if ended.left:
        return "; ".join(ended.left)
    if ended.code and "error: " not in ended.err:
        return "refused without a sentence"
    return None


def _difference(folder: Path, *, sequential: bool) -> str | None:
    """Describe how the files differ; documents that are dealt out may change places."""
    pairs = {
        kind: {Path(x).name.removeprefix(kind) for x in glob.glob(f"{folder}/{kind}_*.*")}
        for kind in ("mine", "plain")
    }
    wanted = {name for name in pairs["plain"] if name.endswith((".bin", ".idx", ".jsonl"))}
    missing = wanted - pairs["mine"]
    if missing:
        return f"there is no {sorted(missing)}"
    for name in sorted(wanted):
        if sequential:
            if (folder / f"mine{name}").read_bytes() != (folder / f"plain{name}").read_bytes():
                return f"{name} has other bytes"
        elif name.endswith(".idx"):
            prefix = name.removesuffix(".idx")
            if _documents(folder / f"mine{prefix}") != _documents(folder / f"plain{prefix}"):
                return f"{prefix} has other documents"
    return None


def _documents(prefix: Path) -> list[bytes]:
    if not Path(f"{prefix}.idx").stat().st_size:
        return []
    dataset = IndexedDataset(str(prefix))
    return sorted(np.asarray(dataset[i]).tobytes() for i in range(len(dataset)))


def search(arguments: argparse.Namespace, data: Path) -> int:
    return judge_all(draw, judge, arguments, data)
