"""The form of arguments, parts and roles that a template takes is found by trying it."""

import json
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import Template
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.fit import fitted
from tests.text.sft import tiny

AROUND = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
VALUE = {"city": "Oslo", "note": None, "days": [1, None]}
OBJECT = '{"city": "Oslo", "days": [1, null]}'


def fit(template: str, messages: list[dict[str, Any]], **options: Any) -> Template:
    conversation = read_conversation({"messages": messages}, Place("f", 1))
    made = Template(tiny.tokenizer("chatml", template=template), conversation, {})
    return fitted(made, SftConfig(**options))


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
    asked = {"role": "user", "content": "x"}
    return [asked, {"role": "assistant", "content": None, "tool_calls": [call]}]


FORMS = {
    "as JSON": ("{{ c.function.arguments | tojson }}", "object"),
    "by its members": ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
                       "object"),
    "in braces of its own": (
        "{{ '{' }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}{% endif %}"
        "{{ '}' }}",
        "object",
    ),
    "joined to a text": ("{{ '[' + c.function.arguments + ']' }}", "string"),
    "as Python writes it": ("{{ c.function.arguments }}", "string"),
    "as given or as JSON": (
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}", "either"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_arguments_get_the_form_that_the_template_takes(case: str) -> None:
    write, form = FORMS[case]
    for given in (VALUE, json.dumps(VALUE)):
        fit_one = fit(AROUND.replace("CALL", write), called(given))
        found = fit_one.conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
        if form == "either":
            assert found == (given if isinstance(given, str) else json.loads(OBJECT))
        elif form == "object":
            assert found == json.loads(OBJECT)
        else:
            assert found == (given if isinstance(given, str) else OBJECT)
    assert fit_one.conversation.intake.changed == (
        {"arguments of tool calls, from JSON text to object": 1} if form == "object" else {}
    )


def test_a_flag_decides_the_form_of_arguments() -> None:
    either = AROUND.replace("CALL", FORMS["as given or as JSON"][0])
    for form, given in (("object", json.dumps(VALUE)), ("string", VALUE)):
        made = fit(either, called(given), sft_tool_arguments=form)
        found = made.conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
        assert found == (json.loads(OBJECT) if form == "object" else OBJECT)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            '{"a"',
            r"arguments` is a text that is not JSON \(.*keep it with `--sft-tool-arguments st",
        ),
        (
            "[1]",
            "`messages\\[1\\].tool_calls\\[0\\].function.arguments` must be JSON of an object, not",
        ),
        ('"{}"', "must be JSON of an object, not of str"),
    ],
)
def test_arguments_that_are_no_object_are_refused(text: str, rule: str) -> None:
    for write in ("as JSON", "joined to a text"):
        template = AROUND.replace("CALL", FORMS[write][0])
        with pytest.raises(DataError, match=rule):
            fit(template, called(text))
        if write == "joined to a text":
            made = fit(template, called(text), sft_tool_arguments="string")
            assert f"[{text}]" in made.whole


PARTS = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c", "cache": "x"}]
PARTS += [{"type": "output_text", "text": ""}, {"text": ""}]


def test_text_parts_are_joined_unless_the_template_takes_lists() -> None:
    answer = {"role": "assistant", "content": "y"}
    made = fit(AROUND, [{"role": "user", "content": PARTS}, answer])
    assert made.whole == "<user>abc<assistant>y"
    assert made.conversation.intake.changed == {"list of text parts, joined": 1}
    assert made.conversation.intake.ignored == {"`messages[].content[].cache`": 1}
    asked = [{"role": "user", "content": PARTS}, answer]
    intake = fit(AROUND, [*asked, *asked]).conversation.intake
    assert intake.changed == {"list of text parts, joined": 2}
    assert intake.ignored == {"`messages[].content[].cache`": 2}
    lists = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
    )
    made = fit(lists, [{"role": "user", "content": PARTS}, answer])
    assert made.whole == "<user>a;b;c;;;<assistant>y"


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "is a part of type image_url, but only"),
        ({"type": "image", "image": {}}, "is a part of type image, but only text is trained"),
        ({"type": "text", "text": 3}, "must be a text, not int"),
        (3, "is a part of type int, but only text"),
    ],
)
def test_parts_that_are_no_text_are_refused(part: Any, rule: str) -> None:
    with pytest.raises(DataError, match=rf"`messages\[0\].content\[1\].*` {rule}"):
        fit(
            AROUND,
            [
                {"role": "user", "content": [PARTS[0], part]},
                {"role": "assistant", "content": "y"},
            ],
        )


def test_a_developer_is_the_system_where_only_that_exists() -> None:
    messages = [
        {"role": "developer", "content": "French."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    assert fit(AROUND, messages).whole == "<developer>French.<user>x<assistant>y"
    known = AROUND.replace(
        "<{{ m.role }}>{{ m.content or '' }}",
        "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
        "{% endif %}",
    )
    made = fit(known, messages)
    assert made.whole == "<system>French.<user>x<assistant>y"
    assert made.conversation.intake.changed == {"role developer as system": 1}
    neither = known.replace("'system', ", "")
    assert fit(neither, messages).conversation.intake.changed == {}
    assert [m["role"] for m in fit(neither, messages).conversation.messages] == [
        "developer", "user", "assistant",
    ]  # fmt: skip


def test_arguments_of_white_space_are_none() -> None:
    made = fit(AROUND.replace("CALL", FORMS["as JSON"][0]), called(" \n"))
    assert made.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_row_that_the_template_refuses_does_not_decide_for_the_rows_after_it() -> None:
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    template = refusing + AROUND.replace("CALL", FORMS["joined to a text"][0])
    refused = [{"role": "user", "content": "no"}, *called(VALUE)[1:]]
    for messages, form in ((refused, VALUE), (called(VALUE), OBJECT)):
        found = fit(template, messages).conversation.messages[1]["tool_calls"][0]["function"]
        assert found["arguments"] == (form if form == OBJECT else json.loads(OBJECT))


def test_all_developers_are_the_system_where_the_template_writes_some_only() -> None:
    first = (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') or loop.first %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "developer", "content": "French."},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "Short."},
        {"role": "assistant", "content": "y"},
    ]
    made = fit(first, messages)
    assert made.whole == "<system>French.<user>x<system>Short.<assistant>y"
    assert made.conversation.intake.changed == {"role developer as system": 2}


def test_arguments_of_a_call_without_a_function_get_the_form_too() -> None:
    template = AROUND.replace("CALL", "{{ c.arguments | tojson }}")
    asked = {"role": "user", "content": "x"}
    calls = [{"name": "v", "arguments": VALUE, "id": "1"}, {"name": "w", "arguments": OBJECT}]
    made = fit(template, [asked, {"role": "assistant", "content": "", "tool_calls": calls}])
    assert made.conversation.messages[1]["tool_calls"] == [
        {"name": "v", "arguments": json.loads(OBJECT), "id": "1"},
        {"name": "w", "arguments": json.loads(OBJECT)},
    ]
    calls[1]["arguments"] = "{"
    rule = r"`messages\[1\].tool_calls\[1\].arguments` is a text that is not JSON"
    with pytest.raises(DataError, match=rule):
        fit(template, [asked, {"role": "assistant", "content": "", "tool_calls": calls}])
