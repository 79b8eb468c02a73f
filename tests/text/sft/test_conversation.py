"""Rows to conversations: three layouts, and every rule by the text of its error."""

import json
import random
from typing import Any

import numpy as np
import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft import chat
from megatron_ext.text.sft.chat import Template, end_finder, marked_source
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import tokenize_conversation
from tests.text.sft import tiny

PLACE = Place("a.jsonl", 12)
SHAREGPT, PROMPTS = (SftConfig(sft_row_format=x) for x in ("sharegpt", "prompt-response"))
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def test_messages() -> None:
    masked, trained = ({**ASSISTANT, "loss_mask": mask} for mask in (0, 1))
    read = read_conversation({"messages": [USER, masked, USER, trained], "id": 4}, PLACE)
    assert read.messages == (USER, ASSISTANT, USER, ASSISTANT)
    assert read.trained == (False, False, False, True)
    assert read.tools is None and read.enable_thinking is None and read.place == PLACE
    named = SftConfig(sft_enable_thinking_key="thinks", sft_tools_key="functions")
    more = {"enable_thinking": False, "thinks": True, "tools": [{"name": "a"}]}
    read = read_conversation({**GOOD, **more, "functions": [{"name": "b"}]}, PLACE, named)
    assert (read.enable_thinking, read.tools) == (True, ({"name": "b"},))
    assert read.intake.ignored == {"column `enable_thinking`": 1, "column `tools`": 1}


def test_prompt_and_response_columns() -> None:
    row = {"question": "Hi", "answer": "Hello", "q": "Moin", "a": "Tach"}
    read = read_conversation(row, PLACE, PROMPTS)
    assert read.messages == (USER, ASSISTANT)
    assert read.trained == (False, True)
    named = {"sft_prompt_key": "q", "sft_response_key": "a"}
    read = read_conversation(row, PLACE, SftConfig(sft_row_format="prompt-response", **named))
    assert [message["content"] for message in read.messages] == ["Moin", "Tach"]
    with pytest.raises(DataError, match="`answer` must be a text, not NoneType"):
        read_conversation({"question": "Hi", "answer": None}, PLACE, PROMPTS)
    with pytest.raises(DataError, match="`question` is not a column of this row"):
        read_conversation({"answer": "Hi"}, PLACE, PROMPTS)


