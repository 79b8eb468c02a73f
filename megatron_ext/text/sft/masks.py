"""Tokenizes a conversation by its chat template, and masks the tokens that are trained.

A template with ``{% generation %}`` marks the trained text itself. With any other template, we find
an assistant turn by applying the template twice: to the messages before the turn, with the
generation prompt, and to the messages up to and including the turn. The tokens between the ends of
the two texts belong to the turn: its words, its end-of-turn token and all that the template writes
after it.

Both results must be prefixes of the whole conversation. We compare texts first, because this needs
only one tokenization. If a turn begins or ends inside a token of the whole conversation, we
tokenize both results and compare tokens instead.
"""

import datetime
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, NoReturn

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import (
    ChatTokenizer,
    RefusedByTemplate,
    Template,
    end_finder,
    reads_variable,
    with_date,
)
from megatron_ext.text.sft.conversation import ASSISTANT, Conversation
from megatron_ext.text.sft.fit import fitted
from megatron_ext.text.sft.rendered import find_left_out, report_unrendered

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TokenizedConversation(NamedTuple):
    """The token ids ``[s]`` of a conversation, and its mask ``[s]``: 1 if trained, else 0."""

    ids: list[int]
    mask: list[int]


def tokenize_conversation(
    tokenizer: ChatTokenizer, conversation: Conversation, sft: SftConfig | None = None
) -> TokenizedConversation:
    """Return the token ids and the mask of a whole conversation, without splitting it into turns.

    If ``sft`` is None, the options have their defaults. Raise a ConfigError if there is no chat
    template. Raise a DataError if ids or mask cannot be found, or if the template leaves out a part
    of the conversation.
    """
    sft = replace(sft or SftConfig(), sft_split_turns=False)
    return tokenize_samples(tokenizer, conversation, sft)[0]


def tokenize_samples(
    tokenizer: ChatTokenizer, conversation: Conversation, sft: SftConfig
) -> list[TokenizedConversation]:
    """Return the token ids and the mask of each training sample that a conversation gives.

    The whole conversation is one sample; with ``--sft-split-turns`` each trained turn is a sample,
    together with the messages before it. Values that are converted for the template, and values
    that the template leaves out, are added to the counts in ``conversation.intake``. Raise a
    ConfigError if there is no chat template, and a DataError if ids or mask cannot be found.
    """
    kwargs = sft.template_kwargs
    if kwargs.get("chat_template") is None and not tokenizer.chat_template:
        raise ConfigError(
            "The tokenizer has no chat template, so conversations cannot be tokenized; give one "
            "with `--sft-chat-template`."
        )
    if sft.sft_date is not None and kwargs.get("chat_template"):
        day = datetime.date.fromisoformat(sft.sft_date)
        kwargs["chat_template"] = with_date(kwargs["chat_template"], day)
    try:
        return _tokenized_samples(Template(tokenizer, conversation, kwargs), sft)
    except RefusedByTemplate as error:
        raise error.with_part() from None


def _tokenized_samples(template: Template, sft: SftConfig) -> list[TokenizedConversation]:
    conversation = template.conversation
    intake = conversation.intake
    template = fitted(template, sft)
    thinks = conversation.enable_thinking is not None
    if thinks and not reads_variable(template.source(), "enable_thinking"):
        intake.ignored[f"column `{sft.sft_enable_thinking_key}`"] += 1
    samples = _split(template) if sft.sft_split_turns else [template]
    report_unrendered(template.conversation, find_left_out(samples), sft, intake)
    return [_tokenized(sample, realign=sft.sft_on_mismatch == "realign") for sample in samples]


def _split(template: Template) -> list[Template]:
    """Return a template for each trained turn, bound to the messages up to and including that turn.

    In each of these conversations only the last turn is trained. If the given conversation has no
    trained turn, return a list with only the given template.
    """
    conversation = template.conversation
    turns = [index for index, trained in enumerate(conversation.trained) if trained]
    if not turns:
        return [template]
    num_unused = len(conversation.messages) - 1 - turns[-1]
    if num_unused:
        conversation.intake.ignored["messages after the last trained turn"] += num_unused
    return [
        template.of(
            replace(
                conversation,
                messages=conversation.messages[: turn + 1],
                trained=(*(False for _ in range(turn)), True),
            )
        )
        for turn in turns
    ]


def _tokenized(template: Template, *, realign: bool) -> TokenizedConversation:
    tokenizer = template.tokenizer
    source = template.source()
    if tokenizer.is_fast and _GENERATION.search(source) is not None:
        return _by_generation_marks(template, realign=realign)
    if tokenizer.is_fast and (tokenized := _by_text(template)) is not None:
        return tokenized
    return _by_prefixes(template, realign=realign)


