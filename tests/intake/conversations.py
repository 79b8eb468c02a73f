"""Leaves of a row of each format of conversations, in the words of templates of many kinds."""

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.chat import Chat, build_chat
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.preprocess import ConversationEncoder, report_lines
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.intake.judge import Heard
from tests.intake.leaves import Change
from tests.intake.leaves import changes as changes_of
from tests.text.sft import tiny
from tests.text.sft.families import FAMILIES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where.", "enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "default": 2},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = {"city": "Oslo", "days": 2, "units": {"metric": True}, "hours": [6, 18]}
AS_TEXT = json.dumps(ARGUMENTS)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "a1b2c3d4e",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        said("user", "Rain there?"),
        said("assistant", None, tool_calls=[call]),
        said("tool", "wet, 4 degrees", tool_call_id="a1b2c3d4e", name="weather"),
        said("assistant", "It rains."),
    ]


PLAIN = [
    said("user", "How are you?", name="ann"),
    said("assistant", "I am fine."),
    said("user", "And 1 + 1?"),
    said("assistant", "Two."),
]
OPENAI = {"messages": _called(ARGUMENTS), "tools": [WEATHER], "parallel_tool_calls": False}
THOUGHT = said("assistant", "Two.", reasoning_content="One and one.")
SHARED = [
    {"from": "human", "value": "How are you?"},
    {"from": "gpt", "value": "I am fine.", "weight": 1},
]
SHARED_CALL = [
    {"from": "human", "value": "Rain there?"},
    {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": ARGUMENTS})},
    {"from": "observation", "value": "wet"},
    {"from": "gpt", "value": "It rains.", "loss": True},
]

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "OpenAI, qwen2.5": ("families/qwen2.5", {}, OPENAI),
    "OpenAI, qwen3": ("families/qwen3", {}, OPENAI),
    "OpenAI, llama3.1": ("families/llama3.1", {}, OPENAI),
    "OpenAI, mistral": ("families/mistral", {}, OPENAI),
    "OpenAI, deepseek-r1": (
        "families/deepseek-r1",
        {},
        {"messages": _called(AS_TEXT)},
    ),
    "OpenAI, glm": ("families/glm", {}, OPENAI),
    "OpenAI, harmony": ("families/harmony", {"sft_date": "2024-07-26"}, OPENAI),
    "tool calls that are noted": (
        "families/phi",
        {"sft_on_unrendered": "note"},
        {
            "messages": [PLAIN[0], {**_called(ARGUMENTS)[1], "content": "A look."}],
            "tools": [WEATHER],
        },
    ),
    "arguments as JSON text": (
        "families/qwen2.5",
        {},
        {"messages": _called(AS_TEXT), "tools": json.dumps([WEATHER])},
    ),
    "arguments kept as text": (
        "families/deepseek-r1",
        {"sft_tool_arguments": "string"},
        {"messages": _called(AS_TEXT)},
    ),
    "an older function_call": (
        "templates/hermes",
        {},
        {
            "messages": [
                PLAIN[0],
                said("assistant", None, function_call={"name": "weather", "arguments": ARGUMENTS}),
            ]
        },
    ),
    "two turns, phi": (
        "families/phi",
        {},
        {"messages": PLAIN, "id": 7, "source": {"from": "a web page"}},
    ),
    "two turns, llama2": ("families/llama2", {}, {"messages": PLAIN, "system": "Be kind."}),
    "two turns, gemma": (
        "families/gemma",
        {},
        {"messages": PLAIN, "template_kwargs": {"a": 1}},
    ),
    "two turns, zephyr": ("templates/zephyr", {}, {"messages": json.dumps(PLAIN)}),
    "a developer": (
        "families/qwen2.5",
        {},
        {"messages": [said("developer", "Be kind."), *PLAIN[2:]], "tools": []},
    ),
    "reasoning": (
        "templates/qwen3",
        {"sft_template_kwargs": '{"enable_thinking": true}'},
        {"messages": PLAIN[2:], "enable_thinking": False},
    ),
    "reasoning of each turn": (
        "families/qwen3",
        {"sft_split_turns": True},
        {"messages": [PLAIN[2], THOUGHT, PLAIN[0], {**THOUGHT, "tool_calls": []}]},
    ),
    "reasoning that is looked for": (
        "families/qwen3",
        {"sft_on_mismatch": "realign"},
        {"messages": [PLAIN[2], THOUGHT, PLAIN[0], {**THOUGHT, "reasoning": "Hm."}]},
    ),
    "thinking": (
        "families/harmony",
        {},
        {"messages": [PLAIN[2], said("assistant", "Two.", thinking="One and one.")]},
    ),
    "masks": (
        "templates/chatml",
        {},
        {
            "messages": [
                PLAIN[0],
                {**PLAIN[1], "loss_mask": 0, "weight": 0},
                PLAIN[2],
                {**PLAIN[3], "train": True, "trainable": 1},
                said("user", "Bye.", loss=0),
                said("assistant", "Bye!", training=False),
            ]
        },
    ),
    "generation marks": (
        "templates/chatml_generation",
        {},
        {"messages": [PLAIN[0], {**PLAIN[1], "weight": 0}, *PLAIN[2:]]},
    ),
    "content parts": (
        "templates/chatml",
        {},
        {
            "messages": [
                said(
                    "user",
                    [
                        {"type": "text", "text": "How are", "cache_control": {"type": "brief"}},
                        {"type": "input_text", "text": " you?"},
                    ],
                ),
                said("assistant", [{"type": "output_text", "text": "Fine.", "annotations": [1]}]),
            ]
        },
    ),
    "content parts that the template writes": (
        "parts",
        {},
        {
            "messages": [
                said("user", [{"type": "text", "text": "How?", "cache_control": "brief"}]),
                said("assistant", [{"type": "text", "text": "So."}, "And so."]),
            ]
        },
    ),
    "sharegpt": (
        "templates/chatml",
        {"sft_row_format": "sharegpt"},
        {"conversations": SHARED, "system": "Be kind.", "id": "identity_0"},
    ),
    "sharegpt with tools": (
        "families/qwen2.5",
        {"sft_row_format": "sharegpt"},
        {"conversations": SHARED_CALL, "tools": json.dumps([WEATHER])},
    ),
    "alpaca": (
        "templates/chatml",
        {"sft_row_format": "alpaca"},
        {
            "instruction": "Add.",
            "input": "1 + 1",
            "output": "Two.",
            "system": "Be kind.",
            "history": [["How are you?", "I am fine."]],
            "text": "Below is an instruction.",
        },
    ),
    "question and answer": (
        "families/llama3.1",
        {"sft_row_format": "prompt-response"},
        {"question": "1 + 1?", "answer": "Two.", "level": 3, "rationale": None},
    ),
    "prompt and completion": (
        "families/mistral",
        {"sft_row_format": "prompt-completion"},
        {"prompt": "1 + 1?", "completion": "Two.", "system": "Be kind.", "score": 0.5},
    ),
    "lists of prompt and completion": (
        "templates/chatml",
        {"sft_row_format": "prompt-completion"},
        {"prompt": [*PLAIN[:2], {**PLAIN[2], "date": "today"}], "completion": [PLAIN[3]]},
    ),
    "other columns": (
        "templates/chatml",
        {"sft_messages_key": "dialogue", "sft_system_key": "persona"},
        {"dialogue": PLAIN, "persona": "Be kind.", "messages": [], "system": "unused"},
    ),
}
"""By a name of the case: the template, of a folder of tests/text/sft, options, and a row."""

