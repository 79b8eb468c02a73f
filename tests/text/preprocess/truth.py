"""The files of Megatron-LM's tool, by megatron-core's own tokenizer and builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ext.text.config import TokenizerConfig

Split = Callable[[str], list[str]]


def write_expected(
    prefix: Path,
    values: Sequence[str | list[str]],
    flags: TokenizerConfig,
    *,
    append_eod: bool,
    split: Split | None = None,
) -> tuple[bytes, bytes]:
    """Write one dataset of the given values and return its `.bin` and `.idx`."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

    named = {**dataclasses.asdict(flags), "tokenizer_hf_use_fast": True}
    tokenizer: Any = build_tokenizer(SimpleNamespace(**named))
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for value in values:
        sequences = value if isinstance(value, list) else [value]
        if split is not None:
            sequences = [sentence for text in sequences for sentence in split(text)]
        ids = [tokenizer.tokenize(text) for text in sequences]
        ids = [piece for piece in ids if piece]
        if ids and append_eod:
            ids[-1] = [*ids[-1], tokenizer.eod]
        builder.add_document([i for piece in ids for i in piece], [len(piece) for piece in ids])
    builder.finalize(f"{prefix}.idx")
    return read_pair(prefix)


def read_pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
