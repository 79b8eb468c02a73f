"""The trained text of ten model families' chat templates, turn by turn, stands beside it."""

import json
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft import masks
from megatron_ext.text.sft.chat import _described, check_template_kwargs
from megatron_ext.text.sft.conversation import Conversation, Place, read_conversation
from megatron_ext.text.sft.masks import tokenize_conversation, tokenize_samples
from tests.text.sft import tiny

PLACE = Place("chats.jsonl", 7)
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be kind."}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, you."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Zwei, 二 🙂"},
]
TRAINED = sorted(tiny.TEMPLATES.glob("*.trained"))
REALIGN = SftConfig(sft_on_mismatch="realign")
REALIGN_AND_NOTE = SftConfig(sft_on_mismatch="realign", sft_on_unrendered="note")


def conversation(messages: list[dict[str, Any]], **more: Any) -> Conversation:
    return read_conversation({"messages": messages, **more}, PLACE)


def trained_text(
    family: str,
    messages: list[dict[str, Any]],
    options: SftConfig | None = None,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    template: str | None = None,
    **more: Any,
) -> str:
    tokenizer = tiny.tokenizer(family, merges=merges, template=template)
    tokenized = tokenize_conversation(tokenizer, conversation(messages, **more), options)
    return tiny.shown(tokenizer, tokenized)


EXPECTED = {path.stem: path.read_text(encoding="utf-8") for path in TRAINED}
"""The text of ``[SYSTEM, *TALK]`` by family, with what is trained between [[ and ]]."""


@pytest.mark.parametrize("family", EXPECTED)
def test_trained_text_is_the_assistants_turns_and_realigning_changes_nothing(family: str) -> None:
    messages = TALK if family == "gemma" else [SYSTEM, *TALK]
    for options in (None, REALIGN):
        assert trained_text(family, messages, options) == EXPECTED[family]


@pytest.mark.parametrize("family", EXPECTED)
def test_loss_mask_0_removes_a_turn(family: str) -> None:
    first = {**TALK[1], "loss_mask": 0}
    messages = [TALK[0], first, TALK[2], {**TALK[3], "loss_mask": 1}]
    messages = messages if family == "gemma" else [SYSTEM, *messages]
    begin, end = EXPECTED[family].split("[[", 1)
    expected = begin + end.replace("]]", "", 1)
    assert expected.count("[[") == 1
    assert trained_text(family, messages) == expected


def test_loss_mask_0_everywhere_trains_nothing() -> None:
    messages = [TALK[0], {**TALK[1], "loss_mask": 0}]
    for family in ("chatml", "chatml_generation"):
        assert "[[" not in trained_text(family, messages)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1 and 2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "2 and 4."},
]
TOOL_HEAD = (
    "<|im_start|>system\nYou are a function calling AI model. Here are the available tools: <tools>"
    '\n{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
    "\n</tools><|im_end|>\n<|im_start|>user\n1+1 and 2+2?<|im_end|>\n<|im_start|>assistant\n"
)
TOOL_TAIL = (
    "<|im_start|>tool\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    "\n<|im_end|>\n<|im_start|>assistant\n[[2 and 4.<|im_end|>\n]]"
)
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "json"])
def test_tools_are_written_once_and_tool_messages_merged(tools: Any) -> None:
    text = trained_text("hermes", TOOL_TALK, tools=tools)
    assert text == f"{TOOL_HEAD}[[{TOOL_CALL}]]{TOOL_TAIL}"
    assert text.count("<tools>") == 1


THINKS: list[dict[str, Any]] = [
    TALK[0],
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello."},
    TALK[2],
    {"role": "assistant", "content": "<think>\nSum.\n</think>\n\n2"},
]
THINKS_HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
THINKS_TAIL = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    "[[<think>\nSum.\n</think>\n\n2<|im_end|>\n]]"
)


def test_a_turn_that_is_written_otherwise_is_an_error() -> None:
    with pytest.raises(DataError) as caught:
        trained_text("qwen3", THINKS)
    said = "chats.jsonl, row 7: messages[1] (assistant) is written differently once messages follow"
    assert str(caught.value).startswith(said)


