"""Runs of preprocessing in this process, and what they must have written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.run import Report, preprocess
from megatron_ext.text.tokenizers import TokenizerConfig
from tests.text import tiny
from tests.text.tiny import read_pair, write_expected


def sentencepiece() -> TokenizerConfig:
    return TokenizerConfig("SentencePieceTokenizer", str(tiny.sentencepiece_model()))


def huggingface() -> TokenizerConfig:
    return TokenizerConfig("HuggingFaceTokenizer", str(tiny.hf_folder()))


def run(
    folder: Path, *files: Path | str, flags: TokenizerConfig | None = None, **more: Any
) -> tuple[Report, list[str]]:
    said: list[str] = []
    options = {
        "inputs": [str(file) for file in files], "output_prefix": str(folder / "out"),
        "tokenizer": flags or sentencepiece(), "workers": 2, "part_megabytes": 0.01,
        "append_eod": True, **more,
    }  # fmt: skip
    return preprocess(PreprocessOptions(**options), said.append), said


def texts_of(documents: list[dict[str, Any]]) -> list[str]:
    return [str(document["text"]) for document in documents]


def check_pair(folder: Path, texts: Sequence[Any], name: str = "text_document", **how: Any) -> None:
    how = {"flags": sentencepiece(), "append_eod": True, **how}
    assert read_pair(folder / f"out_{name}") == write_expected(folder / "e", texts, **how)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def write_lines(folder: Path) -> bytes:
    return tiny.write_jsonl(folder / "lines.jsonl", tiny.corpus(60)).read_bytes()
