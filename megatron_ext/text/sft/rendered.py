"""Finds the parts of a conversation that its chat template does not write into the text.

We put unique marks at both ends of every value of a conversation, and apply the template to it once
more. The marks in the text show which values the template writes. But some values steer a template
without being written, and some templates refuse marked values. We therefore change each value whose
marks are missing, and count it as left out only if the text stays the same.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import Template
from megatron_ext.text.sft.conversation import ASSISTANT, Conversation, generic, steps
from megatron_ext.text.sft.intake import Intake

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold an assistant's reasoning; each data set uses one of them."""

_SHORTEST_CODE = 7
"""The least length at which a text of ASCII letters and digits is treated as an identifier.

Templates may check how long an identifier is, so `_other` replaces it by a mark of equal length.
"""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Leaf:
    """An innermost value of a conversation, such as a text, with its path of keys and indices."""

    path: Path
    value: Any

    def name(self, conversation: Conversation) -> str:
        """Return the value's name for messages, such as `messages[1].tool_calls[0].id`."""
        if self.path[0] == "tools":
            return conversation.tools_name + steps(self.path[1:])
        return conversation.name(int(self.path[1]), *self.path[2:])


@dataclass
class Unrendered:
    """The values that a template does not write (``absent``) or writes in part (``partly``).

    Both are keyed by the path of the value.
    """

    absent: dict[Path, Leaf]
    partly: dict[Path, Leaf]


def find_left_out(samples: Sequence[Template]) -> Unrendered:
    """Return the values of a conversation that its template never writes, or never writes fully.

    ``samples`` bind the template to the first messages of the conversation, each to another number
    of them. A value is judged by the samples that contain it: it is absent if all of them leave it
    out, and partly written if each of them leaves it out or writes only a part.
    """
    parts = [find_unrendered(sample) for sample in samples]
    lengths = [len(sample.conversation.messages) for sample in samples]

    def texts_with(path: Path) -> list[Unrendered]:
        in_all = path[0] == "tools"
        return [x for x, n in zip(parts, lengths, strict=True) if in_all or int(path[1]) < n]

    absent: dict[Path, Leaf] = {}
    partly: dict[Path, Leaf] = {}
    leaves = {path: leaf for part in parts for path, leaf in (part.absent | part.partly).items()}
    for path, leaf in leaves.items():
        texts = texts_with(path)
        if all(path in text.absent for text in texts):
            absent[path] = leaf
        elif all(path in text.absent or path in text.partly for text in texts):
            partly[path] = leaf
    return Unrendered(absent, partly)


def find_unrendered(template: Template) -> Unrendered:
    """Return the values of the conversation that the template leaves out or writes in part."""
    whole = template.whole
    leaves = list(_leaves(template.conversation, whole))
    nonce = _nonce(whole)
    marks = {
        leaf.path: (f"{nonce}{2 * i:x}z", f"{nonce}{2 * i + 1:x}z") for i, leaf in enumerate(leaves)
    }
    text = _text_with(template, leaves, lambda leaf: _other(leaf.value, *marks[leaf.path]))
    partly: dict[Path, Leaf] = {}
    if text is None:
        candidates = leaves
    else:
        candidates = []
        for leaf in leaves:
            written = [mark in text for mark in _marks_in(leaf.value, *marks[leaf.path])]
            if not any(written):
                candidates.append(leaf)
            elif not all(written) and not _lines_are_in(leaf.value, whole):
                partly[leaf.path] = leaf
    absent = _confirmed(template, candidates, marks, whole)
    return Unrendered({leaf.path: leaf for leaf in absent}, partly)


def _nonce(whole: str) -> str:
    """Return a string of letters that ``whole`` does not contain."""
    nonce = "zq"
    while nonce in whole:
        nonce += "q"
    return nonce


def _is_code(value: str, mark: str) -> bool:
    return value.isascii() and value.isalnum() and len(value) >= max(_SHORTEST_CODE, len(mark))


