"""All that decides the tokens of a conversation: tokenizer, template, and columns of a row."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_ext.data.sft.conversation import Layout, RowFormat
from megatron_ext.data.sft.template import ChatTokenizer, OnMismatch, TemplateOptions
from megatron_ext.data.tokenizers.huggingface import load_pretrained, tokenizer_folder
from megatron_ext.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_ext.config.sft import SftConfig
    from megatron_ext.data.tokenizers import Tokenizer, TokenizerSettings

CONTENT_VERSION = 1
"""Raised whenever this package makes other tokens or masks of the same rows."""


@dataclass(frozen=True)
class Chat:
    """How rows become tokens.

    Attributes:
        tokenizer: of transformers, with its chat template.
        vocab_size: number of ids.
        options: of the template.
        row_format: layout and columns of a row.
        identity: plain values that decide the content of a store.
    """

    tokenizer: ChatTokenizer
    vocab_size: int
    options: TemplateOptions
    row_format: RowFormat
    identity: dict[str, Any]


def build_chat(tokenizer: Tokenizer, settings: TokenizerSettings, sft: SftConfig) -> Chat:
    """From the flags; the ids are those of ``tokenizer``.

    Raises:
        ConfigError: a tokenizer without chat templates, or no template.
        DataError: a file cannot be read.
    """
    chat_tokenizer = _load(tokenizer, settings, sft)
    options = TemplateOptions(sft.template_kwargs, cast("OnMismatch", sft.sft_on_mismatch))
    row_format = RowFormat(
        layout=cast("Layout", sft.sft_row_format),
        messages=sft.sft_messages_key,
        prompt=sft.sft_prompt_key,
        response=sft.sft_response_key,
        conversations=sft.sft_conversations_key,
        system=sft.sft_system_key,
        tools=sft.sft_tools_key,
        enable_thinking=sft.sft_enable_thinking_key,
    )
    identity = {
        "tokenizer": _tokenizer_identity(tokenizer),
        "template": _digest(chat_tokenizer.chat_template),
        "template_kwargs": sft.template_kwargs,
        "on_mismatch": sft.sft_on_mismatch,
        "row_format": asdict(row_format),
        "versions": {
            "content": CONTENT_VERSION,
            **{name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")},
        },
    }
    return Chat(chat_tokenizer, tokenizer.vocab_size, options, row_format, identity)


def _load(tokenizer: Tokenizer, settings: TokenizerSettings, sft: SftConfig) -> Any:
    if tokenizer.kind != "HuggingFaceTokenizer" or settings.tokenizer_model is None:
        raise ConfigError(
            f"`--tokenizer-type` ({tokenizer.kind}) has no chat template, which `--sft` needs; use "
            "HuggingFaceTokenizer."
        )
    folder = tokenizer_folder(settings.tokenizer_model)
    loaded = load_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    special = list(getattr(settings, "tokenizer_special_tokens", None) or ())
    if special:
        loaded.add_special_tokens({"additional_special_tokens": special})
    if len(loaded) != tokenizer.vocab_size:
        raise DataError(
            f"`--tokenizer-model` ({folder}) has {tokenizer.vocab_size} ids in tokenizer.json, but "
            f"{len(loaded)} as transformers loads it; save it again with save_pretrained."
        )
    if sft.sft_chat_template is not None:
        loaded.chat_template = _read(sft.sft_chat_template)
    if not loaded.chat_template:
        raise ConfigError(
            f"`--tokenizer-model` ({folder}) has no chat template, so conversations cannot be "
            "tokenized; give one with `--sft-chat-template`."
        )
    return loaded


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"`--sft-chat-template` ({path}) cannot be read ({error}); give a file with a Jinja "
            "template."
        ) from None


def _tokenizer_identity(tokenizer: Tokenizer) -> dict[str, str]:
    """By content where there is a file, so that a tokenizer may be moved."""
    found = dict(tokenizer.unique_identifiers)
    if "sha256" in found:
        found.pop("path", None)
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def key_of(*values: Any) -> str:
    """A short name for plain values."""
    return _digest(values)[:20]
