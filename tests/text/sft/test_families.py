"""Ten families' templates × rows as people write them, against transformers and masks by hand.

The truth of the tokens is `apply_chat_template` with the row as a person would put it right for the
template; that of the mask is the text of each turn, as `families` writes it out.
"""

import copy
import datetime
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import with_date
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import tokenize_samples
from tests.text.sft import tiny
from tests.text.sft.families import FAMILIES, Family, Message

DAY = datetime.date(2024, 7, 26)
ARGUMENTS = {"city": "Tromsø", "days": 2}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = said("user", "How are you?"), said("assistant", "I am fine.")
AGAIN, ENDED = said("user", "And 二 + 1?"), said("assistant", "Drei, 三 🙂")
PLAIN = [ASKED, ANSWERED, AGAIN, ENDED]


def call(arguments: Any) -> list[Message]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "a1b2c3d4e", "type": "function", "function": function}]
    return [
        said("user", "Rain there?"),
        said("assistant", None, tool_calls=calls),
        said("tool", "wet, 4 degrees", tool_call_id="a1b2c3d4e"),
        said("assistant", "It rains."),
    ]


def thought(message: Message, text: str) -> Message:
    return {**message, "reasoning_content": text}


def shared(*turns: str) -> list[Message]:
    speakers = ("human", "gpt")
    return [{"from": speakers[i % 2], "value": text} for i, text in enumerate(turns)]


@dataclass(frozen=True)
class Shape:
    """A row as it is given, and the messages that it means, the trained ones by their numbers."""

    row: dict[str, Any]
    means: list[Message]
    trained: tuple[int, ...]
    layout: str = "messages"
    needs: frozenset[str] = field(default_factory=frozenset)


def shape(row: dict[str, Any], means: list[Message], *trained: int, **more: Any) -> Shape:
    needs = frozenset(str(more.pop("needs", "")).split())
    return Shape(row, means, trained, needs=needs, **more)


SYSTEM = said("system", "Be kind.")
SHAPES = {
    "two turns": shape({"messages": PLAIN}, PLAIN, 1, 3),
    "system": shape({"messages": [SYSTEM, *PLAIN[:2]]}, [SYSTEM, *PLAIN[:2]], 2, needs="system"),
    "system column": shape(
        {"messages": PLAIN[:2], "system": "Be kind."}, [SYSTEM, *PLAIN[:2]], 2, needs="system"
    ),
    "parts": shape(
        {
            "messages": [
                said(
                    "user", [{"type": "text", "text": "How are"}, {"type": "text", "text": " you?"}]
                ),
                said("assistant", [{"type": "text", "text": "I am fine."}]),
            ]
        },
        PLAIN[:2],
        1,
    ),
    "call with an object": shape(
        {"messages": call(ARGUMENTS), "tools": TOOLS}, call(ARGUMENTS), 1, 3, needs="tools"
    ),
    "call with a text": shape(
        {"messages": call(json.dumps(ARGUMENTS, ensure_ascii=False)), "tools": json.dumps(TOOLS)},
        call(ARGUMENTS),
        1,
        3,
        needs="tools",
    ),
    "weights of others": shape(
        {"messages": [ASKED, {**ANSWERED, "weight": 0}, AGAIN, {**ENDED, "train": True}]}, PLAIN, 3
    ),
    "reasoning": shape(
        {"messages": [ASKED, thought(ANSWERED, "Say so.")]},
        [ASKED, thought(ANSWERED, "Say so.")],
        1,
        needs="reasoning",
    ),
    "reasoning twice": shape(
        {"messages": [ASKED, thought(ANSWERED, "Say so."), AGAIN, thought(ENDED, "Sum it.")]},
        [ASKED, thought(ANSWERED, "Say so."), AGAIN, thought(ENDED, "Sum it.")],
        1,
        3,
        needs="reasoning",
    ),
    "developer": shape(
        {"messages": [said("developer", "In French."), *PLAIN[:2]]},
        [said("developer", "In French."), *PLAIN[:2]],
        2,
        needs="developer",
    ),
    "ends with a question": shape({"messages": PLAIN[:3]}, PLAIN[:3], 1),
    "JSON text": shape({"messages": json.dumps(PLAIN)}, PLAIN, 1, 3),
    "sharegpt": shape(
        {"conversations": shared(*(m["content"] for m in PLAIN))}, PLAIN, 1, 3, layout="sharegpt"
    ),
    "alpaca": shape(
        {
            "instruction": "And 二",
            "input": "+ 1?",
            "output": ENDED["content"],
            "history": [[ASKED["content"], ANSWERED["content"]]],
        },
        [ASKED, ANSWERED, said("user", "And 二\n+ 1?"), ENDED],
        1,
        3,
        layout="alpaca",
    ),
    "prompt and completion": shape(
        {"prompt": PLAIN[:3], "completion": [ENDED]}, PLAIN, 3, layout="prompt-completion"
    ),
}