def test_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello", "loss_mask": 0},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "Bye"},
    ]
    read = read_conversation({"conversations": turns}, PLACE, SHAREGPT)
    roles = [message["role"] for message in read.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert read.messages[2] == ASSISTANT
    assert read.trained == (False, False, False, False, True)


def test_sharegpt_with_a_column_of_its_own_for_the_system() -> None:
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    names = SftConfig(sft_row_format="sharegpt", sft_system_key="sys")
    read = read_conversation({"conversations": turns, "sys": "be kind"}, PLACE, names)
    assert read.messages[0] == {"role": "system", "content": "be kind"}
    assert read.trained == (False, False, True)
    for empty in (None, ""):
        read = read_conversation({"conversations": turns, "sys": empty}, PLACE, names)
        assert [message["role"] for message in read.messages] == ["user", "assistant"]
    with pytest.raises(DataError, match="`sys` must be a text, not int"):
        read_conversation({"conversations": turns, "sys": 3}, PLACE, names)
    twice = [{"from": "system", "value": "z"}, *turns]
    with pytest.raises(DataError, match="`sys` is given, but `conversations` begins with a system"):
        read_conversation({"conversations": twice, "sys": "be kind"}, PLACE, names)


@pytest.mark.parametrize("several", [False, True])
def test_sharegpt_function_calls_are_the_assistants(several: bool) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    value = json.dumps([call, {"name": "stop"}] if several else call)
    turns = [
        {"from": "human", "value": "x"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    read = read_conversation({"conversations": turns}, PLACE, SHAREGPT)
    roles = [message["role"] for message in read.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    calls = [{"type": "function", "function": call}]
    if several:
        calls.append({"type": "function", "function": {"name": "stop", "arguments": {}}})
    assert read.messages[1]["tool_calls"] == calls
    assert read.trained == (False, True, False, True)


def test_nested_numpy_arrays_become_lists() -> None:
    call = {"function": {"name": "add", "arguments": {"terms": np.array([1, 2])}}}
    message = {"role": "assistant", "content": None, "tool_calls": np.array([call], dtype=object)}
    row = {
        "messages": np.array([USER, message], dtype=object),
        "tools": np.array([{"type": "function"}], dtype=object),
        "enable_thinking": np.bool_(False),
    }
    read = read_conversation(row, PLACE)
    plain_call = {"function": {"name": "add", "arguments": {"terms": [1, 2]}}}
    assert read.messages == (USER, {"role": "assistant", "tool_calls": [plain_call]})
    assert type(read.messages[1]["tool_calls"]) is list
    assert read.tools == ({"type": "function"},)
    assert read.enable_thinking is False


@pytest.mark.parametrize("key", ["weight", "train", "loss", "training", "trainable"])
def test_masks_of_other_programs(key: str) -> None:
    masked = [USER, {**ASSISTANT, key: 0}, {**USER, key: None}, {**ASSISTANT, key: True}]
    read = read_conversation({"messages": masked}, PLACE)
    assert read.messages == (USER, ASSISTANT, USER, ASSISTANT)
    assert read.trained == (False, False, False, True)
    assert read.intake.changed == {f"`{key}` as loss mask": 2}
    for value, rule in ((0.5, "must be 0 or 1, not 0.5"), ("no", "must be 0 or 1, not 'no'")):
        with pytest.raises(DataError, match=rf"`messages\[1\].{key}` {rule}"):
            read_conversation(with_message(**{key: value}), PLACE)
    for mask in (0, 1):
        alike = with_message(loss_mask=mask, **{key: bool(mask)})
        assert read_conversation(alike, PLACE).trained == (False, bool(mask))
    with pytest.raises(DataError, match=rf"`messages\[1\].loss_mask` contradicts `{key}`"):
        read_conversation(with_message(loss_mask=1, **{key: False}), PLACE)


def test_an_older_function_call_is_a_tool_call() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    read = read_conversation(with_message(content=None, function_call=call), PLACE)
    calls = [{"type": "function", "function": call}]
    assert read.messages[1] == {"role": "assistant", "tool_calls": calls}
    with pytest.raises(DataError, match=r"function_call` must be an object, and the only call"):
        read_conversation(with_message(function_call=call, tool_calls=calls), PLACE)


def test_json_text_stands_for_lists_and_objects_at_each_place() -> None:
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"type": "function", "function": function}]
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "add", "parameters": {"a": {}}}},
        {"name": "stop"},
    ]
    plain = {"messages": [USER, {**ASSISTANT, "tool_calls": calls}], "tools": tools}
    texts = [
        {**plain, "messages": json.dumps(plain["messages"])},
        {**plain, "messages": [json.dumps(message) for message in plain["messages"]]},
        {**plain, "messages": [USER, {**ASSISTANT, "tool_calls": json.dumps(calls)}]},
        {**plain, "messages": [USER, {**ASSISTANT, "tool_calls": [json.dumps(calls[0])]}]},
        with_message(tool_calls=[{**calls[0], "function": json.dumps(function)}])
        | {"tools": tools},
        {**plain, "tools": [json.dumps(tools[0]), tools[1]]},
        {**plain, "tools": [{**tools[0], "function": json.dumps(tools[0]["function"])}, tools[1]]},
        {
            **plain,
            "tools": [
                {**tools[0], "function": {"name": "add", "parameters": '{"a": {}}'}},
                tools[1],
            ],
        },
    ]
    expected = read_conversation(plain, PLACE)
    assert (expected.intake.counts["tools"], expected.intake.counts["tool calls"]) == (2, 1)
    for row in texts:
        assert read_conversation(row, PLACE) == expected
    with pytest.raises(DataError, match=r"`messages` is a text that is not JSON"):
        read_conversation({"messages": "[{"}, PLACE)
    with pytest.raises(DataError, match=r"`tools\[0\].parameters` must be an object, not int"):
        read_conversation({**plain, "tools": [{"name": "x", "parameters": 3}]}, PLACE)


def test_keys_whose_value_is_null_are_as_good_as_missing() -> None:
    arguments = {"a": None, "b": {"c": None, "d": [None, {"e": None}]}}
    call = {"function": {"name": "add", "arguments": arguments}, "id": None}
    tool = {"name": "add", "parameters": {"default": None, "enum": [1, None]}}
    row = with_message(content=None, tool_calls=[call]) | {"tools": [tool], "id": None}
    read = read_conversation(row, PLACE)
    kept = {"function": {"name": "add", "arguments": {"b": {"d": [None, {}]}}}}
    assert read.messages[1] == {"role": "assistant", "tool_calls": [kept]}
    assert read.tools == ({"name": "add", "parameters": {"enum": [1, None]}},)
    assert read.intake.ignored == {}
    assert read_conversation(with_message(tool_calls=[]), PLACE).messages[1] == ASSISTANT


