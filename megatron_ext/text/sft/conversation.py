"""Reads the conversation in a row of a jsonl, parquet or Arrow file, and checks every field.

A row has one of five layouts:

- messages in the form that `apply_chat_template` of transformers takes, in one column;
- a prompt and a response, as texts;
- a prompt and a completion, as lists of messages;
- ShareGPT's column of `from`/`value` pairs;
- alpaca's instruction, input, output and history.

An unknown key of a message is passed on to the chat template. An unknown column is counted as
ignored.

A key whose value is null counts as missing, in jsonl and in tables, at any depth. Tables give every
object the keys of all objects, and therefore cannot tell a null from a missing key.
"""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.intake import Intake

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

USUAL_ROLES = (*SHAREGPT_ROLES.values(), "developer", "function", "ipython")
"""The roles of messages in common data sets and chat templates."""

MASKS = ("loss_mask", "weight", "train", "loss", "training", "trainable")
"""Keys of a message that tell whether it is trained, that is, whether its tokens have a loss."""

_LAYOUTS = (
    ({"conversations"}, "sharegpt"),
    ({"prompt", "completion"}, "prompt-completion"),
    ({"instruction", "output"}, "alpaca"),
    ({"question", "answer"}, "prompt-response"),
)
"""Pairs (set of the columns of a layout of rows, the layout's `--sft-row-format`).

An error recommends the layout whose columns it finds in a row.
"""


@functools.lru_cache(maxsize=256)
def _resembling(role: str) -> str | None:
    """Return the usual role for which ``role`` may be a misspelling; None if it resembles none."""
    near = difflib.get_close_matches(role.lower(), dict.fromkeys(USUAL_ROLES), n=1, cutoff=0.75)
    return near[0] if near else None


_NUMBER = re.compile(r"\[\d+\]")


class Place(NamedTuple):
    """The place of a row: its file, and the number of the row in this file, from 1."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Conversation:
    """One checked conversation. Its messages hold neither null values nor keys for loss masks.

    Attributes:
        trained: for each message, whether its tokens are trained; this is True only for messages of
            the assistant.
        tools: the tool schemas; None if the row has none.
        enable_thinking: the value in the row; None leaves it to ``--sft-template-kwargs``.
        place: the file of the row, and the row's number in this file.
        intake: counts of the values and turns that were read, converted or ignored in the row.
        names: for each message, where the message and its content are in the row, such as
            (`messages[1]`, `messages[1].content`).
        tools_name: the name of the column that holds the tools.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Any, ...] | None
    enable_thinking: bool | None
    place: Place
    intake: Intake = field(default_factory=Intake, compare=False)
    names: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    tools_name: str = field(default="tools", compare=False)

    def name(self, index: int, *path: str | int) -> str:
        """Return the name of message ``index``, or of the value at ``path`` inside it, for errors.

        The name tells where the message or value is in the row, such as `messages[1].content`.
        """
        name, content = self.names[index]
        if path[:1] == ("content",):
            return content + steps(path[1:])
        return name + steps(path)


