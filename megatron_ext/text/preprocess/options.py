"""Holds the options of a preprocessing run, and adds flags to a program's command line."""

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_ext.config.flags import (
    COUNT,
    FACTOR,
    LONG_COUNT,
    PROCESSES,
    Flag,
    check_ranges,
    flag,
    flags_of,
    range_errors,
)
from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.encode import LANGUAGES
from megatron_ext.text.tokenizers import TokenizerConfig

_ADVICE = "leave it out for the default"


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of a preprocessing run; they are checked on construction.

    The output for each JSON key is `<output_prefix>_<key>_document.bin` and `.idx`. The name has
    `sentence` instead of `document` if texts are split into sentences, and the number of the
    partition or shard, if any, before the key.
    """

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: TokenizerConfig
    json_keys: Sequence[str] = flag(
        ("text",), "keys of a line whose texts are tokenized, each into its own dataset", nargs="+"
    )
    append_eod: bool = flag(False, "end each document with the end-of-document token")
    eod_token: str | None = flag(
        None,
        "text of the token that --append-eod appends, such as <|endoftext|>, where the end of "
        "sequence of the tokenizer is not what should end a document",
    )
    split_sentences: bool = flag(
        False, "store one sequence for each sentence; outputs are PREFIX_KEY_sentence"
    )
    keep_newlines: bool = flag(
        False,
        "keep the white space between the sentences of --split-sentences, at the end of the "
        "sentence before it",
    )
    lang: str = flag("english", f"language of the sentence rules, one of {', '.join(LANGUAGES)}")
    workers: int = flag(
        1,
        "worker processes; with --executor ray, tasks at a time",
        bounds=PROCESSES,
        advice=_ADVICE,
    )
    partitions: int = flag(
        1,
        "datasets PREFIX_0, PREFIX_1, ... that lines are dealt to round-robin, besides the whole "
        "one",
        bounds=PROCESSES,
        advice=_ADVICE,
    )
    keep_sequential_samples: bool = flag(
        False,
        "make --partitions of contiguous blocks, so that the whole dataset keeps the input's order",
    )
    log_interval: int = flag(
        1000,
        "documents between two lines of progress, of which one comes every 5 seconds at most, "
        "where stderr is no terminal",
        bounds=COUNT,
        advice=_ADVICE,
    )
    on_bad_line: Literal["stop", "quarantine"] = flag(
        "stop",
        "at a line that cannot be used, stop, or go on and write it to PREFIX.rejected.jsonl",
        choices=("stop", "quarantine"),
    )
    engine: Literal["auto", "native"] = flag(
        "auto",
        "tokenize with gigatoken where it is checked to be exact (auto), or never",
        choices=("auto", "native"),
    )
    part_megabytes: float | None = flag(
        None,
        "megabytes of input after each of which work is kept over a kill; without it, 4 to 256 by "
        "the size of the input and the workers",
        bounds=FACTOR,
        advice=_ADVICE,
    )
    shard_tokens: int | None = flag(
        None,
        "instead of one dataset write shards PREFIX_00000, PREFIX_00001, ... of at most so many "
        "tokens of the first key, cut between documents",
        bounds=LONG_COUNT,
        advice=_ADVICE,
    )
    executor: Literal["local", "slurm", "ray"] = flag(
        "local",
        "encode the parts of the input in processes of this machine, in a job array of Slurm, or "
        "in tasks of a Ray cluster; the files are the same",
        choices=("local", "slurm", "ray"),
    )
    slurm_tasks: int = flag(
        1,
        "tasks of the job array of --executor slurm, each with --workers processes",
        bounds=PROCESSES,
        advice=_ADVICE,
    )
    slurm_args: str = flag(
        "", 'options of sbatch for the job array, as in --slurm-args="--partition=cpu --time=2:00"'
    )
    slurm_script: str | None = flag(
        None, "write the job script of --executor slurm to this file, and submit nothing"
    )
    smallest_part: ClassVar[int] = 4_000_000

    def __post_init__(self) -> None:
        # `_wrong_names` makes names for each partition, so check the number of partitions first.
        wrong = list(range_errors(self).values()) or self._wrong_names()
        if wrong:
            raise ConfigError(wrong)

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
        if self.eod_token is not None and not self.append_eod:
            wrong.append(
                f"`--eod-token` ({self.eod_token}) has an effect only with `--append-eod`; add it, "
                "or leave this out."
            )
        if self.keep_newlines and not self.split_sentences:
            wrong.append("`--keep-newlines` has an effect only with `--split-sentences`; add it.")
        return wrong + self._wrong_executor()

    def _wrong_executor(self) -> list[str]:
        wrong = []
        if self.executor != "slurm":
            wrong = [
                f"`--{name.replace('_', '-')}` has an effect only with `--executor slurm`; add it, "
                "or leave this out."
                for name in ("slurm_tasks", "slurm_args", "slurm_script")
                if getattr(self, name) != getattr(PreprocessOptions, name)
            ]
        try:
            shlex.split(self.slurm_args)
        except ValueError as error:
            wrong.append(
                f"`--slurm-args` ({self.slurm_args}) cannot be read ({error}); quote it as a shell "
                "does."
            )
        if self.shard_tokens is not None and self.partitions > 1:
            wrong.append("`--shard-tokens` does not go with `--partitions`; give one of them.")
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
            if (prefix := self.dataset_prefix(key, str(p))) in merged
        ]

    @property
    def level(self) -> str:
        return "sentence" if self.split_sentences else "document"

    @property
    def streams(self) -> int:
        """Return the number of output streams of a part.

        It is ``partitions``, or 1 if each partition gets consecutive lines.
        """
        return 1 if self.keep_sequential_samples else self.partitions

    @property
    def columns(self) -> Sequence[str] | None:
        """Return the columns of tables to read; None for all.

        For a folder of texts, this holds the JSON key under which the texts are read.
        """
        return self.json_keys

    @property
    def all_workers(self) -> int:
        """Return the number of worker processes on all machines."""
        return self.workers * self.slurm_tasks

    def dataset_prefix(self, key: str, piece: str | None = None) -> str:
        """Return the prefix of the dataset with the texts under ``key``.

        ``piece`` is the number of a partition or shard, as the file names have it; None means the
        dataset of all lines.
        """
        part = "" if piece is None else f"_{piece}"
        return f"{self.output_prefix}{part}_{key}_{self.level}"


TOKENIZER_FLAGS = tuple(
    each
    for each in flags_of("tokenizer", TokenizerConfig)
    if each.field != "tokenizer_hf_use_fast"  # Fast tokenizers are always used.
)


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add flags to a parser as a group with a title.

    The parser does not check that values are in range.
    """
    group = parser.add_argument_group(title)
    for each in flags:
        if each.type is bool:
            group.add_argument(each.positive[0], action="store_true", help=each.help)
            continue
        default = each.default
        shown = " ".join(default) if isinstance(default, tuple) else default
        group.add_argument(
            each.positive[0],
            type=each.type if each.type in (int, float) else str,
            nargs=each.nargs,
            choices=each.choices,
            default=default,
            help=each.help if default is None else f"{each.help} ({shown})",
        )


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "tokenizer", TOKENIZER_FLAGS)
    parser.set_defaults(tokenizer_type=None)


def tokenizer_config(values: dict[str, Any]) -> TokenizerConfig:
    """Build a `TokenizerConfig` from parsed arguments; ``values`` has them by name of the field.

    Raise a ConfigError if a number is out of range.
    """
    section = TokenizerConfig(**{each.field: values[each.field] for each in TOKENIZER_FLAGS})
    check_ranges(section)
    return section