def lacks(family: Family, needs: frozenset[str]) -> str | None:
    """Return what the error says if a family has no place for something in a row."""
    if "system" in needs and not family.system:
        return "System role not supported"
    if "developer" in needs and family.developer is None:
        return "System role not supported|Roles must alternate|role developer"
    if "tools" in needs and family.arguments is None:
        return r"Roles must alternate|\(a tool\)|\(a tool call\)|the chat template refuses"
    if "reasoning" in needs and not family.reasoning:
        return "the reasoning of a trained turn"
    return None


def put_right(given: Shape, family: Family) -> list[Message]:
    """Return the messages of a row as a person would write them for the template."""
    messages = copy.deepcopy(given.means)
    for message in messages:
        if message["role"] == "developer":
            message["role"] = family.developer
        for made in message.get("tool_calls", ()):
            if family.arguments == "string":
                made["function"]["arguments"] = json.dumps(ARGUMENTS, ensure_ascii=False)
    return messages


def truth(
    tokenizer: Any, messages: list[Message], tools: Any, trained: list[int], family: Family
) -> Any:
    """Return ids and mask of messages, the mask by where the text of each trained turn stands."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    for index in trained:
        turn = family.turn(messages[index], index == len(messages) - 1)
        assert text.count(turn) == 1, (text, turn)
        spans.append((text.index(turn), text.index(turn) + len(turn)))
    mask = [int(any(a <= at < b for a, b in spans)) for at, _ in encoded["offset_mapping"]]
    ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)
    assert list(ids["input_ids"]) == list(encoded["input_ids"])
    return list(encoded["input_ids"]), mask


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_and_masks_those_of_the_turns(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tiny.tokenizer(family.like, template=with_date(family.template, DAY))
    date = json.dumps(DAY.strftime("%d %b %Y"))
    fixed = family.template.replace("strftime_now('%d %b %Y')", date)
    plain = tiny.tokenizer(family.like, template=fixed)
    for title, given in SHAPES.items():
        turns = sum(message["role"] == "assistant" for message in given.means)
        split = family.splits and turns > 1 and "reasoning" in given.needs
        options = SftConfig(sft_row_format=given.layout, sft_split_turns=split)
        conversation = read_conversation(given.row, Place("rows.jsonl", 3), options)
        wrong = lacks(family, given.needs)
        if wrong is not None:
            with pytest.raises(DataError, match=wrong):
                tokenize_samples(tokenizer, conversation, options)
            continue
        samples = tokenize_samples(tokenizer, conversation, options)
        messages, tools = put_right(given, family), TOOLS if "tools" in given.needs else None
        parts = [(messages, list(given.trained))]
        if split:
            parts = [(messages[: turn + 1], [turn]) for turn in given.trained]
        expected = [truth(plain, part, tools, trained, family) for part, trained in parts]
        assert [(sample.ids, sample.mask) for sample in samples] == expected, title
        unused = set(conversation.intake.ignored) - {
            "`messages[].tool_calls[].id`", "`messages[].tool_call_id`",
            "messages after the last trained turn",
        }  # fmt: skip
        if name != "harmony":
            assert not unused, (title, unused)
