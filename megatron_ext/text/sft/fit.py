"""Converts a conversation to the form that its chat template takes.

Templates and data sets differ in three things: whether arguments of tool calls are objects or JSON
texts, whether a message's content may be a list of parts, and whether the role developer exists. To
find out what a template takes, we apply it to the conversation with a mark in the place in
question, and look at how the mark is written in the text.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import Template
from megatron_ext.text.sft.conversation import Message, generic, not_json, without_nulls

_MARK = "zqmarkqz"
_TEXT_PARTS = ("text", "input_text", "output_text")
_CACHE_SIZE = 64

_forms: dict[str, str] = {}
"""The result of `_argument_form` ("object", "string" or "either") by the source of the template."""
_takes_parts: dict[str, bool] = {}
"""Whether a template takes lists of text parts as content, by the source of the template."""


def fitted(template: Template, sft: SftConfig) -> Template:
    """Return the template with its conversation converted to the form that the template takes.

    Raise a DataError for parts of a message that are not text, and, unless ``--sft-tool-arguments
    string`` keeps them, for a tool call's arguments that are text but not JSON of an object.
    """
    template = _with_arguments(template, sft.sft_tool_arguments)
    template = _with_parts(template)
    return _with_known_roles(template)


def _changed(template: Template, change: Callable[[int, Message], Message]) -> Template:
    """Return the template with new messages: ``change(i, message)`` in place of each message i."""
    messages = template.conversation.messages
    changed = tuple(change(index, message) for index, message in enumerate(messages))
    return template.of(replace(template.conversation, messages=changed))


def _refuse(template: Template, name: str, rule: str) -> NoReturn:
    raise DataError(f"{template.conversation.place}: `{name}` {rule}.")


def _remember(cache: dict[str, Any], source: str, value: Any) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[source] = value


def _with_arguments(template: Template, form: str) -> Template:
    """Return the template with all arguments of tool calls as objects or as JSON texts.

    ``form`` is "object", "string" or "auto", which takes the form that suits the template.
    """
    given = [
        value
        for message in template.conversation.messages
        for call in message.get("tool_calls", ())
        if (value := _function(call).get("arguments")) is not None
    ]
    if not any(isinstance(value, (str, dict)) for value in given):
        return template
    verbatim = form == "string"
    if form == "auto":
        form = _argument_form(template)
    intake = template.conversation.intake

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, str) and not verbatim:
            read = _parsed(template, value, name)
            if form == "object":
                intake.changed["arguments of tool calls, from JSON text to object"] += 1
                return read
        elif isinstance(value, dict) and form == "string":
            intake.changed["arguments of tool calls, from object to JSON text"] += 1
            return json.dumps(value, ensure_ascii=False)
        return value

    return _changed(
        template,
        lambda index, message: _replaced(
            message, template.conversation.name(index, "tool_calls"), convert
        ),
    )


def _function(call: Message) -> Message:
    """Return the object within a tool call that holds the keys `name` and `arguments`."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _replaced(message: Message, list_name: str, convert: Callable[[Any, str], Any]) -> Message:
    """Return a copy of a message, with the arguments of its tool calls converted by ``convert``.

    Each conversion is ``convert(arguments, name)``, where ``name`` tells the place of the arguments
    in the row, for errors. ``list_name`` is the place of the message's list of tool calls.
    """
    if "tool_calls" not in message:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = _function(call)
        if function.get("arguments") is not None:
            name = f"{list_name}[{number}]"
            name += ".arguments" if function is call else ".function.arguments"
            value = convert(function["arguments"], name)
            call = (
                {**call, "arguments": value}
                if function is call
                else {**call, "function": {**function, "arguments": value}}
            )
        calls.append(call)
    return {**message, "tool_calls": calls}


def _parsed(template: Template, text: str, name: str) -> Any:
    try:
        value = without_nulls(parse_json(text, name)) if text.strip() else {}
    except UnreadableFile as error:
        rule = f"is a text that is not JSON ({not_json(error)})"
        _refuse(
            template, name, f"{rule}; correct it, or keep it with `--sft-tool-arguments string`"
        )
    if not isinstance(value, dict):
        kind = type(value).__name__
        _refuse(template, name, f"must be JSON of an object, not of {kind}; correct the row")
    return value


