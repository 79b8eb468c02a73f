"""What one preprocessing run is asked to do, and its checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_ext.config.ranges import COUNT, FACTOR, PROCESSES
from megatron_ext.data.preprocess.sentences import LANGUAGES
from megatron_ext.data.tokenizers import TokenizerSettings
from megatron_ext.errors import ConfigError


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
