"""Rows of conversations to a store: the work behind tools/preprocess_data.py --sft."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from megatron_ext.config.sft import SftConfig
from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.preprocess import inputs
from megatron_ext.data.preprocess.inputs import Part
from megatron_ext.data.preprocess.options import PreprocessOptions
from megatron_ext.data.preprocess.outputs import publish_datasets, publish_rejected
from megatron_ext.data.preprocess.parts import Done, Workplace
from megatron_ext.data.preprocess.run import (
    Report,
    Say,
    plan_parts,
    run_parts,
    say_to_stderr,
)
from megatron_ext.data.preprocess.worker import Job
from megatron_ext.data.sft.chat import Chat, build_chat
from megatron_ext.data.sft.rows import KEYS, ConversationEncoder
from megatron_ext.data.sft.store import about_path, write_about
from megatron_ext.data.tokenizers import build_tokenizer
from megatron_ext.errors import DataError

_WITHOUT_MEANING = {
    "append_eod": "the chat template ends conversations",
    "split_sentences": "a conversation is one sequence",
    "keep_newlines": "the chat template writes the text",
    "partitions": "all conversations go into one store",
    "keep_sequential_samples": "all conversations go into one store",
    "engine": "the chat template and its special tokens need transformers",
}


@dataclass(frozen=True)
class SftPreprocessOptions(PreprocessOptions):
    """One run; outputs are ``PREFIX_sft_document``, ``PREFIX_sft_mask`` and ``PREFIX_sft.json``.

    Raises:
        ConfigError: with every sentence that applies.
    """

    smallest_part: ClassVar[int] = 250_000  # templates take longer than bytes alone
    json_keys: Sequence[str] = KEYS
    sft: SftConfig = field(default_factory=SftConfig)

    def _wrong_names(self) -> list[str]:
        wrong = super()._wrong_names()
        if tuple(self.json_keys) != KEYS:
            wrong.append(
                "`--json-keys` does not go with `--sft`, whose columns have flags of their own, "
                "such as `--sft-messages-key`; leave it out."
            )
        for name, reason in _WITHOUT_MEANING.items():
            if getattr(self, name) != getattr(PreprocessOptions, name):
                flag = "--" + name.replace("_", "-")
                wrong.append(f"`{flag}` does not go with `--sft`: {reason}; leave it out.")
        return [*wrong, *self.sft.row_errors()]

    def dataset_prefix(self, key: str, partition: int | None = None) -> str:
        """Prefix of the dataset of one of `KEYS`."""
        return f"{self.output_prefix}_sft_{key}"


def preprocess_sft(options: SftPreprocessOptions, say: Say = say_to_stderr) -> Report:
    """Tokenizes conversations into a store.

    Raises:
        ConfigError, DataError: one sentence; finished parts are kept for the next try.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chat = build_chat(build_tokenizer(options.tokenizer), options.tokenizer, options.sft)
    return write_store(options, chat, say)


def write_store(options: SftPreprocessOptions, chat: Chat, say: Say) -> Report:
    """As `preprocess_sft`, with tokenizer and template at hand."""
    start = time.monotonic()
    files = inputs.expand(options.inputs)
    resumable = not any(map(inputs.is_stream, files))
    with Workplace(options.output_prefix, resumable=resumable) as place:
        fingerprint = {
            "inputs": inputs.identities(files),
            "sft": chat.identity,
            "on_bad_line": options.on_bad_line,
        }
        parts, done = plan_parts(options, place, files, fingerprint, say)
        resumed = len(done)
        dtypes = (optimal_dtype(chat.vocab_size), np.dtype(np.uint8))
        encoder = ConversationEncoder(chat)
        quarantine = options.on_bad_line == "quarantine"
        job = Job(place.folder, parts, dtypes, 1, encoder, quarantine)
        run_parts(options, place, done, job)
        if not any(marker.documents for marker in done.values()):
            raise DataError(
                f"{' '.join(options.inputs)} holds no conversation; give files that do."
            )
        about_path(options.output_prefix).unlink(missing_ok=True)
        prefixes = publish_datasets(options, place.folder, parts, done, dtypes)
        rejected_path = publish_rejected(options, place.folder, parts, done)
        write_about(options.output_prefix, chat.identity, _conversations_of(parts, done))
    report = Report.of(parts, done, prefixes, rejected_path, resumed, start)
    return dataclasses.replace(report, tokens=report.tokens // len(KEYS))


def _conversations_of(parts: Sequence[Part], done: Mapping[int, Done]) -> list[tuple[str, int]]:
    """Conversations of each input file, in order."""
    counts: list[tuple[str, int]] = []
    for i, part in enumerate(parts):
        before = 0
        if counts and part.start > 0:
            before = counts.pop()[1]
        counts.append((os.path.abspath(part.source), before + done[i].documents))
    return counts
