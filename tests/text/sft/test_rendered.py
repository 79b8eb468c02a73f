"""A part that a template leaves out of the text is refused, or counted by its name."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft import rendered
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.masks import tokenize_samples
from megatron_ext.text.sft.rendered import Leaf, Unrendered, find_left_out
from tests.text.sft import tiny

KNOWN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>"
    "{{ m.role }}: {{ m.content or '' }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "as you say"}
LEFT_OUT: dict[str, tuple[dict[str, Any], str, int]] = {
    # A short text that stands elsewhere in the whole text is left out nevertheless.
    "a role": (
        {"messages": [USER, {"role": "function", "content": "a"}, ANSWER]},
        "`messages[1].content` (a message of role function)",
        1,
    ),
    "tools": (
        {"messages": [USER, ANSWER], "tools": [{"name": "add", "parameters": {"type": "object"}}]},
        "`tools[0].name` (a tool)",
        2,
    ),
    "a call": (
        {"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]},
        "`messages[1].tool_calls[0].function.name` (a tool call)",
        2,
    ),
    "reasoning": (
        {"messages": [USER, {**ANSWER, "reasoning_content": "a"}]},
        "`messages[1].reasoning_content` (the reasoning of a trained turn)",
        1,
    ),
}


def read(row: dict[str, Any], template: str = KNOWN, **options: Any) -> Intake:
    tokenizer, sft = tiny.tokenizer("chatml", template=template), SftConfig(**options)
    conversation = read_conversation(row, Place("f", 1), sft)
    tokenize_samples(tokenizer, conversation, sft)
    return conversation.intake


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_model_must_learn_or_know_is_refused_or_counted(case: str) -> None:
    row, name, count = LEFT_OUT[case]
    with pytest.raises(DataError) as caught:
        read(row)
    assert str(caught.value).startswith(f"f, row 1: {name} is left out of the text by the chat")
    assert str(caught.value).endswith("such parts with `--sft-on-unrendered note`.")
    unrendered = read(row, sft_on_unrendered="note").unrendered
    assert sum(unrendered.values()) == count
    plain = name.replace("[0]", "[]").replace("[1]", "[]")
    path, what = plain.split(" ", 1)
    assert unrendered[f"{what[1:-1]} ({path})"] == 1


def test_a_tool_without_its_name_is_left_out() -> None:
    """A model can call a tool that it knows by its name alone, but none that has no name."""
    row = {"messages": [USER, ANSWER], "tools": [{"name": "add", "description": "sums up"}]}
    tools = "{% for tool in tools or [] %}{{ tool.description }} {% endfor %}"
    with pytest.raises(DataError, match=r"^f, row 1: `tools\[0\].name` \(a tool\) is left out"):
        read(row, tools + KNOWN)
    intake = read(row, tools.replace("description", "name") + KNOWN)
    assert not intake.unrendered and intake.ignored == {"`tools[].description`": 1}


def test_every_other_key_and_column_is_counted_by_its_name() -> None:
    named = [{**USER, "name": "Eve", "extra": {"deep": [1, True]}}, {**ANSWER, "score": 0.5}]
    row = {"messages": named, "id": 7, "source": "web", "enable_thinking": True, "empty": None}
    assert read(row).ignored == {
        "column `id`": 1, "column `source`": 1, "column `enable_thinking`": 1,
        "`messages[].name`": 1, "`messages[].extra.deep[]`": 2, "`messages[].score`": 1,
    }  # fmt: skip
    every = KNOWN.replace("{{ m.content or '' }}", "{{ m | tojson }}{{ enable_thinking }}")
    assert read(row, every).ignored == {"column `id`": 1, "column `source`": 1}


OWN_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "sharegpt": (
        {"conversations": [{"from": "tool", "value": "a"}, {"from": "gpt", "value": "b", "n": 1}]},
        "`conversations[0].value` (a message of role tool)",
    ),
    "prompt-completion": (
        {"prompt": [{"role": "tool", "content": "a"}], "completion": [{**ANSWER, "n": 1}]},
        "`prompt[0].content` (a message of role tool)",
    ),
    "prompt-response": ({"question": "a", "answer": "b"}, "`answer` (a message of role assistant)"),
    "alpaca": (
        {"instruction": "c", "output": "d", "history": [["a", "b"]]},
        "`history[0][1]` (a message of role assistant)",
    ),
    "messages": (
        {"talk": [USER, ANSWER], "functions": [{"name": "add"}]},
        "`functions[0].name` (a tool)",
    ),
}


@pytest.mark.parametrize("layout", OWN_NAMES)
def test_values_have_the_names_that_they_have_in_the_row(layout: str) -> None:
    row, name = OWN_NAMES[layout]
    options: dict[str, Any] = {"sft_row_format": layout}
    options |= {"sft_messages_key": "talk", "sft_tools_key": "functions"}
    template = KNOWN
    if layout in ("prompt-response", "alpaca"):
        template = KNOWN.replace("m.content or ''", "m.content if m.role == 'user' else ''")
    with pytest.raises(DataError) as caught:
        read(row, template, **options)
    assert str(caught.value).startswith(f"f, row 1: {name} is left out of the text by the chat")
    if layout == "sharegpt":
        ignored = read(row, sft_on_unrendered="note", **options).ignored
        assert ignored == {"`conversations[].n`": 1}


def test_a_value_that_steers_the_template_is_used() -> None:
    steered = KNOWN.replace("{{ m.role }}:", "{{ 'loud' if m.loud else 'soft' }}:")
    steered = steered.replace("assistant: {% endif", "soft: {% endif")
    row = {"messages": [{**USER, "loud": True}, ANSWER]}
    assert read(row, steered).ignored == {}
    assert read(row).ignored == {"`messages[].loud`": 1}


def test_a_part_of_a_text_that_is_left_out_is_counted() -> None:
    cut = KNOWN.replace("m.content or ''", "(m.content or '').split('|')[-1]")
    row = {"messages": [{**USER, "content": "lost | kept"}, ANSWER]}
    assert read(row, cut).ignored == {"a part of `messages[].content` (role user)": 1}
    assert read(row).ignored == {}


THINKS = [
    USER,
    {**ANSWER, "reasoning_content": "one"},
    USER,
    {**ANSWER, "reasoning_content": "two"},
]


def test_reasoning_of_earlier_turns_is_trained_by_samples_of_their_own() -> None:
    last = KNOWN.replace(
        "{{ m.content", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content"
    )
    row = {"messages": [*THINKS, {**USER, "content": "bye"}]}
    with pytest.raises(
        DataError, match="`--sft-split-turns`, train the turn as it is written with"
    ):
        read({"messages": THINKS}, last)
    # Of the last turn no sample of its own would write it either.
    never = {"messages": [*THINKS[:1], ANSWER, *THINKS[2:], {**USER, "content": "bye"}]}
    with pytest.raises(DataError) as caught:
        read(never)
    assert "`messages[3].reasoning_content` (the reasoning of a trained turn)" in str(caught.value)
    assert "; give a template that writes it, take it out of the row, or count" in str(caught.value)
    intake = read(row, last, sft_split_turns=True)
    assert intake.ignored == {"messages after the last trained turn": 1}
    assert read({"messages": THINKS}, last, sft_on_mismatch="realign").ignored == {
        "`messages[].reasoning_content`": 1
    }


def test_counts_are_added_and_read_back() -> None:
    one = read({"messages": [USER, ANSWER], "id": 7})
    total = Intake.total([one, Intake.from_dict(one.as_dict())])
    assert total.counts["rows"] == 2 and total.ignored == {"column `id`": 2}
    assert total.warnings() == [
        "ignored, because neither this program nor the chat template uses it: column `id` (2)"
    ]
    assert total.summary() == "2 rows, 4 messages, 2 assistant turns"


def test_a_sentence_lists_forty_names_and_counts_the_others() -> None:
    for number, end in ((40, "n39 (1)"), (41, "n39 (1), and 1 more names"), (1, "n0 (1)")):
        intake = Intake()
        intake.dropped.update({f"n{index}": 1 for index in range(number)})
        (sentence,) = intake.warnings()
        assert sentence.startswith("dropped: n0 (1)") and sentence.endswith(end)
    intake.counts.update({"rows": 3, "tools": 0})
    assert intake.summary() == "3 rows"


def test_a_value_is_left_out_or_cut_if_it_is_in_every_sample_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three samples of one, two and three messages; a tool is in all of them."""
    samples: list[Any] = [
        SimpleNamespace(conversation=SimpleNamespace(messages=[USER] * count))
        for count in (1, 2, 3)
    ]
    one, two, three = (Leaf(("messages", n, "content"), "a") for n in range(3))
    tool = Leaf(("tools", 0, "name"), "a")

    def left_out(*found: tuple[str, str]) -> tuple[set[Any], set[Any]]:
        """Return what is left out and cut, given the letters of both in each sample."""
        named = {"1": one, "2": two, "3": three, "t": tool}
        parts = iter(
            Unrendered(*({named[x].path: named[x] for x in letters} for letters in each))
            for each in found
        )
        monkeypatch.setattr(rendered, "find_unrendered", lambda sample: next(parts))
        whole = find_left_out(samples)
        letter = {leaf.path: name for name, leaf in named.items()}
        return {letter[p] for p in whole.absent}, {letter[p] for p in whole.partly}

    assert left_out(("1", ""), ("1", ""), ("1", "")) == ({"1"}, set())
    assert left_out(("1", ""), ("", "1"), ("1", "")) == (set(), {"1"})
    assert left_out(("1", ""), ("", ""), ("1", "")) == (set(), set())
    assert left_out(("", "1"), ("", ""), ("", "")) == (set(), set())
    assert left_out(("", ""), ("", ""), ("3", "")) == ({"3"}, set())
    assert left_out(("", ""), ("2", ""), ("", "2")) == (set(), {"2"})
    assert left_out(("t", ""), ("t", ""), ("", "t")) == (set(), {"t"})
    assert left_out(("", ""), ("t", ""), ("t", "")) == (set(), set())


