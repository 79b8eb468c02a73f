"""What one preprocessing run is asked to do, and its checks.

The tokenizer's flags on the command line of the data tools.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from megatron_ext.config.flags import COUNT, FACTOR, NATURAL, PROCESSES
from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.encode import LANGUAGES
from megatron_ext.text.tokenizers import TOKENIZER_TYPES
from megatron_ext.text.tokenizers.base import TokenizerSettings


@dataclass(frozen=True)
class PreprocessOptions:
    """One run.

    Attributes:
        inputs: jsonl files, globs, or `-` for standard input; gzip and zstd are recognized.
        output_prefix: outputs are `<prefix>_<key>_document.bin/.idx` (`_sentence` when split).
        tokenizer: flags that choose the tokenizer.
        json_keys: keys to extract, each into its own dataset.
        workers: worker processes.
        partitions: datasets to deal the lines to, besides the merged one.
        keep_sequential_samples: partitions are contiguous blocks, not dealt round-robin.
        engine: `auto` uses gigatoken where it is exact, `native` never.
        on_bad_line: `stop`, or `quarantine` into `<prefix>.rejected.jsonl`.
        log_interval: documents between progress lines where stderr is no terminal.
        part_megabytes: size of the pieces that are kept over a kill; None chooses.

    Raises:
        ConfigError: with every sentence that applies.
    """

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: TokenizerSettings
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    keep_sequential_samples: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str = "english"
    engine: Literal["auto", "native"] = "auto"
    on_bad_line: Literal["stop", "quarantine"] = "stop"
    log_interval: int = 1000
    part_megabytes: float | None = None
    smallest_part: ClassVar[int] = 4_000_000

    def __post_init__(self) -> None:
        # Names are made for each partition, so their number is checked first.
        wrong = self._wrong_numbers() or self._wrong_names()
        if wrong:
            raise ConfigError(wrong)

    def _wrong_numbers(self) -> list[str]:
        megabytes = 1 if self.part_megabytes is None else self.part_megabytes
        named = (
            ("--workers", self.workers, PROCESSES),
            ("--partitions", self.partitions, PROCESSES),
            ("--log-interval", self.log_interval, COUNT),
            ("--part-megabytes", megabytes, FACTOR),
        )
        return [
            f"`{flag}` ({value}) {rule}; leave it out for the default."
            for flag, value, range_ in named
            if (rule := range_.broken_rule(value)) is not None
        ]

    def _wrong_names(self) -> list[str]:
        wrong = []
        folder = os.path.dirname(self.output_prefix) or "."
        if not os.path.isdir(folder):
            wrong.append(
                f"`--output-prefix` ({self.output_prefix}) lies in {folder}, which is not a "
                "folder; make it first."
            )
        wrong += self._wrong_keys()
        if "-" in self.inputs and len(self.inputs) > 1:
            wrong.append("`--input -` (standard input) cannot be joined with files; give one.")
        if self.split_sentences and self.lang not in LANGUAGES:
            wrong.append(
                f"`--lang` ({self.lang}) has no sentence rules; use one of {', '.join(LANGUAGES)}."
            )
        if self.keep_newlines and not self.split_sentences:
            wrong.append("`--keep-newlines` has an effect only with `--split-sentences`; add it.")
        return wrong

    def _wrong_keys(self) -> list[str]:
        repeated = sorted({key for key in self.json_keys if list(self.json_keys).count(key) > 1})
        if repeated:
            return [f"`--json-keys` names {repeated[0]} twice; name each key once."]
        wrong = [
            f"`--json-keys` ({key}) names datasets, so it must not contain `/`; rename the key."
            for key in self.json_keys
            if "/" in key
        ]
        partitions = range(self.partitions if self.partitions > 1 else 0)
        merged = {self.dataset_prefix(key): key for key in self.json_keys}
        return wrong + [
            f"`--json-keys` ({merged[prefix]}) gives its dataset the name of partition {p} of "
            f"{key} ({prefix}); rename the key, or leave `--partitions` out."
            for key in self.json_keys
            for p in partitions
            if (prefix := self.dataset_prefix(key, p)) in merged
        ]

    @property
    def level(self) -> str:
        return "sentence" if self.split_sentences else "document"

    def dataset_prefix(self, key: str, partition: int | None = None) -> str:
        """Prefix of the dataset of one key: of all lines, or of one partition."""
        part = "" if partition is None else f"_{partition}"
        return f"{self.output_prefix}{part}_{key}_{self.level}"


@dataclass(frozen=True)
class TokenizerFlags:
    """The tokenizer flags of the command line, under Megatron-LM's names and defaults."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    tokenizer_metadata: str | None = None
    tokenizer_special_tokens: Sequence[str] | None = None
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_hf_use_fast: bool = True
    tokenizer_hf_include_special_tokens: bool = False
    trust_remote_code: bool = False
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: Sequence[str] | None = None


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a group `tokenizer`."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", help=", ".join(TOKENIZER_TYPES))
    group.add_argument("--tokenizer-model", help="model file, folder, or Hugging Face name")
    group.add_argument("--tokenizer-metadata", help="JSON file that repeats the library")
    group.add_argument("--tokenizer-special-tokens", nargs="+", help="further special tokens")
    group.add_argument(
        "--tokenizer-sentencepiece-legacy",
        action="store_true",
        help="allow special tokens with a SentencePiece model",
    )
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="let a Hugging Face tokenizer add its own bos and eos",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run a tokenizer's own Python code"
    )
    group.add_argument("--vocab-file", help="GPT-2's vocab.json")
    group.add_argument("--merge-file", help="GPT-2's merges.txt")
    group.add_argument(
        "--vocab-size", type=COUNT.integer, help="ids of Null, byte-level and tiktoken"
    )
    group.add_argument(
        "--vocab-extra-ids", type=NATURAL.integer, default=0, help="0; others are refused"
    )
    group.add_argument("--tiktoken-pattern", help="v1 or v2 (v2)")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=NATURAL.integer, default=1000, help="(1000)"
    )
    group.add_argument("--tiktoken-special-tokens", nargs="+", help="older name of the above")


def tokenizer_flags(args: argparse.Namespace) -> TokenizerFlags:
    """Picks them out of parsed arguments."""
    values = vars(args)
    named = [field.name for field in fields(TokenizerFlags)]
    return TokenizerFlags(**{name: values[name] for name in named if name in values})