COMPLETIONS = SftConfig(sft_row_format="prompt-completion")


def test_prompts_and_completions_are_texts_or_messages() -> None:
    for prompt in ("Hi", [USER], json.dumps([USER])):
        for completion in ("Hello", [ASSISTANT]):
            read = read_conversation(
                {"prompt": prompt, "completion": completion}, PLACE, COMPLETIONS
            )
            assert read.messages == (USER, ASSISTANT) and read.trained == (False, True)
    row = {"prompt": [USER, ASSISTANT, {**USER, "content": "[x"}], "completion": "Hello"}
    assert read_conversation(row, PLACE, COMPLETIONS).trained == (False, False, False, True)
    for mask, trained in ((1, True), (0, False)):
        masked = {**row, "prompt": [USER, {**ASSISTANT, "loss_mask": mask}]}
        read = read_conversation(masked, PLACE, COMPLETIONS)
        assert read.trained == (False, trained, True)
        assert read.intake.counts == {
            "rows": 1, "messages": 3, "assistant turns": 2,
            "turns with loss mask 0": int(not mask), "tools": 0, "tool calls": 0,
        }  # fmt: skip
    assert read_conversation({**row, "prompt": "[INST] x"}, PLACE, COMPLETIONS).messages[0] == {
        "role": "user", "content": "[INST] x",
    }  # fmt: skip


ALPACA = SftConfig(sft_row_format="alpaca")


def test_alpaca() -> None:
    row = {"instruction": "Add", "input": "1+1", "output": "2", "history": [["Hi", "Hello"]]}
    read = read_conversation({**row, "system": "Be kind."}, PLACE, ALPACA)
    assert [(m["role"], m["content"]) for m in read.messages] == [
        ("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"),
        ("user", "Add\n1+1"), ("assistant", "2"),
    ]  # fmt: skip
    assert read.trained == (False, False, True, False, True)
    for empty in ({"input": "", "history": []}, {"input": None, "history": None}):
        read = read_conversation({**row, **empty, "a": "", "b": [], "c": {}, "d": 0}, PLACE, ALPACA)
        assert [message["content"] for message in read.messages] == ["Add", "2"]
        assert read.intake.ignored == {"column `d`": 1}
    read = read_conversation({**row, "instruction": "", "history": None}, PLACE, ALPACA)
    assert read.messages[0]["content"] == "1+1"
    with pytest.raises(DataError, match=r"`history\[0\]` must be a pair of texts: instruction and"):
        read_conversation({**row, "history": [["Hi"]]}, PLACE, ALPACA)
    with pytest.raises(DataError, match="`history` must be a list of pairs of texts"):
        read_conversation({**row, "history": "Hi"}, PLACE, ALPACA)


def test_a_row_of_another_layout_is_told_its_format() -> None:
    for row, layout in (
        ({"instruction": "x", "output": "y"}, "alpaca"),
        ({"prompt": "x", "completion": "y"}, "prompt-completion"),
        ({"conversations": []}, "sharegpt"),
        ({"question": "x", "answer": "y"}, "prompt-response"),
    ):
        with pytest.raises(DataError, match=rf"or give `--sft-row-format {layout}`"):
            read_conversation(row, PLACE)
    named = SftConfig(sft_row_format="sharegpt", sft_conversations_key="talk")
    with pytest.raises(DataError, match=r"it has conversations\); name the column it has\.$"):
        read_conversation({"conversations": []}, PLACE, named)


def test_nothing_of_a_sharegpt_call_is_lost() -> None:
    call = {"name": "add", "parameters": {"a": 1}, "id": "7"}
    turns = [{"from": "human", "value": "x"}, {"from": "function_call", "value": json.dumps(call)}]
    read = read_conversation({"conversations": turns}, PLACE, SHAREGPT)
    function = {"name": "add", "arguments": {"a": 1}}
    assert read.messages[1]["tool_calls"] == [{"id": "7", "type": "function", "function": function}]
    with pytest.raises(
        DataError, match=r"`conversations\[0\].role` is given beside `from`/`value`"
    ):
        read_conversation({"conversations": [{**turns[0], "role": "user"}]}, PLACE, SHAREGPT)


@pytest.mark.parametrize("tools", [None, [], "", " \n", "[]", "null"])
def test_no_tools(tools: Any) -> None:
    assert read_conversation({"messages": [USER, ASSISTANT], "tools": tools}, PLACE).tools is None


def with_message(**changes: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ASSISTANT, **changes}]}