REMOVED = {**THINKS[1], "loss_mask": 0}
THOUGHTS: dict[str, Any] = {
    "single turn": (THINKS[:2], None, "[[<think>\nA greeting.\n</think>\n\nHello.<|im_end|>\n]]"),
    "removed": ([THINKS[0], REMOVED, *THINKS[2:]], None, f"Hello.<|im_end|>\n{THINKS_TAIL}"),
    "found in the whole": (THINKS, REALIGN, f"[[Hello.<|im_end|>\n]]{THINKS_TAIL}"),
    "like a later turn": ([*THINKS[:1], THINKS[3], *THINKS[2:]], REALIGN,
                          f"[[2<|im_end|>\n]]{THINKS_TAIL}"),
}  # fmt: skip


@pytest.mark.parametrize("case", THOUGHTS)
def test_thoughts_are_trained_or_removed_or_realigned(case: str) -> None:
    messages, options, expected = THOUGHTS[case]
    assert trained_text("qwen3", messages, options) == f"{THINKS_HEAD}{expected}"


def test_realign_is_not_led_astray_by_a_question_that_quotes_the_turn() -> None:
    quote = {"role": "user", "content": "You said\nHello.<|im_end|>\n?"}
    text = trained_text("qwen3", [*THINKS[:2], quote, THINKS[3]], REALIGN)
    assert text.startswith(f"{THINKS_HEAD}[[Hello.<|im_end|>\n]]<|im_start|>user\nYou said\nHello.")
    assert text.count("[[") == 2


@pytest.mark.parametrize("run", [True, False])
def test_enable_thinking_of_a_row_goes_before_the_run_s(run: bool) -> None:
    options = SftConfig(sft_template_kwargs=json.dumps({"enable_thinking": run}))
    empty = "<think>\n\n</think>\n\n"
    off = f"{THINKS_HEAD}{empty}[[Hello.<|im_end|>\n]]"
    on = f"{THINKS_HEAD}[[{empty}Hello.<|im_end|>\n]]"
    messages = [TALK[0], {"role": "assistant", "content": "Hello."}]
    assert trained_text("qwen3", messages, options) == (on if run else off)
    assert trained_text("qwen3", messages, options, enable_thinking=False) == off
    assert trained_text("qwen3", messages, options, enable_thinking=True) == on


def test_a_generation_prompt_that_the_turn_does_not_repeat() -> None:
    messages = [TALK[0], {"role": "assistant", "content": "Hello."}, *TALK[2:]]
    with pytest.raises(DataError, match=r"messages\[1\] \(assistant\) does not begin with the gen"):
        trained_text("qwen3", messages, enable_thinking=False)
    expected = (
        f"{THINKS_HEAD}[[Hello.<|im_end|>\n]]<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[Zwei, 二 🙂<|im_end|>\n]]"
    )
    assert trained_text("qwen3", messages, REALIGN, enable_thinking=False) == expected


def test_a_system_text_that_moves_to_the_last_question() -> None:
    with pytest.raises(DataError, match=r"messages\[2\] \(assistant\) does not begin with the gen"):
        trained_text("mistral_system_last", [SYSTEM, *TALK])
    found = trained_text("mistral_system_last", [SYSTEM, *TALK], REALIGN)
    first, last = "<s>[INST] Hi[/INST][[ Hello, you.</s>]]", "1+1?[/INST][[ Zwei, 二 🙂</s>]]"
    assert found == f"{first}[INST] Be kind.\n\n{last}"


def test_a_token_across_the_edge_of_a_turn() -> None:
    merged = (("Ċ", "Ċ"),)
    messages = [TALK[0], {"role": "assistant", "content": "\nHello."}]
    with pytest.raises(DataError, match=r"messages\[1\] \(assistant\) does not begin with the gen"):
        trained_text("chatml", messages, merges=merged)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant[[\n\nHello.<|im_end|>\n]]"
    assert trained_text("chatml", messages, REALIGN, merges=merged) == expected


