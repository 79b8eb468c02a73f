"""A conversation to token ids and the mask of trained tokens, by the tokenizer's chat template.

A template that marks the assistant's text with ``{% generation %}`` says itself what is trained.
For any other, each assistant turn is found by templating the messages before it (with the
generation prompt) and the messages up to it: the tokens between the two are the turn's, from its
first word to its end-of-turn token and what the template writes after that. Both must be the
beginning of the whole conversation, token for token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

from megatron_ext.data.sft.conversation import ASSISTANT, Conversation
from megatron_ext.errors import ConfigError, DataError

OnMismatch = Literal["error", "realign"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OURS = (
    "conversation add_generation_prompt continue_final_message tokenize return_dict tools "
    "return_assistant_tokens_mask return_tensors padding truncation max_length tokenizer_kwargs"
).split()


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    is_fast: bool
    pad_token_id: int | None
    chat_template: Any

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


class TokenizedConversation(NamedTuple):
    """Token ids ``[s]`` and, for each, 1 where it is trained, else 0."""

    ids: list[int]
    mask: list[int]


def tokenize_conversation(
    tokenizer: ChatTokenizer, conversation: Conversation, options: TemplateOptions | None = None
) -> TokenizedConversation:
    """Token ids and trained tokens of a conversation.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template refuses the conversation, or the mask cannot be built.
    """
    options = options or TemplateOptions()
    template = _Template(tokenizer, conversation, options)
    if _marks_generation(tokenizer, conversation, options):
        return _by_generation_marks(template, conversation, options)
    return _by_prefixes(template, conversation, options)


def _marks_generation(
    tokenizer: ChatTokenizer, conversation: Conversation, options: TemplateOptions
) -> bool:
    own = options.template_kwargs.get("chat_template")
    if own is None and not tokenizer.chat_template:
        raise ConfigError(
            "The tokenizer has no chat template, so conversations cannot be tokenized; give one "
            "with chat_template in apply_chat_template_kwargs."
        )
    tools = None if conversation.tools is None else list(conversation.tools)
    text = tokenizer.get_chat_template(own, tools)
    return tokenizer.is_fast and _GENERATION.search(text) is not None


class _Template:
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
        """`apply_chat_template` of the first ``count`` messages."""
        messages = [dict(message) for message in self._conversation.messages[:count]]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **kwargs, **self._kwargs
            )
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


def _by_generation_marks(
    template: _Template, conversation: Conversation, options: TemplateOptions
) -> TokenizedConversation:
    """The template's own mask, less the turns that the row takes out.

    transformers drops the turns after one whose first character has no token, and marks all
    that follows one whose last character has none: so the marked runs are counted.
    """
    encoded = template.apply(
        len(conversation.messages),
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    _complete_characters(mask, encoded["offset_mapping"])
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    runs = _runs(mask)
    if not runs or (mask[-1] == 1 and turns[-1] != len(conversation.messages) - 1):
        found = (
            "train the end of a message that is not the assistant's" if runs else "train nothing"
        )
        _refuse_marks(conversation, found)
    if len(runs) == len(turns):
        for (start, end), turn in zip(runs, turns, strict=True):
            mask[start:end] = [int(conversation.trained[turn])] * (end - start)
    elif options.on_mismatch == "error" or not all(conversation.trained[turn] for turn in turns):
        found = f"give {len(runs)} runs of trained tokens for {len(turns)} assistant messages"
        _refuse_marks(conversation, found)
    return TokenizedConversation(ids, mask)


def _complete_characters(mask: list[int], offsets: Sequence[tuple[int, int]]) -> None:
    """Trains all the tokens of a run's last character; transformers marks only its first."""
    for i in range(1, len(mask)):
        if mask[i - 1] and not mask[i] and offsets[i][0] < offsets[i - 1][1]:
            mask[i] = 1