GOOD: dict[str, Any] = {"messages": [USER, ASSISTANT]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"text": "x"}, "`messages` is not a column of this row (it has text); name"),
    "not a list": ({"messages": "Hi"}, "`messages` must be a list of at least one message, not st"),
    "empty": ({"messages": []}, "`messages` must be a list of at least one message, not an empty"),
    "not an object": ({"messages": ["Hi"]}, "`messages[0]` must be an object, not str."),
    "no assistant": (
        {"messages": [USER]},
        "`messages` has no message of role assistant but of user",
    ),
    "sharegpt": (
        {"messages": [{"from": "human", "value": "x"}]},
        "`messages[0]` has `from` and no role, as in ShareGPT; give `--sft-row-format sharegpt` "
        "and `--sft-conversations-key messages`.",
    ),
    "role": (with_message(role=3), "`messages[1].role` must be a text such as user or assistant"),
    "no content": (with_message(content=None), "`messages[1].content` is missing; only a messag"),
    "content": (with_message(content=3), "`messages[1].content` must be a text or a list of parts"),
    "calls": (with_message(tool_calls="x"), "`messages[1].tool_calls` must be a list, not str."),
    "name of a call": (
        with_message(tool_calls=[{"function": {"name": {"text": "f"}, "arguments": {}}}]),
        "`messages[1].tool_calls[0].function.name` must be a text, not dict.",
    ),
    "name of a tool": (
        {**GOOD, "tools": [{"type": "function", "function": {"name": 3}}]},
        "`tools[0].function.name` must be a text, not int.",
    ),
    "loss_mask": (with_message(loss_mask=2), "`messages[1].loss_mask` must be 0 or 1, not 2."),
    "trained user": (
        {"messages": [{**USER, "loss_mask": 1}, ASSISTANT]},
        "`messages[0].loss_mask` is 1 in a message of role 'user', but only the assistant's are",
    ),
    "tools": ({**GOOD, "tools": [3]}, "`tools` must be a list of objects (tool schemas), or JSON"),
    "tools text": ({**GOOD, "tools": "[{"}, "`tools` is a text that is not JSON (Expecting"),
    "thinking": ({**GOOD, "enable_thinking": "no"}, "`enable_thinking` must be true or false, not"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows(case: str) -> None:
    row, begin = WRONG[case]
    with pytest.raises(DataError) as caught:
        read_conversation(row, PLACE)
    assert str(caught.value).startswith(f"a.jsonl, row 12: {begin}")


CALLS = {
    "add(1)": "`conversations[0].value` is a function call that is not JSON (",
    "[]": "`conversations[0].value` is a function call, so it must be an object with name and argu",
    '{"arguments": {}}': "`conversations[0].value` is a function call, so it must be an object wit",
}


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"from": "bot", "value": "x"}, "`conversations[0].from` must be one of system, human, us"),
        (
            {"role": "user", "content": "x"},
            "`conversations[0]` has a role and no `from`, as messages have; give `--sft-row-format "
            "messages` and `--sft-messages-key conversations`.",
        ),
        ({"from": "gpt", "value": None}, "`conversations[0].value` must be a text, not NoneType."),
        *(({"from": "function_call", "value": x}, text) for x, text in CALLS.items()),
    ],
)
def test_wrong_sharegpt_turns_and_calls(turn: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError) as caught:
        read_conversation({"conversations": [turn]}, PLACE, SHAREGPT)
    assert f"row 12: {text}" in str(caught.value)


FAMILIES = sorted(path.stem for path in tiny.TEMPLATES.glob("*.jinja"))
MARKED = ("chatml", "deepseek", "gemma", "llama2", "llama3", "mistral", "phi3")


def talk(turns: int, *, system: bool = False) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": f"  word {i}\n{{{{ x }}}} "} for i in range(turns)]
    return [{"role": "system", "content": "Be kind."}] * system + said