def test_consecutive_assistant_messages_are_two_turns() -> None:
    messages = [TALK[0], TALK[1], {"role": "assistant", "content": "More."}]
    assert trained_text("chatml", messages) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello, you.<|im_end|>\n]]"
        "<|im_start|>assistant\n[[More.<|im_end|>\n]]"
    )


def test_template_kwargs_reach_the_template() -> None:
    template = "{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    kwargs = json.dumps({"greeting": "Moin", "chat_template": template})
    found = trained_text("chatml", TALK[:2], SftConfig(sft_template_kwargs=kwargs))
    assert found == "Moin<|im_start|>Hi[[<|im_start|>Hello, you.]]"


def test_a_conversation_that_begins_with_the_assistant() -> None:
    with pytest.raises(DataError, match=r"messages\[0\] \(assistant\) has no message before it"):
        trained_text("chatml", TALK[1:])
    messages = [{**TALK[1], "loss_mask": 0}, *TALK[2:]]
    assert trained_text("chatml", messages).count("[[") == 1


def test_a_turn_without_tokens() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [TALK[0], {"role": "assistant", "content": ""}]
    for options in (None, REALIGN):
        with pytest.raises(DataError, match=r"messages\[1\] \(assistant\) adds no token"):
            trained_text("chatml", messages, options, template=template)


def test_a_template_that_drops_turns_cannot_be_realigned() -> None:
    template = (
        "{% for m in messages[-1:] %}{{ m.content }}{% if m.role == 'user' %}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"messages\[1\] .*cannot be found in the whole"):
        trained_text("chatml", TALK[:3], REALIGN_AND_NOTE, template=template)


NEEDS_ID = (
    "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Nine letters.') }}{% endif %}{{ m.content }}{% endfor %}"
    "{% for t in tools %}{{ 'tool ' + t.name }}{% endfor %}"
)


def test_what_the_template_refuses_names_the_row_and_the_message() -> None:
    with pytest.raises(
        DataError,
        match=r"chats.jsonl, row 7: the chat template refuses `messages\[0\]` \(role system, with "
        r"content\): TemplateError: System role not supported; correct the row, or give",
    ):
        trained_text("gemma", [SYSTEM, *TALK])
    answered = [*TALK, {"role": "tool", "content": "4", "seconds": {"all": 2}}]
    with pytest.raises(
        DataError,
        match=r"`messages\[4\]` \(role tool, with content, seconds.all, without tool_call_id\): "
        r".*Nine letters",
    ):
        trained_text("chatml", answered, template=NEEDS_ID)


def test_what_the_template_refuses_names_the_tools() -> None:
    row = {"messages": TALK, "tools": [{"type": "browser"}]}
    template = tiny.tokenizer("chatml", template=NEEDS_ID)
    with pytest.raises(
        DataError,
        match=r"the chat template refuses `tools` \(with tools\[\].type\): UndefinedError",
    ):
        tokenize_conversation(template, read_conversation(row, Place("chats.jsonl", 7)))


def test_no_template_and_keywords_that_are_set_anyway() -> None:
    tokenizer = tiny.tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenize_conversation(tokenizer, conversation(TALK))
    with pytest.raises(ConfigError, match=r"`--sft-template-kwargs` \(tokenize\) must not"):
        check_template_kwargs({"tokenize": False})


ONE_MARK = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' and loop.last %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}"
)


def test_generation_marks_that_miss_a_turn_or_all() -> None:
    with pytest.raises(DataError, match="give 1 runs of trained tokens for 2 assistant messages"):
        trained_text("chatml", TALK, template=ONE_MARK)
    text = trained_text("chatml", TALK, REALIGN, template=ONE_MARK)
    assert text.count("[[") == 1 and "[[Zwei, 二 🙂]]<|im_end|>" in text
    removed = [{**message, "loss_mask": 0} for message in TALK]
    for options in (None, REALIGN):
        with pytest.raises(DataError, match="give 1 runs"):
            trained_text("chatml", removed, options, template=ONE_MARK)
    # Not even when realigning.
    with pytest.raises(DataError, match="generation marks of the chat template train nothing"):
        trained_text("chatml", TALK[:3], REALIGN, template=ONE_MARK)