def _by_generation_marks(template: Template, *, realign: bool) -> TokenizedConversation:
    """Return ids and mask; tokens between the template's ``{% generation %}`` marks are trained.

    Turns with a loss mask of 0 are not trained. If the first or last character of a turn has no
    token, transformers marks wrong tokens: it drops all later turns, or marks all later text. To
    detect this, the spans of consecutive marked tokens are counted. Raise a DataError unless there
    is one span per turn. With ``realign`` (``--sft-on-mismatch realign``) any number above 0 will
    do if all turns are trained. The end of a message of another role must not be marked, either.
    """
    conversation = template.conversation
    encoded = template.apply(
        len(conversation.messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    ids = list(encoded["input_ids"])
    mask = list(encoded["assistant_masks"])
    # Several tokens can share a character, as bytes of an emoji do. Of the last character of a
    # turn, transformers marks only the first token; mark the others too.
    offsets = encoded["offset_mapping"]
    for i in range(1, len(mask)):
        if mask[i - 1] and not mask[i] and offsets[i][0] < offsets[i - 1][1]:
            mask[i] = 1
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    # The mask changes at the edges, so that pairs of edges are the runs [start, end) of ones.
    edges = [i for i, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    wrong = ""
    if not runs:
        wrong = "train nothing"
    elif mask[-1] == 1 and turns[-1] != len(conversation.messages) - 1:
        wrong = "train the end of a message that is not the assistant's"
    elif len(runs) == len(turns):
        for (start, end), turn in zip(runs, turns, strict=True):
            mask[start:end] = [int(conversation.trained[turn])] * (end - start)
    elif not realign or not all(conversation.trained[turn] for turn in turns):
        wrong = f"give {len(runs)} runs of trained tokens for {len(turns)} assistant messages"
    if wrong:
        raise DataError(
            f"{conversation.place}: the generation marks of the chat template {wrong}; correct the "
            "marks, or take them out of the template."
        )
    return TokenizedConversation(ids, mask)


def _by_text(template: Template) -> TokenizedConversation | None:
    """Return ids and mask by the positions in the text where turns begin and end.

    Return None unless all these positions are token boundaries. In a byte-pair encoding no merge
    crosses a token boundary, so the text before a boundary has the same tokens when it is encoded
    alone.
    """
    conversation = template.conversation
    count = len(conversation.messages)
    whole = template.whole
    encoded = template.encode(whole)
    ids = list(encoded["input_ids"])
    offsets = encoded["offset_mapping"]
    mask = [0] * len(ids)
    find_end = end_finder(template, count, whole)
    for turn in (i for i, trained in enumerate(conversation.trained) if trained):
        first = find_end(turn, True) if turn else None
        last = len(whole) if turn == count - 1 else find_end(turn + 1, False)
        if not first or last is None:
            return None
        start = _token_at(offsets, first)
        end = len(ids) if turn == count - 1 else _token_at(offsets, last)
        if start is None or end is None or end <= start:
            return None
        mask[start:end] = [1] * (end - start)
    return TokenizedConversation(ids, mask)


def _token_at(offsets: Sequence[tuple[int, int]], character: int) -> int | None:
    """Return the index of the token that begins at the index ``character`` of the text.

    ``offsets`` holds (start, end) in characters of each token. Return None unless the token before
    ends exactly at ``character``; the first token is therefore never returned.
    """
    token = bisect_left(offsets, character, key=lambda offset: offset[0])
    return token if token and offsets[token - 1][1] == character else None


def _by_prefixes(template: Template, *, realign: bool) -> TokenizedConversation:
    """Return ids and mask, found by tokenizing prefixes of the conversation.

    For each trained turn, tokenize the messages before it, and the messages up to and including it.
    Neither prefix ends between two consecutive tool messages, since a template may merge these. If
    a prefix's tokens differ from the beginning of the whole conversation's tokens, raise a
    DataError; with ``realign`` (``--sft-on-mismatch realign``) search the whole conversation for
    the turn's tokens instead.
    """
    conversation = template.conversation
    whole = template.ids(len(conversation.messages))
    mask = [0] * len(whole)
    find = _realigned_span if realign else _exact_span
    for turn in (i for i, trained in enumerate(conversation.trained) if trained):
        if turn == 0:
            _refuse(template, turn, "has no message before it, so no prompt; drop it")
        start, end = find(template, whole, turn)
        if end <= start:
            _refuse(template, turn, "adds no token of its own to the conversation; drop it")
        mask[start:end] = [1] * (end - start)
    return TokenizedConversation(whole, mask)


def _exact_span(template: Template, whole: list[int], turn: int) -> tuple[int, int]:
    """Return (start, end) of an assistant turn's tokens in the tokens ``whole``.

    ``turn`` is the index of the turn's message. The start is after the generation prompt. Raise a
    DataError unless ``whole`` begins with the tokens of the messages before the turn, and with
    those of the messages up to and including it.
    """
    before = template.ids(turn, prompt=True)
    if not _begins(whole, before):
        rule = "does not begin with the generation prompt: " + _MISMATCH.format("before")
        _refuse(template, turn, rule)
    if turn == len(template.conversation.messages) - 1:
        return len(before), len(whole)
    end = _end_of_prefix(template, whole, turn + 1)
    if end is None:
        rule = "is written differently once messages follow: " + _MISMATCH.format("up to")
        _refuse(template, turn, rule)
    return len(before), end


_MISMATCH = (
    "templating the messages {} it does not give the beginning of the whole conversation; set "
    "its loss_mask to 0, give a chat template that does, make a sample of each turn with "
    "`--sft-split-turns`, or look for the turn with `--sft-on-mismatch realign`"
)


def _end_of_prefix(template: Template, whole: list[int], count: int) -> int | None:
    """Return the number of tokens in ``whole`` that belong to the first ``count`` messages.

    What the template writes only at the end of a conversation is not counted. Return None if
    ``whole`` does not begin with the tokens of these messages.
    """
    prefix = template.ids(count)
    if _begins(whole, prefix):
        return len(prefix)
    # Some templates close a text that asks for no answer: harmony ends its last turn with another
    # token, and Phi-3 adds `<|endoftext|>`. So apply the template with the generation prompt, and
    # take what precedes the prompt. If we cannot tell what the prompt is, take the longest common
    # prefix of the results with and without it.
    before_prompt = _before_generation_prompt(template, count)
    if before_prompt is not None and _begins(whole, before_prompt):
        return len(before_prompt)
    shared = prefix[: _shared_length(prefix, template.ids(count, prompt=True))]
    return len(shared) if _begins(whole, shared) else None


def _before_generation_prompt(template: Template, count: int) -> list[int] | None:
    """Return the ids that the template writes for ``count`` messages before a generation prompt.

    They may differ from the ids without a prompt, since some templates end a text in another way
    then. To know the prompt, the template is applied to the first ``count - 1`` messages with and
    without it; the difference is the prompt. Return None if this does not show the prompt.
    """
    if count < 2:
        return None
    bare, prompted = (template.text(count - 1, prompt=prompt) for prompt in (False, True))
    text = template.text(count, prompt=True)
    prompt = prompted[len(bare) :]
    if not prompt or not prompted.startswith(bare) or not text.endswith(prompt):
        return None
    encoded = template.tokenizer(text.removesuffix(prompt), add_special_tokens=False)
    return list(encoded["input_ids"])


def _begins(whole: list[int], prefix: list[int]) -> bool:
    return whole[: len(prefix)] == prefix


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _refuse(template: Template, turn: int, rule: str) -> NoReturn:
    conversation = template.conversation
    role = conversation.messages[turn]["role"]
    raise DataError(f"{conversation.place}: {conversation.name(turn)} ({role}) {rule}.")


def _realigned_span(template: Template, whole: list[int], turn: int) -> tuple[int, int]:
    """Return (start, end) of a turn's tokens in ``whole``, the ids of the whole conversation.

    ``turn`` is the index of the turn's message. If the messages up to the turn have other tokens in
    ``whole`` than when tokenized alone, search ``whole`` for the last of these tokens. A token that
    holds both the end of the generation prompt and the start of the turn belongs to the turn.
    """
    messages = template.conversation.messages
    prompt_start = _end_of_messages(template, whole, turn)
    bare = template.ids(turn)
    prompted = template.ids(turn, prompt=True)
    prompt = prompted[_shared_length(bare, prompted) :]
    start = prompt_start + _shared_length(prompt, whole[prompt_start:])
    if turn == len(messages) - 1:
        return start, len(whole)
    later = range(turn + 1, len(messages))
    following = next((i for i in later if messages[i]["role"] == ASSISTANT), None)
    limit = len(whole) if following is None else _end_of_messages(template, whole, following)
    end = _end_of_prefix(template, whole, turn + 1)
    if end is None or not start < end <= limit:
        end = _end_of_longest_suffix(whole, template.ids(turn + 1), start, limit)
    if end is None:
        _refuse(template, turn, "cannot be found in the whole conversation; drop the row")
    return start, end


def _end_of_messages(template: Template, whole: list[int], count: int) -> int:
    """Return the index in the tokens ``whole`` at which the first ``count`` messages end.

    Raise a DataError if it cannot be found.
    """
    end = _end_of_prefix(template, whole, count)
    if end is None:
        end = _end_of_longest_suffix(whole, template.ids(count), 0, len(whole))
    if end is None:
        _refuse(template, count, "cannot be found in the whole conversation; drop the row")
    return end


def _end_of_longest_suffix(whole: list[int], part: list[int], low: int, high: int) -> int | None:
    """Find the longest suffix of ``part`` that occurs in ``whole``; return where it ends there.

    The end must be in (low, high]. Return None if not even the last token of ``part`` occurs.
    """
    best, length = None, 0
    for end in range(low + 1, high + 1):
        shared = 0
        while shared < min(end, len(part)) and whole[end - 1 - shared] == part[-1 - shared]:
            shared += 1
        if shared > length:
            best = end
            length = shared
    return best