_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}\n"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)


def bases() -> Iterator[tuple[str, Any]]:
    for name, (template, options, row) in ROWS.items():
        yield name, {"template": template, "options": options, "row": row}


def changes(content: Any, dice: random.Random) -> Iterator[Change]:
    for change in changes_of(content["row"], dice):
        yield replace(change, path=("row", *change.path))


def names_whole(change: Change, text: str) -> bool:
    """Return whether a text names a column, or a value in a message, that holds the leaf."""
    unused = "\n".join(
        line for line in text.splitlines() if line.startswith(("ignored", "left out"))
    )
    wholes = [f"column `{change.path[1]}`"]
    name = str(change.path[1])
    for step in change.path[2:]:
        name += "[]" if isinstance(step, int) else f".{step}"
        wholes += [f"`{name}`"] if isinstance(step, str) else []
    return any(whole in unused for whole in wholes)


def hear(content: Any, folder: Path) -> Heard:
    """Return the tokens and the masks of a row, as a run and tools/preprocess_data.py make them."""
    chat = _chat(content["template"], json.dumps(content["options"]))
    documents: list[Any] = []
    counted: list[Any] = []
    refused: list[str] = []
    ConversationEncoder(chat).encode(
        [json.dumps(content["row"]).encode()],
        0,
        lambda line, reason: refused.append(reason),
        lambda key, stream, batch: documents.append(
            (batch.tokens.tolist(), batch.lengths.tolist())
        ),
        counted.append,
    )
    if refused:
        raise DataError(f"The row {refused[0]}.")
    intake = Intake.total(map(Intake.from_dict, counted))
    return Heard(documents, "\n".join(report_lines([intake], chat, "the input")))


@cache
def _chat(template: str, options: str) -> Chat:
    settings = TokenizerConfig("HuggingFaceTokenizer", str(_tokenizer(template)))
    return build_chat(
        build_tokenizer(settings), settings, SftConfig(sft=True, **json.loads(options))
    )


@cache
def _tokenizer(template: str) -> Path:
    folder, _, name = template.partition("/")
    if folder == "families":
        made = tiny.tokenizer(FAMILIES[name].like, template=FAMILIES[name].template)
    else:
        made = tiny.tokenizer(name or "chatml", template=None if name else _PARTS)
    saved = _FOLDERS / template
    made.save_pretrained(str(saved))
    return saved


_KEPT = tempfile.TemporaryDirectory(prefix="intake_tokenizers_")
_FOLDERS = Path(_KEPT.name)