def test_generation_marks_whose_last_character_has_no_token() -> None:
    # transformers then trains all that follows.
    template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '\n' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = tiny.tokenizer("chatml", template=template, drop="\n")
    with pytest.raises(DataError, match="train the end of a message that is not the assistant's"):
        tokenize_conversation(tokenizer, conversation(TALK[:3]))
    with pytest.raises(DataError, match="give 1 runs of trained tokens for 2 assistant messages"):
        tokenize_conversation(tokenizer, conversation(TALK))


def test_a_slow_tokenizer_goes_by_prefixes() -> None:
    tokenizer = tiny.tokenizer("chatml_generation")

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    tokenized = tokenize_conversation(Slow(), conversation([SYSTEM, *TALK]))
    assert tiny.shown(tokenizer, tokenized) == EXPECTED["chatml"]


def test_turns_make_samples_of_their_own_and_what_follows_the_last_is_counted() -> None:
    first = {**TALK[1], "loss_mask": 1}
    messages = [TALK[0], first, *TALK[2:], TALK[0], {**TALK[1], "loss_mask": 0}, TALK[2]]
    given = conversation(messages)
    tokenizer = tiny.tokenizer("chatml")
    samples = tokenize_samples(tokenizer, given, SftConfig(sft_split_turns=True))
    assert [tiny.shown(tokenizer, sample) for sample in samples] == [
        trained_text("chatml", messages[:2]),
        trained_text("chatml", [TALK[0], {**TALK[1], "loss_mask": 0}, *TALK[2:]]),
    ]
    assert given.intake.ignored == {"messages after the last trained turn": 3}
    whole = tokenize_conversation(tokenizer, given, SftConfig(sft_split_turns=True))
    assert tiny.shown(tokenizer, whole) == trained_text("chatml", messages)


def test_the_first_of_equal_endings_is_taken() -> None:
    whole = [1, 2, 3, 9, 2, 3, 1, 2, 3]
    for part, low, high, end in (
        ([2, 3], 0, 9, 3), ([2, 3], 3, 9, 6), ([1, 2, 3], 3, 9, 9), ([7, 9, 2, 3], 0, 9, 6),
        ([2, 3], 0, 2, None), ([8], 0, 9, None), ([1, 2, 3], 0, 3, 3), ([5, 3], 3, 5, None),
    ):  # fmt: skip
        assert masks._end_of_longest_suffix(whole, part, low, high) == end


def test_generation_marks_train_all_bytes_of_a_last_letter_and_no_token_after_it() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [
        TALK[0],
        {"role": "assistant", "content": "a \U0001f642"},
        {"role": "user", "content": "b"},
    ]
    assert trained_text("chatml", messages, template=template) == "Hi[[a \U0001f642]]b"


def test_a_refused_message_is_described_by_what_it_has_and_lacks() -> None:
    """Values within the arguments of a call are its own affair."""
    bare = {"name": "f", "arguments": {"x": {"y": 1}}, "id": "1"}
    nested = {"type": "function", "function": {"name": "g"}, "extra": [{"a": 1}, {"b": 2}]}
    for message, described in (
        ({"role": "user", "content": "x"}, "role user, with content"),
        ({"role": "tool", "content": [{"text": "x"}]},
         "role tool, with content[].text, without tool_call_id"),
        ({"role": "assistant", "tool_calls": [bare]},
         "role assistant, with tool_calls[].name, tool_calls[].arguments, tool_calls[].id, "
         "without content"),
        ({"role": "assistant", "content": "", "tool_calls": [nested]},
         "role assistant, with content, tool_calls[].type, tool_calls[].function.name, "
         "tool_calls[].extra[].a, tool_calls[].extra[].b, without tool_calls[].id, "
         "tool_calls[].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]},
         "role assistant, with tool_calls[].name, without content, tool_calls[].id, "
         "tool_calls[].arguments"),
    ):  # fmt: skip
        assert _described(message) == described