def template_of(messages: list[dict[str, Any]], family: str, source: str | None = None) -> Template:
    conversation = read_conversation({"messages": messages}, Place("chats.jsonl", 1))
    tokenizer = tiny.tokenizer(family, template=source)
    return Template(tokenizer, conversation, {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
def test_the_first_messages_end_where_templating_it_alone_ends(family: str, system: bool) -> None:
    messages = talk(6, system=system and family != "gemma")
    template = template_of(messages, family)
    whole = template.text(len(messages))
    find_end = end_finder(template, len(messages), whole)
    assert (marked_source(template.source()) is not None) == (family in MARKED)
    for turn in range(1 + system, len(messages)):
        for prompt in (False, True):
            text = template.text(turn, prompt=prompt)
            expected = len(text) if whole.startswith(text) else None
            assert find_end(turn, prompt) == expected, (turn, prompt)


@pytest.mark.parametrize(
    "body",
    [
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.nextitem.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages|length }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages[-1].role }}{% endfor %}",
        "{% set all = messages %}{% for m in messages %}{{ m.content }}{{ all[-1] }}{% endfor %}",
        "{% set n = messages|length %}{% for m in messages %}{{ m.content }}{{ n }}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% for m in messages if m.role %}{{ m.content }}{% endfor %}",
        "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}"
        "{{ m.content }}{% endfor %}{{ s.n }}",
        "{% for m in messages %}{% set l = loop %}{{ m.content }}{{ l.last }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{% endfor %}",
        "{% for m in messages|reverse %}{{ m.content }}{% endfor %}",
        "{% for m in messages[2:] %}{{ m.content }}{% endfor %}",
        "{% set odd = messages[1::2] %}{% for m in odd %}{{ m.content }}{% endfor %}",
        "{% if 1 %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
    ],
)
def test_a_template_that_may_look_ahead_is_not_marked(body: str) -> None:
    assert marked_source(body) is None


def test_white_space_control_after_the_loop_is_kept() -> None:
    messages = talk(4)
    for close in ("%}", "-%}", "+%}"):
        source = f"a\n  {{% for m in messages {close}\n  [{{{{ m.content }}}}]\n{{% endfor %}}"
        template = template_of(messages, "chatml", source)
        whole = template.text(4)
        find_end = end_finder(template, 4, whole)
        for turn in (1, 2, 3):
            assert find_end(turn, False) == len(template.text(turn))


def test_a_long_conversation_is_templated_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The square of 2,000 turns took most of a minute."""
    tokenizer = tiny.tokenizer("chatml")
    conversation = read_conversation({"messages": talk(2000)}, Place("chats.jsonl", 1))
    real, templated = Template.apply, []

    def count(self: Template, messages: int, **kwargs: Any) -> Any:
        templated.append(messages)
        return real(self, messages, **kwargs)

    monkeypatch.setattr(Template, "apply", count)
    tokenize_conversation(tokenizer, conversation)
    assert sorted(templated) == [1, 1, 2000, 2000, 2000]


def test_marks_give_the_mask_of_templating_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(3)
    for family in MARKED:
        tokenizer = tiny.tokenizer(family, merges=((".", "<"), ("d", "Ġ")))
        messages = talk(random.randint(2, 9))
        for message in messages[1::2]:
            message["loss_mask"] = random.randint(0, 1)
        conversation = read_conversation({"messages": messages}, Place("chats.jsonl", 1))
        found = tokenize_conversation(tokenizer, conversation)
        with monkeypatch.context() as patch:
            patch.setattr(chat, "marked_source", lambda source: None)
            assert tokenize_conversation(tokenizer, conversation) == found


def test_a_conversation_that_spells_the_mark_has_the_mask_of_any_other() -> None:
    tokenizer = tiny.tokenizer("chatml")
    masks = []
    for text in (f"{chat._MARK} and more", "?" * len(f"{chat._MARK} and more".encode())):
        messages = talk(6)
        messages[2]["content"] = messages[3]["content"] = text
        conversation = read_conversation({"messages": messages}, Place("chats.jsonl", 1))
        masks.append(tokenize_conversation(tokenizer, conversation).mask)
    assert masks[0] == masks[1]


def test_the_template_for_tools_is_that_of_rows_with_tools() -> None:
    tokenizer = tiny.tokenizer("chatml")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    for tools, source in (([{"name": "add"}], "{{ tools }}"), (None, "{{ messages }}")):
        conversation = read_conversation({**GOOD, "tools": tools}, PLACE)
        assert Template(tokenizer, conversation, {}).source() == source


def test_half_a_pair_is_named_where_it_is() -> None:
    tool = {"name": "add", "parameters": {"a": ["b", "\ud800"]}}
    row = {"messages": [USER, ASSISTANT], "functions": [{"name": "stop"}, tool]}
    sft = SftConfig(sft_tools_key="functions", sft_on_unrendered="note")
    read = read_conversation(row, PLACE, sft)
    template = tiny.tokenizer("chatml", template="{{ messages }}{{ tools[1].parameters.a[1] }}")
    with pytest.raises(
        DataError, match=r"row 12: `functions\[1\].parameters.a\[1\]` holds half a surrogate pair"
    ):
        tokenize_conversation(template, read, sft)
