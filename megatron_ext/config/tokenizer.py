"""The tokenizer that the data was made with."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import COUNT, NATURAL


@dataclass(frozen=True)
class TokenizerConfig:
    """Names and defaults are Megatron-LM's."""

    tokenizer_type: str | None = flag("GPT2BPETokenizer", "kind, such as HuggingFaceTokenizer")
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    tokenizer_metadata: str | None = flag(None, "a JSON file that names the tokenizer's library")
    tokenizer_special_tokens: list[str] | None = flag(None, "further special tokens", nargs="+")
    vocab_file: str | None = flag(None, "vocabulary of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges of GPT2BPETokenizer")
    vocab_size: int | None = flag(None, "entries of NullTokenizer or TikTokenizer", bounds=COUNT)
    vocab_extra_ids: int = flag(0, "further special tokens", bounds=NATURAL)
    tiktoken_pattern: str | None = flag(None, "how TikTokenizer cuts words")
    tiktoken_num_special_tokens: int = flag(1000, "special tokens of TikTokenizer", bounds=NATURAL)
    tiktoken_special_tokens: list[str] | None = flag(None, "the first of them by name", nargs="+")
    tokenizer_sentencepiece_legacy: bool = flag(False, "SentencePiece with its legacy wrapper")
    tokenizer_hf_use_fast: bool = flag(False, "the fast tokenizer of transformers")
    tokenizer_hf_include_special_tokens: bool = flag(False, "let transformers add special tokens")
    trust_remote_code: bool = flag(False, "let transformers run code of the tokenizer's folder")
