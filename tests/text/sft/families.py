"""Ten chat templates that behave like those of public model families, in our own words.

Each comes with the text that an assistant's turn trains, written by hand, as the truth for masks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
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


def _calls(message: Message, write: Callable[[str, Any], str]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(write(function["name"], function["arguments"]) for function in functions)


def _content(message: Message) -> str:
    return message.get("content") or ""


def _dumped(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


# --- Known roles only, default system text, arguments through tojson.
QWEN25 = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- else %}{% set system = 'You are a helper.' %}{% endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}{{ '\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}</call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<response>\n' + m.content + '\n</response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def _qwen25(message: Message, last: bool) -> str:
    calls = _calls(
        message, lambda n, a: f'<call>{{"name": "{n}", "arguments": {_dumped(a)}}}</call>'
    )
    return f"{_content(message)}{calls}<|im_end|>\n"


# --- Reasoning after the last question only; arguments as they are if they are a text.
QWEN3 = """{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\n' }}{% endif %}{{ tools | tojson + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}{% else %}{% set reasoning = '' %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and reasoning %}{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}{% set f = c.function if c.function else c %}
{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' }}
{%- if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}
{{- '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + content + '</tool_response><|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def _qwen3(message: Message, last: bool) -> str:
    thought = message.get("reasoning_content")
    thinks = f"<think>\n{thought}\n</think>\n\n" if thought and last else ""
    calls = _calls(
        message, lambda n, a: f'<tool_call>{{"name": "{n}", "arguments": {_dumped(a)}}}</tool_call>'
    )
    return f"{thinks}{_content(message)}{calls}<|im_end|>\n"


# --- A system text inside the first question; roles must alternate.
LLAMA2 = """{%- if messages[0].role == 'system' %}{% set turns = messages[1:] %}
{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
{%- else %}{% set turns = messages %}{% set system = '' %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{%- if m.role == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + m.content | trim + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""


def _llama2(message: Message, last: bool) -> str:
    return f" {_content(message).strip()} </s>"


# --- The date, tools in the first question, one call in a message, results of role ipython.
LLAMA31 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
{%- if m.role == 'ipython' or m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is string %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('One call at a time.') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""


def _llama31(message: Message, last: bool) -> str:
    calls = _calls(message, lambda n, a: f'{{"name": "{n}", "parameters": {_dumped(a)}}}')
    return f"{calls or _content(message).strip()}<|eot_id|>"


# --- Tools before the first question, and identifiers of nine letters.
MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{{- bos_token }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + (system if loop.index0 == 0 else '') + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id is not defined or c.id | length != 9 %}{{ raise_exception('Ids have nine letters.') }}{% endif %}
{{- c.function | tojson }}{{ ', "id": "' + c.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('Ids have nine letters.') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant and tool.') }}{% endif %}
{%- endfor %}"""


def _mistral(message: Message, last: bool) -> str:
    calls = [
        json.dumps(call["function"], ensure_ascii=False) + f', "id": "{call["id"]}"}}'
        for call in message.get("tool_calls", ())
    ]
    return f"[TOOL_CALLS][{', '.join(calls)}]</s>" if calls else f" {_content(message)}</s>"


# --- No system role; the assistant is called model.
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{%- if m.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m.role %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def _gemma(message: Message, last: bool) -> str:
    return f"{_content(message).strip()}<end_of_turn>\n"


# --- An end-of-text token unless an answer is asked for.
PHI = """{%- for m in messages %}
{%- if m.role == 'system' and m.content %}{{ '<|system|>\n' + m.content + '<|end|>\n' }}
{%- elif m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + '<|end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def _phi(message: Message, last: bool) -> str:
    return f"{_content(message)}<|end|>\n{'<|endoftext|>' if last else ''}"


# --- Earlier reasoning inside the content is taken out; arguments are joined to texts.
DEEPSEEK = """{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜>' }}
{%- for c in m.tool_calls %}{{ 'call ' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}{% set content = m.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ 'output ' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""


def _deepseek(message: Message, last: bool) -> str:
    calls = _calls(message, lambda n, a: f"call {n}\n```json\n{a}\n```")
    return f"{calls or _content(message).split('</think>')[-1]}<｜end▁of▁sentence｜>"


# --- Channels; system and developer share a message; a last turn ends otherwise; types of tools.
HARMONY = """{{- '<|start|>system<|message|>Valid channels: analysis, final.<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
{%- set instructions = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set instructions = '' %}{% set turns = messages %}{% endif %}
{%- if instructions or tools %}{{ '<|start|>developer<|message|># Instructions\n\n' + instructions }}
{%- if tools %}{{ '\n\n# Tools\n\nnamespace functions {\n' }}
{%- for t in tools %}{% set f = t.function %}{{ 'type ' + f.name + ' = (_: {\n' }}
{%- for name, about in f.parameters.properties.items() %}{{ name }}
{%- if name not in (f.parameters.required or []) %}{{ '?' }}{% endif %}
{{- ': ' }}{% if about.type == 'string' %}{{ 'string' }}{% elif about.type == 'integer' or about.type == 'number' %}{{ 'number' }}{% else %}{{ 'any' }}{% endif %}{{ ',\n' }}
{%- endfor %}{{ '}) => any;\n' }}{% endfor %}{{ '}' }}{% endif %}{{ '<|end|>' }}{% endif %}
{%- for m in turns %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- set thought = m.thinking or m.reasoning_content %}
{%- if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}{{ '<|call|>' }}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- set thought = m.thinking or m.reasoning_content %}
{%- if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|message|>' + m.content | tojson + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


def _harmony(message: Message, last: bool) -> str:
    thought = last and message.get("reasoning_content")
    thinks = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    calls = _calls(
        message,
        lambda n, a: f" to=functions.{n}<|channel|>commentary json<|message|>{_dumped(a)}<|call|>",
    )
    end = "<|return|>" if last else "<|end|>"
    return thinks + (calls or f"<|channel|>final<|message|>{_content(message)}{end}")


# --- Arguments as pairs of key and value, any role as its own header, lists of parts.
GLM = """{{- '[gMASK]<sop>' }}
{%- macro text_of(content) %}{% if content is string %}{{ content }}
{%- else %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- if tools %}{{ '<|system|>\n# Tools' }}{% for t in tools %}{{ '\n' + t | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\n' + text_of(m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}{{ '<k>' + k + '</k><v>' }}{{ v | tojson if v is not string else v }}{{ '</v>' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n' + text_of(m.content) }}
{%- else %}{{ '<|' + m.role + '|>\n' + text_of(m.content) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


def _glm(message: Message, last: bool) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            f"<k>{k}</k><v>{v if isinstance(v, str) else json.dumps(v)}</v>"
            for k, v in arguments.items()
        )
        return f"<tool_call>{name}{''.join(pairs)}</tool_call>"

    return _content(message) + _calls(message, call)


FAMILIES = {
    "qwen2.5": Family(QWEN25, "chatml", _qwen25, "object", "system"),
    "qwen3": Family(QWEN3, "qwen3", _qwen3, "either", "system", reasoning=True, splits=True),
    "llama2": Family(LLAMA2, "llama2", _llama2, None, "system"),
    "llama3.1": Family(LLAMA31, "llama3", _llama31, "object", "developer"),
    "mistral": Family(MISTRAL, "mistral", _mistral, "object", "system"),
    "gemma": Family(GEMMA, "gemma", _gemma, None, None, system=False),
    "phi": Family(PHI, "phi3", _phi, None, "system"),
    "deepseek-r1": Family(DEEPSEEK, "deepseek", _deepseek, "string", "system"),
    "harmony": Family(
        HARMONY, "chatml", _harmony, "object", "developer", reasoning=True, splits=True
    ),
    "glm": Family(GLM, "zephyr", _glm, "object", "developer"),
}