def _other(value: Any, first: str, last: str) -> Any:
    """Return a replacement for ``value`` that shows the marks ``first`` and ``last`` if it can.

    A text gets a mark at each end; a text that looks like an identifier becomes ``first``, padded
    to the same length. A number is increased by a number made of ``first``, and a bool is negated.
    An empty object gets both marks, an empty list gets ``first``, and None becomes ``first``.
    """
    if isinstance(value, str):
        # Some templates check the length of identifiers.
        return first.ljust(len(value), "z") if _is_code(value, first) else first + value + last
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + int.from_bytes(first.encode()[-6:], "big")
    if isinstance(value, dict):
        return {first: last}
    return [first] if isinstance(value, list) else first


def _marks_in(value: Any, first: str, last: str) -> tuple[str, ...]:
    """Return the strings by which a rendered text shows that all of ``value`` was written.

    They appear after `_other` has replaced ``value``, with the marks ``first`` and ``last``.
    """
    if isinstance(value, str):
        return (first,) if _is_code(value, first) else (first, last)
    if isinstance(value, bool):
        return (first,)
    if isinstance(value, (int, float)):
        return (str(_other(value, first, last)),)
    return (first,)


def _leaves(conversation: Conversation, whole: str) -> Iterator[Leaf]:
    """Yield each innermost value, except roles, blank texts and constants (`_is_constant`).

    A tool that occurs as JSON in the text ``whole`` is skipped, since all its values are written.
    """
    for index, message in enumerate(conversation.messages):
        for key, value in message.items():
            if key != "role":
                yield from _below(value, ("messages", index, key))
    for index, tool in enumerate(conversation.tools or ()):
        if not _is_written_whole(tool, whole):
            yield from _below(tool, ("tools", index))


def _is_written_whole(tool: dict[str, Any], whole: str) -> bool:
    """Tell whether the text ``whole`` contains a tool, or its function, as JSON."""
    values = [tool]
    if set(tool) <= {"type", "function"} and tool.get("type", "function") == "function":
        values.append(tool.get("function", tool))
    return any(
        json.dumps(value, ensure_ascii=False, indent=indent) in whole
        for value in values
        for indent in (None, 4, 2)
    )