def _argument_form(template: Template) -> str:
    """Return the form of tool arguments that a template takes: "object", "string" or "either".

    Both forms are tried. A template that writes an object in Python's notation needs a text. A
    template that writes a text in quotes, or adds braces to it, needs an object.
    """
    source = template.source()
    if source in _forms:
        return _forms[source]
    as_object = {"mark": _MARK}
    as_text = json.dumps({"mark": _MARK})
    first, second = (
        _attempt(_changed(template, lambda i, m, x=x: _replaced(m, "", lambda *_: x)))  # type: ignore[misc]
        for x in (as_object, as_text)
    )
    takes_object = _MARK in first and str(as_object) not in first
    quoted = json.dumps(as_text)[1:-1]
    takes_text = as_text in second and quoted not in second and "{" + as_text not in second
    form = "object" if takes_object and not takes_text else "either"
    if takes_text and not takes_object:
        form = "string"
    if first or second:
        _remember(_forms, source, form)
    return form


def _attempt(template: Template) -> str:
    """Return the text that the template writes for all messages, or "" if it refuses them."""
    try:
        return template.whole
    except DataError:
        return ""


def _with_parts(template: Template) -> Template:
    """Return the template with each message's list of text parts joined into one text.

    If the template takes lists, they stay lists, of objects with the type "text".
    """
    lists = {
        index: _read_parts(
            template, message["content"], template.conversation.name(index, "content")
        )
        for index, message in enumerate(template.conversation.messages)
        if isinstance(message.get("content"), list)
    }
    if not lists:
        return template
    if _takes_lists(template, lists):
        return _changed(template, lambda i, m: {**m, "content": lists[i]} if i in lists else m)
    intake = template.conversation.intake
    for index, parts in lists.items():
        intake.changed["list of text parts, joined"] += 1
        for key in (key for part in parts for key in part if key not in ("type", "text")):
            name = template.conversation.name(index, "content", 0, key)
            intake.ignored[f"`{generic(name)}`"] += 1
    joined = {index: "".join(part["text"] for part in parts) for index, parts in lists.items()}
    return _changed(template, lambda i, m: {**m, "content": joined[i]} if i in joined else m)


def _read_parts(template: Template, content: list[Any], name: str) -> list[Message]:
    parts: list[Message] = []
    for index, part in enumerate(content):
        read = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = read.get("type", "text") if isinstance(read, dict) else type(read).__name__
        if kind not in _TEXT_PARTS:
            rule = f"is a part of type {kind}, but only text is trained; drop the part or the row"
            _refuse(template, f"{name}[{index}]", rule)
        if not isinstance(read.get("text"), str):
            type_name = type(read.get("text")).__name__
            _refuse(template, f"{name}[{index}].text", f"must be a text, not {type_name}")
        parts.append({**read, "type": "text"})
    return parts


def _takes_lists(template: Template, lists: dict[int, list[Message]]) -> bool:
    """Tell whether a template accepts a list of parts as content and writes the text of each part.

    Other templates refuse a list, or write it in the notation of Python or JSON. ``lists`` holds
    the lists of parts by the index of their message.
    """
    source = template.source()
    if source not in _takes_parts:
        part = {"type": "text", "text": _MARK}
        text = _attempt(
            _changed(template, lambda i, m: {**m, "content": [part]} if i in lists else m)
        )
        written_as_data = str(part) in text or json.dumps(part) in text
        _remember(_takes_parts, source, _MARK in text and not written_as_data)
    return _takes_parts[source]


def _with_known_roles(template: Template) -> Template:
    """Return the template with the role developer renamed to system.

    Nothing is changed if the template knows the role developer, or does not know system.
    """
    developers = {
        index
        for index, message in enumerate(template.conversation.messages)
        if message["role"] == "developer"
    }
    if not developers:
        return template

    def marked(role: str) -> Template:
        return _changed(
            template,
            lambda i, m: {**m, "role": role, "content": _MARK} if i in developers else m,
        )

    written = [_attempt(marked(role)).count(_MARK) for role in ("developer", "system")]
    if written[0] >= len(developers) or written[1] < len(developers):
        return template
    template.conversation.intake.changed["role developer as system"] += len(developers)
    return _changed(template, lambda i, m: {**m, "role": "system"} if i in developers else m)
