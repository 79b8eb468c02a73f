"""Ten chat templates that behave like those of public model families, in our own words.

Each comes with the text that an assistant's turn trains, written by hand, as the truth for masks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A template, and what is known of it.

    Attributes:
        like: the family of `tiny` whose special tokens the tokenizer has.
        turn: the trained text of an assistant's message, given whether it is the last turn.
        arguments: the form in which tool calls need their arguments; None without tool calls.
        developer: the role as which a developer's message is written; None if there is none.
        system: whether there is a system message.
        reasoning: whether reasoning is written: in the last turn, or never.
        splits: whether turns change once messages follow, so that they have to be split.
    """

    template: str
    like: str
    turn: Callable[[Message, bool], str]
    arguments: str | None = None
    developer: str | None = None
    system: bool = True
    reasoning: bool = False
    splits: bool = False


def _read(name: str) -> str:
    return (Path(__file__).parent / "families" / f"{name}.jinja").read_text(encoding="utf-8")


def _calls(message: Message, write: Callable[[str, Any], str]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(write(function["name"], function["arguments"]) for function in functions)


def _content(message: Message) -> str:
    return message.get("content") or ""


def _dumped(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _qwen25(message: Message, last: bool) -> str:
    calls = _calls(
        message, lambda n, a: f'<call>{{"name": "{n}", "arguments": {_dumped(a)}}}</call>'
    )
    return f"{_content(message)}{calls}<|im_end|>\n"


def _qwen3(message: Message, last: bool) -> str:
    thought = message.get("reasoning_content")
    thinks = f"<think>\n{thought}\n</think>\n\n" if thought and last else ""
    calls = _calls(
        message, lambda n, a: f'<tool_call>{{"name": "{n}", "arguments": {_dumped(a)}}}</tool_call>'
    )
    return f"{thinks}{_content(message)}{calls}<|im_end|>\n"


def _llama2(message: Message, last: bool) -> str:
    return f" {_content(message).strip()} </s>"


def _llama31(message: Message, last: bool) -> str:
    calls = _calls(message, lambda n, a: f'{{"name": "{n}", "parameters": {_dumped(a)}}}')
    return f"{calls or _content(message).strip()}<|eot_id|>"


def _mistral(message: Message, last: bool) -> str:
    calls = [
        json.dumps(call["function"], ensure_ascii=False) + f', "id": "{call["id"]}"}}'
        for call in message.get("tool_calls", ())
    ]
    return f"[TOOL_CALLS][{', '.join(calls)}]</s>" if calls else f" {_content(message)}</s>"


def _gemma(message: Message, last: bool) -> str:
    return f"{_content(message).strip()}<end_of_turn>\n"


def _phi(message: Message, last: bool) -> str:
    return f"{_content(message)}<|end|>\n{'<|endoftext|>' if last else ''}"


def _deepseek(message: Message, last: bool) -> str:
    calls = _calls(message, lambda n, a: f"call {n}\n```json\n{a}\n```")
    return f"{calls or _content(message).split('</think>')[-1]}<｜end▁of▁sentence｜>"


def _harmony(message: Message, last: bool) -> str:
    thought = last and message.get("reasoning_content")
    thinks = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    calls = _calls(
        message,
        lambda n, a: f" to=functions.{n}<|channel|>commentary json<|message|>{_dumped(a)}<|call|>",
    )
    end = "<|return|>" if last else "<|end|>"
    return thinks + (calls or f"<|channel|>final<|message|>{_content(message)}{end}")


def _glm(message: Message, last: bool) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            f"<k>{k}</k><v>{v if isinstance(v, str) else json.dumps(v)}</v>"
            for k, v in arguments.items()
        )
        return f"<tool_call>{name}{''.join(pairs)}</tool_call>"

    return _content(message) + _calls(message, call)


FAMILIES = {
    "qwen2.5": Family(_read("qwen2.5"), "chatml", _qwen25, "object", "system"),
    "qwen3": Family(
        _read("qwen3"), "qwen3", _qwen3, "either", "system", reasoning=True, splits=True
    ),
    "llama2": Family(_read("llama2"), "llama2", _llama2, None, "system"),
    "llama3.1": Family(_read("llama3.1"), "llama3", _llama31, "object", "developer"),
    "mistral": Family(_read("mistral"), "mistral", _mistral, "object", "system"),
    "gemma": Family(_read("gemma"), "gemma", _gemma, None, None, system=False),
    "phi": Family(_read("phi"), "phi3", _phi, None, "system"),
    "deepseek-r1": Family(_read("deepseek-r1"), "deepseek", _deepseek, "string", "system"),
    "harmony": Family(
        _read("harmony"), "chatml", _harmony, "object", "developer", reasoning=True, splits=True
    ),
    "glm": Family(_read("glm"), "zephyr", _glm, "object", "developer"),
}
