"""The tokenizer's flags on the command line of the data tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_ext.config.ranges import COUNT, NATURAL
from megatron_ext.data.tokenizers import TOKENIZER_TYPES


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