def test_a_text_that_is_written_apart_is_whole() -> None:
    """A template takes the thoughts out of a text and writes them by themselves."""
    thoughts = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello."}
    tokenizer, sft = tiny.tokenizer("qwen3"), SftConfig()
    conversation = read_conversation({"messages": [USER, thoughts]}, Place("f", 1), sft)
    tokenize_samples(tokenizer, conversation, sft)
    assert conversation.intake.ignored == {} == conversation.intake.unrendered


def test_marks_are_in_no_text() -> None:
    for whole in ("", "zq", "zq zqq", "zqqqq zq zqq", "a zqq"):
        assert rendered._nonce(whole) not in whole


def test_an_argument_may_have_any_name() -> None:
    """The `type` of a call says nothing, but an argument of that name does."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"type": "function"}}}
    row = {"messages": [USER, {**ANSWER, "tool_calls": [call]}]}
    names = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    name = r"`messages\[1\].tool_calls\[0\].function.arguments.type` \(a tool call\)"
    with pytest.raises(DataError, match=rf"^f, row 1: {name} is left out of the text"):
        read(row, KNOWN.replace("<|im_end|>", names + "<|im_end|>"))
    every = names.replace("c.function.name", "c.function | tojson")
    assert read(row, KNOWN.replace("<|im_end|>", every + "<|im_end|>")).ignored == {}
    # What else a call has is no part of it, whatever the names within.
    extra = {**call, "trace": {"name": "t", "arguments": [1]}}
    row = {"messages": [USER, {**ANSWER, "tool_calls": [extra]}]}
    assert read(row, KNOWN.replace("<|im_end|>", every + "<|im_end|>")).ignored == {
        "`messages[].tool_calls[].trace.name`": 1,
        "`messages[].tool_calls[].trace.arguments[]`": 1,
    }


def test_a_part_of_a_list_that_is_left_out_is_a_message() -> None:
    last = KNOWN.replace(
        "m.content or ''", "m.content if m.content is string else m.content[-1].text"
    )
    parts = [{"type": "text", "text": "lost"}, {"type": "text", "text": "kept"}]
    row = {"messages": [{"role": "user", "content": parts}, ANSWER]}
    name = r"`messages\[0\].content\[0\].text` \(a message of role user\)"
    with pytest.raises(DataError, match=rf"^f, row 1: {name} is left out of the text"):
        read(row, last)
