"""Flags of tokenizers, and which of them each type of tokenizer reads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import COUNT, NATURAL, changed_fields, flag, spelling_of
from megatron_ext.config.inapplicable import by_flag
from megatron_ext.text.config.inapplicable import TOKENIZER_FLAGS


@dataclass(frozen=True)
class TokenizerConfig:
    """The flags of tokenizers; names and defaults are Megatron-LM's."""

    tokenizer_type: str | None = flag(
        "GPT2BPETokenizer", "kind of tokenizer, such as HuggingFaceTokenizer"
    )
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    tokenizer_metadata: str | None = flag(
        None, "a JSON file that names the tokenizer's library", if_changed="allow"
    )
    tokenizer_special_tokens: list[str] | None = flag(None, "further special tokens", nargs="+")
    vocab_file: str | None = flag(None, "vocabulary of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges of GPT2BPETokenizer")
    vocab_size: int | None = flag(None, "entries of NullTokenizer or TikTokenizer", bounds=COUNT)
    vocab_extra_ids: int = flag(0, "further special tokens", bounds=NATURAL)
    tiktoken_pattern: str | None = flag(None, "pattern by which TikTokenizer cuts words")
    tiktoken_num_special_tokens: int = flag(
        1000, "number of special tokens of TikTokenizer", bounds=NATURAL
    )
    tiktoken_special_tokens: list[str] | None = flag(
        None, "names of the first special tokens of TikTokenizer", nargs="+"
    )
    tokenizer_sentencepiece_legacy: bool = flag(False, "SentencePiece with its legacy wrapper")
    tokenizer_hf_use_fast: bool = flag(
        False, "the fast tokenizer of transformers", if_changed="allow"
    )
    tokenizer_hf_include_special_tokens: bool = flag(False, "let transformers add special tokens")
    trust_remote_code: bool = flag(
        False,
        "let transformers run code of the tokenizer's folder",
        if_changed="allow",
        from_checkpoint=False,
    )


def idle_tokenizer_flags(settings: TokenizerConfig) -> list[str]:
    """Return a note for each flag that a tokenizer of this type does not read."""
    idle = by_flag(TOKENIZER_FLAGS, vars(settings))
    return [
        idle[name].sentence(f"`{spelling_of(settings, field)}` ({getattr(settings, field)})")
        for field in changed_fields(settings)
        if (name := f"--{field.replace('_', '-')}") in idle
    ]