def _refuse_marks(conversation: Conversation, found: str) -> NoReturn:
    raise DataError(
        f"{conversation.place}: the generation marks of the chat template {found}; correct the "
        "marks, or take them out of the template."
    )


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Starts and ends of the runs of ones."""
    edges = [i for i, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _by_prefixes(
    template: _Template, conversation: Conversation, options: TemplateOptions
) -> TokenizedConversation:
    """The mask by templating the messages before and up to each trained turn.

    A prefix never ends within a group of tool messages, since both its ends are at assistant
    turns; templates that merge such a group are thus templated as they will be in the whole.
    """
    count = len(conversation.messages)
    whole = template.ids(count)
    mask = [0] * len(whole)
    find = _exact_span if options.on_mismatch == "error" else _realigned_span
    for turn in (i for i, trained in enumerate(conversation.trained) if trained):
        if turn == 0:
            _refuse(conversation, turn, "has no message before it, so no prompt; drop it")
        start, end = find(template, conversation, whole, turn)
        if end <= start:
            _refuse(conversation, turn, "adds no token of its own to the conversation; drop it")
        mask[start:end] = [1] * (end - start)
    return TokenizedConversation(whole, mask)


def _exact_span(
    template: _Template, conversation: Conversation, whole: list[int], turn: int
) -> tuple[int, int]:
    """Tokens of one assistant turn: after the generation prompt, to what ends the turn."""
    before = template.ids(turn, prompt=True)
    if not _begins(whole, before):
        _refuse(
            conversation,
            turn,
            "does not begin with the generation prompt: " + _MISMATCH.format("before"),
        )
    if turn == len(conversation.messages) - 1:
        return len(before), len(whole)
    end = _end_of_prefix(template, whole, turn + 1)
    if end is None:
        _refuse(
            conversation,
            turn,
            "is written differently once messages follow: " + _MISMATCH.format("up to"),
        )
    return len(before), end


_MISMATCH = (
    "templating the messages {} it does not give the beginning of the whole conversation; set "
    "its loss_mask to 0, give a template that does, or set on_mismatch to realign"
)


def _end_of_prefix(template: _Template, whole: list[int], count: int) -> int | None:
    """Length of what the template writes of the first messages, None if the whole differs.

    Some templates close a text that asks for no answer (Phi-3 with `<|endoftext|>`); what is
    written either way, with and without the generation prompt, is that of the messages.
    """
    prefix = template.ids(count)
    if _begins(whole, prefix):
        return len(prefix)
    shared = prefix[: _shared_length(prefix, template.ids(count, prompt=True))]
    return len(shared) if _begins(whole, shared) else None


def _begins(whole: list[int], prefix: list[int]) -> bool:
    return whole[: len(prefix)] == prefix


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _refuse(conversation: Conversation, turn: int, rule: str) -> NoReturn:
    role = conversation.messages[turn]["role"]
    raise DataError(f"{conversation.place}: messages[{turn}] ({role}) {rule}.")


def _realigned_span(
    template: _Template, conversation: Conversation, whole: list[int], turn: int
) -> tuple[int, int]:
    """As `_exact_span`, but looked for where the whole is not written like its beginnings.

    A token across the first edge is the turn's, one across the second edge is not.
    """
    count = len(conversation.messages)
    at = _place_of(template, conversation, whole, turn)
    bare, prompted = template.ids(turn), template.ids(turn, prompt=True)
    prompt = prompted[_shared_length(bare, prompted) :]
    start = at + _shared_length(prompt, whole[at:])
    if turn == count - 1:
        return start, len(whole)
    following = next(
        (i for i in range(turn + 1, count) if conversation.messages[i]["role"] == ASSISTANT), None
    )
    limit = len(whole)
    if following is not None:
        limit = _place_of(template, conversation, whole, following)
    end = _end_of_prefix(template, whole, turn + 1)
    if end is None or not start < end <= limit:
        end = _after_longest_tail(whole, template.ids(turn + 1), start, limit)
    if end is None:
        _refuse(conversation, turn, "cannot be found in the whole conversation; drop the row")
    return start, end


def _place_of(template: _Template, conversation: Conversation, whole: list[int], count: int) -> int:
    """Where in the whole conversation its first messages end."""
    at = _end_of_prefix(template, whole, count)
    if at is None:
        at = _after_longest_tail(whole, template.ids(count), 0, len(whole))
    if at is None:
        _refuse(conversation, count, "cannot be found in the whole conversation; drop the row")
    return at


def _after_longest_tail(whole: list[int], part: list[int], low: int, high: int) -> int | None:
    """Position in ``(low, high]`` after the longest end of ``part``; the first of equals."""
    best, length = None, 0
    for end in range(low + 1, high + 1):
        shared = 0
        while shared < min(end, len(part)) and whole[end - 1 - shared] == part[-1 - shared]:
            shared += 1
        if shared > length:
            best, length = end, shared
    return best