def _below(value: Any, path: Path) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _below(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _below(item, (*path, index))
    elif not (isinstance(value, str) and not value.strip()) and not _is_constant(value, path):
        yield Leaf(path, value)


def _is_constant(value: Any, path: Path) -> bool:
    """Tell whether a value is a `type` that is the same in all conversations.

    This is the `type` "function" of a tool or a tool call, and the `type` "text" of a part of a
    message.
    """
    is_call = len(path) == 5 and path[2] == "tool_calls"
    is_tool = len(path) == 3 and path[0] == "tools"
    is_part = len(path) == 5 and path[2] == "content"
    return path[-1] == "type" and (
        (value == "function" and (is_call or is_tool)) or (value == "text" and is_part)
    )


def _text_with(
    template: Template, leaves: Sequence[Leaf], other: Callable[[Leaf], Any]
) -> str | None:
    """Return the text that the template writes if each leaf's value is replaced by ``other(leaf)``.

    Return None if the template refuses the changed conversation.
    """
    changed = {leaf.path: leaf for leaf in leaves}

    def rebuilt(value: Any, path: Path) -> Any:
        leaf = changed.get(path)
        if leaf is not None:
            return other(leaf)
        if isinstance(value, dict):
            return {key: rebuilt(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [rebuilt(item, (*path, index)) for index, item in enumerate(value)]
        return value

    conversation = template.conversation
    messages = tuple(rebuilt(conversation.messages, ("messages",)))
    tools = None if conversation.tools is None else tuple(rebuilt(conversation.tools, ("tools",)))
    try:
        return template.of(replace(conversation, messages=messages, tools=tools)).whole
    except DataError:
        return None


def _confirmed(
    template: Template, leaves: Sequence[Leaf], marks: dict[Path, tuple[str, str]], whole: str
) -> list[Leaf]:
    """Return those of ``leaves`` whose values do not influence the text that the template writes.

    `_other` changes all values at once; ``marks`` has the two marks of each path. If the text is
    still ``whole``, return all leaves; otherwise search each half of the leaves in the same way.
    """
    if not leaves:
        return []
    text = _text_with(template, leaves, lambda leaf: _other(leaf.value, *marks[leaf.path]))
    if text == whole:
        return list(leaves)
    if len(leaves) == 1:
        return []
    half = len(leaves) // 2
    return [
        *_confirmed(template, leaves[:half], marks, whole),
        *_confirmed(template, leaves[half:], marks, whole),
    ]


def _lines_are_in(value: Any, whole: str) -> bool:
    """Tell whether each line of the text ``value`` occurs in ``whole``, as it is or as JSON."""
    lines = [line.strip() for line in str(value).splitlines()]
    return all(
        line in whole or json.dumps(line, ensure_ascii=False)[1:-1] in whole for line in lines
    )


def report_unrendered(
    conversation: Conversation, unrendered: Unrendered, sft: SftConfig, intake: Intake
) -> None:
    """Refuse a conversation if its template leaves out an important value; count others left out.

    Raise a DataError if a message, a tool, a tool call or the reasoning of a trained turn is left
    out; with ``--sft-on-unrendered note``, count it in ``intake`` instead. Less important values
    are only counted.
    """
    tools = {
        index
        for index in range(len(conversation.tools or ()))
        if not _tool_is_written(conversation, index, unrendered)
    }
    for leaf in unrendered.absent.values():
        name = leaf.name(conversation)
        what = _meaning(conversation, leaf, tools, realigned=sft.sft_on_mismatch == "realign")
        if what is None:
            intake.ignored[f"`{generic(name)}`"] += 1
        elif sft.sft_on_unrendered == "note":
            intake.unrendered[f"{what} (`{generic(name)}`)"] += 1
        else:
            advice = "give a template that writes it, take it out of the row"
            if set(leaf.path[2:3]) & set(REASONING) and not _is_last_turn(conversation, leaf):
                advice = (
                    "make a sample of each turn with `--sft-split-turns`, train the turn as it is "
                    "written with `--sft-on-mismatch realign`"
                )
            raise DataError(
                f"{conversation.place}: `{name}` ({what}) is left out of the text by the chat "
                f"template; {advice}, or count such parts with `--sft-on-unrendered note`."
            )
    for leaf in unrendered.partly.values():
        name = leaf.name(conversation)
        intake.ignored[f"a part of `{generic(name)}`{_role(conversation, leaf)}"] += 1


def _tool_is_written(conversation: Conversation, index: int, unrendered: Unrendered) -> bool:
    """Tell whether a template writes a tool: at least one of its values, and its name if any.

    ``index`` is the index of the tool in the conversation.
    """
    tool = (conversation.tools or ())[index]
    paths = [leaf.path for leaf in _below(tool, ("tools", index))]
    names = [path for path in paths if path[2:] in (("name",), ("function", "name"))]
    return any(p not in unrendered.absent for p in paths) and not any(
        p in unrendered.absent for p in names
    )


def _meaning(
    conversation: Conversation, leaf: Leaf, tools: set[int], *, realigned: bool
) -> str | None:
    """Return words for what is lost if ``leaf`` is not written; None if that is unimportant.

    ``tools`` are the indices of the tools that are not written. ``realigned`` is True for
    ``--sft-on-mismatch realign``, which trains a turn as it is written, even without its reasoning.
    """
    path = leaf.path
    if path[0] == "tools":
        return "a tool" if path[1] in tools else None
    index = int(path[1])
    key = path[2]
    if key == "content" and (len(path) == 3 or path[-1] == "text"):
        return f"a message of role {conversation.messages[index]['role']}"
    called = path[5:6] if path[4:5] == ("function",) else path[4:5]
    if key == "tool_calls" and called in (("name",), ("arguments",)):
        role = conversation.messages[index]["role"]
        return "a tool call" if role == ASSISTANT else f"a tool call of role {role}"
    if key in REASONING:
        turn_is_trained = conversation.trained[index] and not realigned
        return "the reasoning of a trained turn" if turn_is_trained else None
    return None


def _is_last_turn(conversation: Conversation, leaf: Leaf) -> bool:
    """Tell whether a value belongs to the assistant's last message, or to a later message."""
    later = conversation.messages[int(leaf.path[1]) + 1 :]
    return not any(message["role"] == ASSISTANT for message in later)


def _role(conversation: Conversation, leaf: Leaf) -> str:
    if leaf.path[0] != "messages":
        return ""
    return f" (role {conversation.messages[int(leaf.path[1])]['role']})"