def steps(path: Sequence[str | int]) -> str:
    """Return a path of keys and indices as the suffix of a name, such as `.tool_calls[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def read_conversation(
    row: Mapping[str, Any], place: Place, sft: SftConfig | None = None
) -> Conversation:
    """Return the conversation of a row; raise a DataError if a column is missing or wrong.

    ``sft`` tells the layout of the row and the names of its columns; None means the defaults.
    """
    return _Row(row, place, sft or SftConfig()).conversation()


def plain(value: Any) -> Any:
    """Convert numpy arrays at any depth to lists, and numpy scalars to Python's scalars.

    Readers of parquet return numpy values.
    """
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the object keys, at any depth, whose value is null.

    Nulls in lists stay.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _is_nothing(value: Any) -> bool:
    """Tell whether a value is None or empty.

    Parquet and Arrow tables store such a value in each column for which a row has no value.
    """
    return value is None or value in ("", [], {})


class _Row:
    """A row that is being read; it records which columns were used.

    Its methods take as ``name`` where a value is in the row, such as `messages[0].content`, for
    errors.
    """

    def __init__(self, columns: Mapping[str, Any], place: Place, sft: SftConfig) -> None:
        self.columns = columns
        self.place = place
        self.sft = sft
        self.used: set[str] = set()
        self.texts: set[str] = set()
        """The names of values that are the text of a message, not an object with this text."""
        self.intake = Intake()

    def conversation(self) -> Conversation:
        listed, trains = self._messages()
        messages: list[Message] = []
        trained: list[bool] = []
        names: list[tuple[str, str]] = []
        key = "value" if self.sft.sft_row_format == "sharegpt" else "content"
        for (name, message), may_train in zip(listed, trains, strict=True):
            names.append((name, name if name in self.texts else f"{name}.{key}"))
            kept, mask = self._checked(message, name)
            is_assistant = kept["role"] == ASSISTANT
            messages.append(kept)
            trained.append(is_assistant and (may_train if mask is None else mask))
        if not any(message["role"] == ASSISTANT for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            rule = f"has no message of role {ASSISTANT} but of {roles}, so nothing to train"
            rule += f"; drop the row, or call the role that answers {ASSISTANT}"
            self._refuse(listed[0][0].split("[")[0], rule)
        thinks = self._take(self.sft.sft_enable_thinking_key)
        if thinks is not None and not isinstance(thinks, bool):
            self._refuse(self.sft.sft_enable_thinking_key, f"must be true or false, not {thinks!r}")
        tools = self._tools()
        for name, value in self.columns.items():
            if name not in self.used and not _is_nothing(plain(value)):
                self.intake.ignored[f"column `{name}`"] += 1
        self._count(messages, trained, tools)
        return Conversation(
            tuple(messages),
            tuple(trained),
            tools,
            thinks,
            self.place,
            self.intake,
            tuple(names),
            self.sft.sft_tools_key,
        )

    def _count(
        self, messages: Sequence[Message], trained: Sequence[bool], tools: Sequence[Any] | None
    ) -> None:
        turns = sum(message["role"] == ASSISTANT for message in messages)
        self.intake.counts.update(
            {
                "rows": 1,
                "messages": len(messages),
                "assistant turns": turns,
                "turns with loss mask 0": turns - sum(trained),
                "tools": len(tools or ()),
                "tool calls": sum(len(m.get("tool_calls") or ()) for m in messages),
            }
        )

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise DataError(f"{self.place}: `{name}` {rule}.")

    def _take(self, name: str) -> Any:
        """Return the value of a column, without nulls, and record the column as used.

        Return None if the row lacks the column.
        """
        self.used.add(name)
        return without_nulls(plain(self.columns.get(name)))

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            self._refuse(name, f"must be a text, not {type(value).__name__}")
        return value

    def _column(self, name: str) -> Any:
        if name not in self.columns:
            has = ", ".join(map(str, self.columns)) or "none"
            layout = next((x for keys, x in _LAYOUTS if keys <= set(self.columns)), None)
            advice = "name the column it has"
            if layout is not None and layout != self.sft.sft_row_format:
                advice += f", or give `--sft-row-format {layout}`"
            self._refuse(name, f"is not a column of this row (it has {has}); {advice}")
        return self._take(name)

    def _json(self, value: Any, name: str) -> Any:
        """Parse a text that looks like a JSON list or object; return any other value unchanged."""
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            parsed = parse_json(value, name)
        except UnreadableFile as error:
            self._refuse(name, f"is a text that is not JSON ({not_json(error)})")
        self.intake.changed[f"JSON text in `{generic(name)}`"] += 1
        return without_nulls(parsed)

    def _list_of(self, value: Any, name: str) -> list[Any]:
        """Return ``value`` as a list of messages, parsed if it is JSON text.

        Raise a DataError if it is not a list, is empty, or holds anything but objects.
        """
        value = self._json(value, name)
        if not isinstance(value, list) or not value:
            shown = "an empty list" if value == [] else type(value).__name__
            self._refuse(name, f"must be a list of at least one message, not {shown}")
        items = [self._json(item, f"{name}[{index}]") for index, item in enumerate(value)]
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                self._refuse(f"{name}[{index}]", f"must be an object, not {type(item).__name__}")
        return items

    def _messages(self) -> tuple[list[tuple[str, Message]], list[bool]]:
        """Return (name, message) of each message, and whether each message is trained by default.

        A name tells where the message is in the row. The default decides only for messages of the
        assistant without a loss mask of their own; messages of other roles are never trained.
        """
        layout = self.sft.sft_row_format
        if layout == "sharegpt":
            listed = self._from_sharegpt()
        elif layout == "prompt-response":
            listed = self._from_texts()
        elif layout == "prompt-completion":
            return self._from_prompt_completion()
        elif layout == "alpaca":
            listed = self._from_alpaca()
        else:
            name = self.sft.sft_messages_key
            listed = _numbered(name, self._list_of(self._column(name), name))
        listed = [*self._system_column(listed), *listed]
        return listed, [True] * len(listed)

    def _from_sharegpt(self) -> list[tuple[str, Message]]:
        column = self.sft.sft_conversations_key
        messages: list[Message] = []
        for index, turn in enumerate(self._list_of(self._column(column), column)):
            speaker = turn.get("from")
            if speaker is None and "role" in turn:
                rule = (
                    "has a role and no `from`, as messages have; give `--sft-row-format messages`"
                )
                self._refuse(f"{column}[{index}]", f"{rule} and `--sft-messages-key {column}`")
            if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
                speakers = ", ".join(SHAREGPT_ROLES)
                self._refuse(
                    f"{column}[{index}].from", f"must be one of {speakers}, not {speaker!r}"
                )
            text = self._text(turn.get("value"), f"{column}[{index}].value")
            rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
            spoken: Message = {"content": text}
            if speaker == "function_call":
                spoken = self._calls(text, f"{column}[{index}].value")
            for key in set(spoken) & set(rest) | ({"role"} & set(rest)):
                self._refuse(f"{column}[{index}].{key}", "is given beside `from`/`value`; keep one")
            messages.append({"role": SHAREGPT_ROLES[speaker], **spoken, **rest})
        return _numbered(column, messages)

    def _system_column(self, listed: Sequence[tuple[str, Message]]) -> list[tuple[str, Message]]:
        """Return a list with (name, message) of the system message in a system column.

        The list is empty if the row has no such column. ``listed`` holds the other messages; raise
        a DataError if they begin with a system message, too.
        """
        name = self.sft.sft_system_key
        text = self._take(name)
        if text is None or text == "":
            return []
        self._text(text, name)
        self.texts.add(name)
        first, message = listed[0]
        if message.get("role") == "system":
            column = first.split("[")[0]
            rule = f"is given, but `{column}` begins with a system turn too; keep one"
            self._refuse(name, rule)
        return [(name, {"role": "system", "content": text})]

    def _calls(self, text: str, name: str) -> Message:
        """Return the content, which is empty, and the tool calls of a ShareGPT function call.

        ``text`` is the JSON of one call or of a list of calls; ``name`` is its place in the row.
        """
        try:
            value = without_nulls(parse_json(text, name))
        except UnreadableFile as error:
            self._refuse(name, f"is a function call that is not JSON ({not_json(error)})")
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
            self._refuse(
                name, "is a function call, so it must be an object with name and arguments"
            )
        given = []
        for call in calls:
            rest = {key: item for key, item in call.items() if key not in ("name", "arguments")}
            arguments = call.get("arguments")
            if arguments is None:
                arguments = rest.pop("parameters", {})
            function = {"name": call["name"], "arguments": arguments}
            given.append({**rest, "type": "function", "function": function})
        return {"content": "", "tool_calls": given}

    def _from_texts(self) -> list[tuple[str, Message]]:
        columns = {"user": self.sft.prompt_column, ASSISTANT: self.sft.response_column}
        self.texts.update(columns.values())
        return [
            (name, {"role": role, "content": self._text(self._column(name), name)})
            for role, name in columns.items()
        ]

    def _from_prompt_completion(self) -> tuple[list[tuple[str, Message]], list[bool]]:
        """Return (name, message) of each message, and whether each message is trained by default.

        A name is the message's place in the row. The messages of the completion are trained by
        default, those of the prompt are not.
        """
        listed: list[tuple[str, Message]] = []
        trains: list[bool] = []
        columns = {"user": self.sft.prompt_column, ASSISTANT: self.sft.response_column}
        for role, name in columns.items():
            value = self._column(name)
            part = [(name, {"role": role, "content": value})]
            if not isinstance(value, str) or _holds_messages(value):
                part = _numbered(name, self._list_of(value, name))
            else:
                self.texts.add(name)
            listed += part
            trains += [role == ASSISTANT] * len(part)
        system = self._system_column(listed)
        return [*system, *listed], [*(True for _ in system), *trains]

    def _from_alpaca(self) -> list[tuple[str, Message]]:
        """Return (name, message) of each turn of `history`, of the instruction and of the output.

        A name is the message's place in the row. The answers in `history` are trained too. The text
        of the column `input` follows the instruction on a new line.
        """
        sft = self.sft
        listed: list[tuple[str, Message]] = []
        history = self._json(self._take(sft.sft_history_key), sft.sft_history_key)
        if not isinstance(history, list):
            if not _is_nothing(history):
                self._refuse(sft.sft_history_key, "must be a list of pairs of texts")
            history = []
        for index, pair in enumerate(history):
            name = f"{sft.sft_history_key}[{index}]"
            if not isinstance(pair, list) or len(pair) != 2:
                self._refuse(name, "must be a pair of texts: instruction and answer")
            for side, (role, text) in enumerate(zip(("user", ASSISTANT), pair, strict=True)):
                own = f"{name}[{side}]"
                listed.append((own, {"role": role, "content": self._text(text, own)}))
        name = sft.sft_instruction_key
        instruction = self._text(self._column(name), name)
        more = self._take(sft.sft_input_key)
        if more is not None and self._text(more, sft.sft_input_key):
            instruction = f"{instruction}\n{more}" if instruction else more
        answer = self._text(self._column(sft.sft_output_key), sft.sft_output_key)
        listed.append((name, {"role": "user", "content": instruction}))
        listed.append((sft.sft_output_key, {"role": ASSISTANT, "content": answer}))
        self.texts.update(own for own, _ in listed)
        return listed

    def _checked(self, message: Message, name: str) -> tuple[Message, bool | None]:
        """Check a message; return a copy without its loss mask, and whether that mask is 1.

        The second value is None if the message has no loss mask. Tool calls in the copy are parsed.
        """
        role = message.get("role")
        if role is None and "from" in message and self.sft.sft_row_format == "messages":
            rule = "has `from` and no role, as in ShareGPT; give `--sft-row-format sharegpt` and "
            self._refuse(name, rule + f"`--sft-conversations-key {self.sft.sft_messages_key}`")
        if not isinstance(role, str) or not role:
            self._refuse(f"{name}.role", f"must be a text such as user or assistant, not {role!r}")
        if role not in USUAL_ROLES and (usual := _resembling(role)) is not None:
            self.intake.doubtful[f"{role} ({usual}?)"] += 1
        kept = {key: value for key, value in message.items() if key not in MASKS}
        self._read_calls(kept, name)
        content = kept.get("content")
        calls = kept.get("tool_calls")
        if content is None and not calls:
            rule = "is missing; only a message with tool_calls needs none"
            self._refuse(f"{name}.content", rule)
        if content is not None and not isinstance(content, (str, list)):
            kind = type(content).__name__
            self._refuse(f"{name}.content", f"must be a text or a list of parts, not {kind}")
        return kept, self._mask(message, name, role)

    def _mask(self, message: Message, name: str, role: str) -> bool | None:
        """Return whether the loss mask of a message is 1; None if the message has no loss mask.

        Raise a DataError for a mask other than 0 or 1, for two masks that contradict each other,
        and for a mask of 1 on a message that is not the assistant's.
        """
        masks = {key: message[key] for key in MASKS if message.get(key) is not None}
        for key, mask in masks.items():
            if mask not in (0, 1):
                self._refuse(f"{name}.{key}", f"must be 0 or 1, not {mask!r}")
            if role != ASSISTANT and mask:
                rule = f"is 1 in a message of role {role!r}, but only the assistant's are trained; "
                self._refuse(f"{name}.{key}", rule + "leave it out or set it to 0")
            if key != "loss_mask":
                self.intake.changed[f"`{key}` as loss mask"] += 1
        if len(set(map(bool, masks.values()))) > 1:
            first, second = list(masks)[:2]
            self._refuse(f"{name}.{first}", f"contradicts `{second}` of the message; keep one")
        return bool(next(iter(masks.values()))) if masks else None

    def _read_calls(self, message: Message, name: str) -> None:
        """Check the tool calls of a message in place, and parse those that are JSON text.

        OpenAI's older `function_call` becomes a tool call.
        """
        call = self._json(message.get("function_call"), f"{name}.function_call")
        if call is not None:
            if message.get("tool_calls") or not isinstance(call, dict):
                rule = "must be an object, and the only call of its message; use tool_calls"
                self._refuse(f"{name}.function_call", rule)
            del message["function_call"]
            message["tool_calls"] = [{"type": "function", "function": call}]
            self.intake.changed["`function_call` as tool call"] += 1
        if "tool_calls" not in message:
            return
        calls = self._json(message["tool_calls"], f"{name}.tool_calls")
        if not isinstance(calls, list):
            self._refuse(f"{name}.tool_calls", f"must be a list, not {type(calls).__name__}")
        if not calls:
            # Tables add an empty list to messages without calls. Some templates test whether the
            # key exists, so it must go.
            del message["tool_calls"]
            return
        message["tool_calls"] = [
            self._call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]

    def _call(self, call: Any, name: str) -> Any:
        """Check a tool call and its function, which must be objects; return the call.

        The arguments may stay JSON text.
        """
        call = self._json(call, name)
        if not isinstance(call, dict):
            self._refuse(name, f"must be an object, not {type(call).__name__}")
        if "function" in call:
            function = self._json(call["function"], f"{name}.function")
            if not isinstance(function, dict):
                kind = type(function).__name__
                self._refuse(f"{name}.function", f"must be an object with a name, not {kind}")
            call = {**call, "function": function}
            self._name_of(function, f"{name}.function")
        else:
            self._name_of(call, name)
        return call

    def _name_of(self, function: Message, name: str) -> None:
        """Raise a DataError if the name of a function is not a text."""
        self._text(function.get("name"), f"{name}.name")

    def _tools(self) -> tuple[Any, ...] | None:
        """Return the tool schemas of the row; None if it has none.

        The column may be JSON text, and so may each tool, its function and its parameters. Data
        sets use JSON text because parquet otherwise gives every object the keys of all objects.
        """
        name = self.sft.sft_tools_key
        tools = self._take(name)
        if isinstance(tools, str):
            try:
                tools = without_nulls(parse_json(tools, name)) if tools.strip() else None
            except UnreadableFile as error:
                self._refuse(name, f"is a text that is not JSON ({not_json(error)})")
        if tools is None:
            return None
        rule = "must be a list of objects (tool schemas), or JSON text of one"
        if not isinstance(tools, list):
            self._refuse(name, rule)
        read = [self._json(tool, f"{name}[{index}]") for index, tool in enumerate(tools)]
        if not all(isinstance(tool, dict) for tool in read):
            self._refuse(name, rule)
        return tuple(self._schema(tool, f"{name}[{i}]") for i, tool in enumerate(read)) or None

    def _schema(self, tool: Message, name: str) -> Message:
        """Return a tool, with its function and its parameters parsed if they are JSON text."""
        read = dict(tool)
        for key in ("function", "parameters"):
            if key in read:
                value = self._json(read[key], f"{name}.{key}")
                if not isinstance(value, dict):
                    self._refuse(f"{name}.{key}", f"must be an object, not {type(value).__name__}")
                read[key] = self._schema(value, f"{name}.{key}") if key == "function" else value
        if "name" in read:
            self._name_of(read, name)
        return read


def _holds_messages(text: str) -> bool:
    """Tell whether a text is a JSON list of at least one object, and of objects only."""
    try:
        value = parse_json(text, "messages") if text.lstrip().startswith("[") else None
    except UnreadableFile:
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) for x in value)


def not_json(error: UnreadableFile) -> str:
    """Return why a text could not be parsed, without the first words "it is no valid JSON: ".

    The caller's own error message says already that the text is not JSON.
    """
    return error.reason.removeprefix("it is no valid JSON: ")


def _numbered(column: str, messages: Sequence[Message]) -> list[tuple[str, Message]]:
    return [(f"{column}[{index}]", message) for index, message in enumerate(messages)]


def generic(name: str) -> str:
    """Return the name of a value with `[]` in place of each index.

    Values of all rows can then be counted under one name.
    """
    return _NUMBER.sub("[]", name)
