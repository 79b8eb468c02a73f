"""All that decides the tokens of a conversation: tokenizer, chat template, columns of a row."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.sft.conversation import Conversation
from megatron_ext.text.tokenizers.huggingface import load_pretrained, tokenizer_folder

if TYPE_CHECKING:
    from megatron_ext.text.config import SftConfig, TokenizerConfig
    from megatron_ext.text.tokenizers.base import Tokenizer

_OURS = (
    "conversation add_generation_prompt continue_final_message tokenize return_dict tools "
    "return_assistant_tokens_mask return_tensors padding truncation max_length tokenizer_kwargs"
).split()


_COLUMNS = (
    "messages", "prompt", "response", "conversations", "system", "tools", "enable_thinking"
)  # fmt: skip


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    is_fast: bool
    pad_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[Any] | None = None
    ) -> str: ...


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Check the keywords that `apply_chat_template` passes on to a template.

    Raises:
        ConfigError: a keyword that this module sets itself.
    """
    for name in kwargs:
        if name in _OURS:
            raise ConfigError(
                f"apply_chat_template_kwargs ({name}) must not hold what the tokenization of "
                f"conversations sets itself ({', '.join(_OURS)}); leave it out."
            )


class Template:
    """The chat template applied to the first messages of one conversation.

    A row's `enable_thinking` goes before one among the keywords of the run.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, conversation: Conversation, kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._kwargs = dict(kwargs)
        if conversation.enable_thinking is not None:
            self._kwargs["enable_thinking"] = conversation.enable_thinking
        if conversation.tools is not None:
            self._kwargs["tools"] = list(conversation.tools)

    def apply(self, count: int, **kwargs: Any) -> Any:
        """Apply the chat template to the first ``count`` messages; return a dictionary."""
        return self._apply(count, tokenize=True, return_dict=True, **kwargs)

    def _apply(self, count: int, **kwargs: Any) -> Any:
        messages = [dict(message) for message in self._conversation.messages[:count]]
        try:
            return self._tokenizer.apply_chat_template(messages, **{**self._kwargs, **kwargs})
        except Exception as error:  # a template can raise anything
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self._conversation.place}: the chat template refuses the first {count} of "
                f"{len(self._conversation.messages)} messages ({type(error).__name__}: {reason}); "
                "correct the row, or give a template that takes it."
            ) from error

    def ids(self, count: int, *, prompt: bool = False) -> list[int]:
        """Return the tokens of the first ``count`` messages, with the generation prompt or not."""
        return list(self.apply(count, add_generation_prompt=prompt)["input_ids"])

    def text(self, count: int, *, prompt: bool = False, **kwargs: Any) -> str:
        """Return the text of the first ``count`` messages, with the generation prompt or not."""
        return str(self._apply(count, tokenize=False, add_generation_prompt=prompt, **kwargs))

    def source(self) -> str:
        """Return the template itself, in Jinja's language."""
        own = self._kwargs.get("chat_template")
        return self._tokenizer.get_chat_template(own, self._kwargs.get("tools"))

    def encode(self, text: str) -> Any:
        """Return the token ids of a text that was templated, and where each lies in it."""
        try:
            return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:  # such as half a surrogate pair, in ways of their own
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self._conversation.place}: the tokenizer refuses the text of the conversation "
                f"({type(error).__name__}: {reason}); correct the row."
            ) from error


CONTENT_VERSION = 1
"""Raised whenever this package makes other tokens or masks of the same rows."""


@dataclass(frozen=True)
class Chat:
    """The means by which rows become tokens; `identity` holds what decides a store's content."""

    tokenizer: ChatTokenizer
    vocab_size: int
    sft: SftConfig
    identity: dict[str, Any]


def build_chat(tokenizer: Tokenizer, settings: TokenizerConfig, sft: SftConfig) -> Chat:
    """Return what the flags ask for, with the ids of ``tokenizer``.

    Raises:
        ConfigError: a tokenizer without chat templates, or no template.
        DataError: a file cannot be read.
    """
    chat_tokenizer = _load(tokenizer, settings, sft)
    check_template_kwargs(sft.template_kwargs)
    identity = {
        "tokenizer": _tokenizer_identity(tokenizer),
        "template": _digest(chat_tokenizer.chat_template),
        "template_kwargs": sft.template_kwargs,
        "on_mismatch": sft.sft_on_mismatch,
        "row_format": {
            "layout": sft.sft_row_format,
            **{column: getattr(sft, f"sft_{column}_key") for column in _COLUMNS},
        },
        "versions": {
            "content": CONTENT_VERSION,
            **{name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")},
        },
    }
    return Chat(chat_tokenizer, tokenizer.vocab_size, sft, identity)


def _load(tokenizer: Tokenizer, settings: TokenizerConfig, sft: SftConfig) -> Any:
    if tokenizer.kind != "HuggingFaceTokenizer" or settings.tokenizer_model is None:
        raise ConfigError(
            f"`--tokenizer-type` ({tokenizer.kind}) has no chat template, which `--sft` needs; use "
            "HuggingFaceTokenizer."
        )
    folder = tokenizer_folder(settings.tokenizer_model)
    loaded = load_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    special = list(settings.tokenizer_special_tokens or ())
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
    """Return what identifies a tokenizer, without its path where it has a file's digest."""
    found = dict(tokenizer.unique_identifiers)
    if "sha256" in found:
        found.pop("path", None)
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def key_of(*values: Any) -> str:
    """Return a short name for plain values."""
    return _digest(values)[:20]
