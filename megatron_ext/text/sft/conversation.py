"""Reads the conversation in a row of a jsonl or parquet file, and checks every field.

A row has one of three layouts: a column of messages as `apply_chat_template` of transformers
takes them, one prompt and one response column, and ShareGPT's column of `from`/`value` pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron_ext.disk.reading import UnreadableFile, parse_json
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
    """The origin of a row: its file, and its number in the file, from 1."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Conversation:
    """One checked conversation; `loss_mask` and null values are removed from its messages.

    Attributes:
        trained: for each message, whether its tokens are trained (only an assistant's may be).
        enable_thinking: the value in the row; None if ``--sft-template-kwargs`` decides.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Any, ...] | None
    enable_thinking: bool | None
    place: Place


def read_conversation(
    row: Mapping[str, Any], place: Place, sft: SftConfig | None = None
) -> Conversation:
    """Return the conversation of a row; raise a DataError if a column is missing or wrong."""
    return _Row(row, place, sft or SftConfig()).conversation()


def plain(value: Any) -> Any:
    """Convert nested numpy arrays of parquet readers to lists, and numpy scalars to Python's."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True)
class _Row:
    """A row with its place, and the options that name its columns."""

    columns: Mapping[str, Any]
    place: Place
    sft: SftConfig

    def conversation(self) -> Conversation:
        sft = self.sft
        if sft.sft_row_format == "sharegpt":
            listed, column = self._from_sharegpt(), sft.sft_conversations_key
        elif sft.sft_row_format == "prompt-response":
            listed, column = self._from_prompt_response(), sft.sft_response_key
        else:
            listed, column = self._list_of(sft.sft_messages_key), sft.sft_messages_key
        messages: list[Message] = []
        trained: list[bool] = []
        for index, message in enumerate(listed):
            trained.append(self._is_trained(message, f"{column}[{index}]"))
            # Parquet fills the keys that a message lacks with null; templates test for presence.
            kept = {k: v for k, v in message.items() if k != "loss_mask" and v is not None}
            messages.append(kept)
        if not any(message["role"] == ASSISTANT for message in messages):
            rule = "has no message of the assistant, so nothing to train; drop the row"
            self._refuse(column, rule)
        thinks = plain(self.columns.get(sft.sft_enable_thinking_key))
        if thinks is not None and not isinstance(thinks, bool):
            self._refuse(sft.sft_enable_thinking_key, f"must be true or false, not {thinks!r}")
        return Conversation(tuple(messages), tuple(trained), self._tools(), thinks, self.place)

    def _refuse(self, field: str, rule: str) -> NoReturn:
        raise DataError(f"{self.place}: `{field}` {rule}.")

    def _text(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            self._refuse(field, f"must be a text, not {type(value).__name__}")
        return value

    def _column(self, name: str) -> Any:
        if name not in self.columns:
            has = ", ".join(map(str, self.columns)) or "none"
            rule = f"is not a column of this row (it has {has}); name the column it has"
            self._refuse(name, rule)
        return plain(self.columns[name])

    def _list_of(self, name: str) -> list[Any]:
        value = self._column(name)
        if not isinstance(value, list) or not value:
            shown = "an empty list" if value == [] else type(value).__name__
            self._refuse(name, f"must be a list of at least one message, not {shown}")
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                self._refuse(f"{name}[{index}]", f"must be an object, not {type(item).__name__}")
        return value

    def _from_sharegpt(self) -> list[Message]:
        column = self.sft.sft_conversations_key
        turns = self._list_of(column)
        messages = self._system_column(turns)
        for index, turn in enumerate(turns):
            speaker = turn.get("from")
            if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
                known = ", ".join(SHAREGPT_ROLES)
                self._refuse(f"{column}[{index}].from", f"must be one of {known}, not {speaker!r}")
            text = self._text(turn.get("value"), f"{column}[{index}].value")
            rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
            spoken: Message = {"content": text}
            if speaker == "function_call":
                spoken = self._calls(text, f"{column}[{index}].value")
            messages.append({"role": SHAREGPT_ROLES[speaker], **spoken, **rest})
        return messages

    def _system_column(self, turns: list[Any]) -> list[Message]:
        """Return the system message of a ShareGPT row with a system column, else an empty list."""
        name, conversations = self.sft.sft_system_key, self.sft.sft_conversations_key
        text = plain(self.columns.get(name))
        if text is None or text == "":
            return []
        self._text(text, name)
        if turns[0].get("from") == "system":
            rule = f"is given, but `{conversations}` begins with a system turn too; keep one"
            self._refuse(name, rule)
        return [{"role": "system", "content": text}]

    def _calls(self, text: str, field: str) -> Message:
        """Return the message fields of tool calls; ``text`` is JSON of one call or a list."""
        try:
            value = parse_json(text, field)
        except UnreadableFile as error:
            self._refuse(field, f"is a function call that is not JSON ({error.reason})")
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
            self._refuse(
                field, "is a function call, so it must be an object with name and arguments"
            )
        given = [{"name": x["name"], "arguments": x.get("arguments", {})} for x in calls]
        return {"content": "", "tool_calls": [{"type": "function", "function": x} for x in given]}

    def _from_prompt_response(self) -> list[Message]:
        columns = {"user": self.sft.sft_prompt_key, ASSISTANT: self.sft.sft_response_key}
        return [
            {"role": role, "content": self._text(self._column(name), name)}
            for role, name in columns.items()
        ]

    def _is_trained(self, message: Message, field: str) -> bool:
        """Check a message; return whether its tokens are trained."""
        role = message.get("role")
        if not isinstance(role, str) or not role:
            self._refuse(f"{field}.role", f"must be a text such as user or assistant, not {role!r}")
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not calls:
            rule = "is missing; only a message with tool_calls needs none"
            self._refuse(f"{field}.content", rule)
        if content is not None and not isinstance(content, (str, list)):
            kind = type(content).__name__
            self._refuse(f"{field}.content", f"must be a text or a list of parts, not {kind}")
        if calls is not None and not isinstance(calls, list):
            self._refuse(f"{field}.tool_calls", f"must be a list, not {type(calls).__name__}")
        mask = message.get("loss_mask")
        if mask is not None and mask not in (0, 1):
            self._refuse(f"{field}.loss_mask", f"must be 0 or 1, not {mask!r}")
        if role != ASSISTANT and mask:
            rule = f"is 1 in a message of role {role!r}, but only the assistant's are trained; "
            self._refuse(f"{field}.loss_mask", rule + "leave it out or set it to 0")
        return role == ASSISTANT and (mask is None or bool(mask))

    def _tools(self) -> tuple[Any, ...] | None:
        """Return the tool schemas of the row; None if it has none.

        The column may hold JSON text, since parquet gives every object the keys of all objects.
        """
        name = self.sft.sft_tools_key
        tools = plain(self.columns.get(name))
        if isinstance(tools, str):
            try:
                tools = parse_json(tools, name) if tools.strip() else None
            except UnreadableFile as error:
                self._refuse(name, f"is a text that is not JSON ({error.reason})")
        if tools is None:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            self._refuse(name, "must be a list of objects (tool schemas), or JSON text of one")
        return tuple(tools) or None
