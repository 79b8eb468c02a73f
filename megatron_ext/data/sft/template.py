"""The chat template of a tokenizer, applied to the beginnings of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from megatron_ext.data.sft.conversation import Conversation
from megatron_ext.errors import ConfigError, DataError

OnMismatch = Literal["error", "realign"]

_OURS = (
    "conversation add_generation_prompt continue_final_message tokenize return_dict tools "
    "return_assistant_tokens_mask return_tensors padding truncation max_length tokenizer_kwargs"
).split()


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    is_fast: bool
    pad_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[Any] | None = None
    ) -> str: ...


@dataclass(frozen=True)
class TemplateOptions:
    """How conversations are templated.

    Attributes:
        template_kwargs: passed on to `apply_chat_template`, thus to the template; a row's
            `enable_thinking` goes before one named here.
        on_mismatch: "error" refuses a conversation in which a turn cannot be told exactly;
            "realign" looks in the whole conversation for the longest piece of what templating
            the messages up to the turn ends with.

    Raises:
        ConfigError: an unknown `on_mismatch`, or a keyword that this module sets itself.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_mismatch: OnMismatch = "error"

    def __post_init__(self) -> None:
        if self.on_mismatch not in get_args(OnMismatch):
            raise ConfigError(
                f"on_mismatch ({self.on_mismatch!r}) must be one of "
                f"{', '.join(get_args(OnMismatch))}."
            )
        for name in self.template_kwargs:
            if name in _OURS:
                raise ConfigError(
                    f"apply_chat_template_kwargs ({name}) must not hold what the tokenization of "
                    f"conversations sets itself ({', '.join(_OURS)}); leave it out."
                )


class Template:
    """The chat template applied to the first messages of one conversation."""

    def __init__(
        self, tokenizer: ChatTokenizer, conversation: Conversation, options: TemplateOptions
    ) -> None:
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._kwargs = dict(options.template_kwargs)
        if conversation.enable_thinking is not None:
            self._kwargs["enable_thinking"] = conversation.enable_thinking
        if conversation.tools is not None:
            self._kwargs["tools"] = list(conversation.tools)

    def apply(self, count: int, **kwargs: Any) -> Any:
        """`apply_chat_template` of the first ``count`` messages, as a dictionary."""
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
        """Tokens of the first ``count`` messages; ``prompt``: with the generation prompt."""
        return list(self.apply(count, add_generation_prompt=prompt)["input_ids"])

    def text(self, count: int, *, prompt: bool = False, **kwargs: Any) -> str:
        """Text of the first ``count`` messages; ``prompt``: with the generation prompt."""
        return str(self._apply(count, tokenize=False, add_generation_prompt=prompt, **kwargs))

    def source(self) -> str:
        """The template itself, in Jinja's language."""
        own = self._kwargs.get("chat_template")
        return self._tokenizer.get_chat_template(own, self._kwargs.get("tools"))

    def encode(self, text: str) -> Any:
        """Token ids of a text that was templated, and where each lies in it."""
        try:
            return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:  # such as half a surrogate pair, in ways of their own
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self._conversation.place}: the tokenizer refuses the text of the conversation "
                f"({type(error).__name__}: {reason}); correct the row."
            ) from error
