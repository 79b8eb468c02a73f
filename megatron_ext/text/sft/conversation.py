"""The conversation in a row of a jsonl or parquet file, every field checked.

Three layouts of a row are read: a column of messages as `apply_chat_template` of transformers
takes them, one prompt and one response column, and ShareGPT's column of `from`/`value` pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron_ext.errors import DataError
from megatron_ext.text.config import SftConfig

ASSISTANT = "assistant"
Message = dict[str, Any]

SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_call": ASSISTANT,
}


class Place(NamedTuple):
    """The origin of a row: its file and its number there, counted from 1."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Conversation:
    """One checked conversation.

    Attributes:
        messages: the messages for the chat template: no `loss_mask`, no keys that are null.
        trained: for each message, whether it is an assistant's whose tokens are trained.
        enable_thinking: the row's own choice; None leaves it to the run's.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Any, ...] | None
    enable_thinking: bool | None
    place: Place


def read_conversation(
    row: Mapping[str, Any], place: Place, sft: SftConfig | None = None
) -> Conversation:
    """Check a row and return its conversation.

    Raises:
        DataError: a column that is missing or of a wrong kind, or no assistant message.
    """
    sft = sft or SftConfig()
    if sft.sft_row_format == "sharegpt":
        listed, column = _from_sharegpt(row, place, sft), sft.sft_conversations_key
    elif sft.sft_row_format == "prompt-response":
        listed, column = _from_prompt_response(row, place, sft), sft.sft_response_key
    else:
        listed, column = _list_of(row, place, sft.sft_messages_key), sft.sft_messages_key
    messages: list[Message] = []
    trained: list[bool] = []
    for index, message in enumerate(listed):
        trained.append(_is_trained(message, f"{column}[{index}]", place))
        # Parquet fills the keys that a message lacks with null; templates test for presence.
        messages.append({k: v for k, v in message.items() if k != "loss_mask" and v is not None})
    if not any(message["role"] == ASSISTANT for message in messages):
        _refuse(place, column, "has no message of the assistant, so nothing to train; drop the row")
    thinks = plain(row.get(sft.sft_enable_thinking_key))
    if thinks is not None and not isinstance(thinks, bool):
        _refuse(place, sft.sft_enable_thinking_key, f"must be true or false, not {thinks!r}")
    tools = _tools(row, place, sft.sft_tools_key)
    return Conversation(tuple(messages), tuple(trained), tools, thinks, place)


def plain(value: Any) -> Any:
    """Turn numpy arrays, as parquet readers nest them, into lists, and scalars into Python's."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _refuse(place: Place, field: str, rule: str) -> NoReturn:
    raise DataError(f"{place}: `{field}` {rule}.")


def _check_text(value: Any, place: Place, field: str) -> None:
    if not isinstance(value, str):
        _refuse(place, field, f"must be a text, not {type(value).__name__}")


def _column(row: Mapping[str, Any], place: Place, name: str) -> Any:
    if name not in row:
        has = ", ".join(map(str, row)) or "none"
        _refuse(place, name, f"is not a column of this row (it has {has}); name the column it has")
    return plain(row[name])


def _list_of(row: Mapping[str, Any], place: Place, name: str) -> list[Any]:
    value = _column(row, place, name)
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else type(value).__name__
        _refuse(place, name, f"must be a list of at least one message, not {shown}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            _refuse(place, f"{name}[{index}]", f"must be an object, not {type(item).__name__}")
    return value


def _from_sharegpt(row: Mapping[str, Any], place: Place, names: SftConfig) -> list[Message]:
    turns = _list_of(row, place, names.sft_conversations_key)
    messages = _system_column(row, place, names, turns)
    for index, turn in enumerate(turns):
        field = f"{names.sft_conversations_key}[{index}]"
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            _refuse(place, f"{field}.from", f"must be one of {known}, not {speaker!r}")
        _check_text(turn.get("value"), place, f"{field}.value")
        rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
        spoken = {"content": turn["value"]}
        if speaker == "function_call":
            spoken = _calls(turn["value"], f"{field}.value", place)
        messages.append({"role": SHAREGPT_ROLES[speaker], **spoken, **rest})
    return messages


def _system_column(
    row: Mapping[str, Any], place: Place, names: SftConfig, turns: list[Any]
) -> list[Message]:
    """Return the system message of a column of its own, which some ShareGPT files have."""
    text = plain(row.get(names.sft_system_key))
    if text is None or text == "":
        return []
    _check_text(text, place, names.sft_system_key)
    if turns[0].get("from") == "system":
        _refuse(
            place,
            names.sft_system_key,
            f"is given, but `{names.sft_conversations_key}` begins with a system turn too; keep "
            "one",
        )
    return [{"role": "system", "content": text}]


def _calls(text: str, field: str, place: Place) -> Message:
    """Return the assistant's calls of tools from their JSON text, one or a list of them."""
    try:
        value = json.loads(text)
    except ValueError as error:
        _refuse(place, field, f"is a function call that is not JSON ({error})")
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
        _refuse(place, field, "is a function call, so it must be an object with name and arguments")
    functions = [{"name": x["name"], "arguments": x.get("arguments", {})} for x in calls]
    return {"content": "", "tool_calls": [{"type": "function", "function": x} for x in functions]}


def _from_prompt_response(row: Mapping[str, Any], place: Place, names: SftConfig) -> list[Message]:
    messages = []
    for name, role in ((names.sft_prompt_key, "user"), (names.sft_response_key, ASSISTANT)):
        text = _column(row, place, name)
        _check_text(text, place, name)
        messages.append({"role": role, "content": text})
    return messages


def _is_trained(message: Message, field: str, place: Place) -> bool:
    """Check a message, and tell whether its tokens are trained."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _refuse(place, f"{field}.role", f"must be a text such as user or assistant, not {role!r}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        _refuse(place, f"{field}.content", "is missing; only a message with tool_calls needs none")
    if content is not None and not isinstance(content, (str, list)):
        kind = type(content).__name__
        _refuse(place, f"{field}.content", f"must be a text or a list of parts, not {kind}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        _refuse(place, f"{field}.tool_calls", f"must be a list, not {type(calls).__name__}")
    mask = message.get("loss_mask")
    if mask is not None and mask not in (0, 1):
        _refuse(place, f"{field}.loss_mask", f"must be 0 or 1, not {mask!r}")
    if role == ASSISTANT:
        return mask is None or bool(mask)
    if mask:
        _refuse(
            place,
            f"{field}.loss_mask",
            f"is 1 in a message of role {role!r}, but only the assistant's are trained; "
            "leave it out or set it to 0",
        )
    return False


def _tools(row: Mapping[str, Any], place: Place, name: str) -> tuple[Any, ...] | None:
    """Return the schemas, also from JSON text, since parquet merges fields of unlike schemas."""
    tools = plain(row.get(name))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            _refuse(place, name, f"is a text that is not JSON ({error})")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _refuse(place, name, "must be a list of objects (tool schemas), or JSON text of one")
    return tuple(tools) or None
