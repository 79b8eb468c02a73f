"""Leaves of the files of a Hugging Face tokenizer."""

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.generation.requests import end_tokens, generation_notes
from megatron_ext.text.sft.chat import build_chat
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import tokenize_samples
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.text.tokenizers.entries import DESCRIBING, USUAL
from tests.intake.judge import Heard
from tests.intake.leaves import Change
from tests.intake.leaves import changes as changes_of
from tests.text.sft import tiny

TEXTS = [
    "  Two words,  caf\u00e9 \u4e2d. ",
    "a <|begin_of_text|> b <|eot_id|>c<|end_header_id|> d",
    "<|python_tag|><s>x</s>",
]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]},
]
ROWS.append({**ROWS[0], "tools": [{"type": "function", "function": {"name": "weather"}}]})

_TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
CONFIG = {
    "add_bos_token": True,
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "pad_token": "<|end_header_id|>",
    "clean_up_tokenization_spaces": True,
    "model_max_length": 131072,
    "padding_side": "left",
    "transformers_version": "4.55.0",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
GENERATION = {
    "bos_token_id": 256,
    "do_sample": True,
    "eos_token_id": [257, 259],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.55.0",
}
_WITH_TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
)


def bases() -> Iterator[tuple[str, Any]]:
    parts, template = _saved()
    plain = {"tokenizer_config.json": CONFIG, "chat_template.jinja": template}
    yield "its own file", {"tokenizer.json": parts, "chat_template.jinja": template}
    yield "general class", {**plain, "generation_config.json": GENERATION}
    marked = {name: {"content": CONFIG[name], **_TOKEN} for name in ("bos_token", "eos_token")}
    yield (
        "two files of special tokens",
        {
            **plain,
            "special_tokens_map.json": {
                **marked,
                "pad_token": "<|eot_id|>",
                "additional_special_tokens": ["<|start_header_id|>"],
            },
        },
    )
    decoder = {str(256 + i): _added(text) for i, text in enumerate(_SPECIAL)}
    yield (
        "all in one file",
        {
            "tokenizer_config.json": {
                **CONFIG,
                **{name: {"__type": "AddedToken", **token} for name, token in marked.items()},
                "added_tokens_decoder": decoder,
                "extra_special_tokens": {"header_token": "<|start_header_id|>"},
                "chat_template": template,
            },
            "special_tokens_map.json": {"eos_token": "<|eot_id|>"},
            "generation_config.json": {"eos_token_id": 257, "max_new_tokens": 20},
        },
    )
    yield (
        "templates by name",
        {
            "tokenizer_config.json": {
                **CONFIG,
                "processor_class": "AProcessor",
                "python_token": "<|eot_id|>",
                "chat_template": [
                    {"name": "default", "template": template},
                    {"name": "tool_use", "template": _WITH_TOOLS},
                    {"name": "rag", "template": "{{ documents }}"},
                ],
            }
        },
    )
    yield (
        "two templates",
        {**plain, "tokenizer_config.json": {**CONFIG, "chat_template": "{{ messages }}"}},
    )
    yield (
        "a class of its own",
        {
            **plain,
            "tokenizer_config.json": {
                **CONFIG,
                "tokenizer_class": "Qwen2TokenizerFast",
                "legacy": True,
                "sp_model_kwargs": {"a": 1},
                "use_default_system_prompt": True,
            },
        },
    )


_SPECIAL = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def _added(text: str) -> dict[str, Any]:
    return {"content": text, **_TOKEN, "special": True}


@cache
def _whole() -> dict[str, Any]:
    made = tiny.tokenizer("llama3", merges=(("T", "w"), ("Tw", "o"), ("a", "f")))
    whole: dict[str, Any] = json.loads(made.backend_tokenizer.to_str())
    begin = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text],
        "special_tokens": {
            "<|begin_of_text|>": {
                "id": "<|begin_of_text|>", "ids": [256 + 3], "tokens": ["<|begin_of_text|>"],
            }
        },
    }  # fmt: skip
    whole["normalizer"] = {"type": "NFC"}
    return whole


def _saved() -> tuple[dict[str, Any], str]:
    """Return the parts of a tokenizer.json but for its vocabulary, and a chat template."""
    parts = copy.deepcopy(_whole())
    for large in ("vocab", "merges"):
        del parts["model"][large]
    return parts, (tiny.TEMPLATES / "llama3.jinja").read_text(encoding="utf-8")


def changes(content: Any, dice: random.Random) -> Iterator[Change]:
    """Yield changes of what the files hold, but no further file."""
    for change in changes_of(content, dice):
        if len(change.path) > 1 or change.kind == "other":
            yield change


def says_what_is(change: Change, usual: Heard) -> bool:
    """Return whether a leaf only describes the files, or says what holds without it."""
    if len(change.path) != 2:
        return False
    if change.name == "eos_token_id" and isinstance(change.value, list):
        return True  # a list of the one id that it was
    return change.name in DESCRIBING or USUAL.get(change.name, change) == change.value


def names_whole(change: Change, text: str) -> bool:
    """Return whether a text names a part of a file, not used or at fault, that holds the leaf."""
    if len(change.path) == 1:
        return "chat template" in text
    file, *steps = map(str, change.path)
    lines = [line for line in text.splitlines() if file in line]
    listed = f"{steps[0]}[{steps[1]}]" if len(steps) > 1 else steps[0]
    return any(f"`{name}`" in line for name in (steps[0], listed) for line in lines)


def hear(content: Any, folder: Path) -> Heard:
    """Return what the files decide: ids of texts and conversations, and tokens with a meaning."""
    whole = _whole()
    own = {**whole, **content.get("tokenizer.json", {})}
    if isinstance(own["model"], dict):
        large = {name: whole["model"][name] for name in ("vocab", "merges")}
        own["model"] = {**own["model"], **large}
    for name, part in {**content, "tokenizer.json": own}.items():
        is_text = name.endswith(".jinja")
        (folder / name).write_text(str(part) if is_text else json.dumps(part), encoding="utf-8")
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    config = RunConfig(sections=(settings,))
    tokenizer = build_tokenizer(settings)
    with_special = build_tokenizer(
        TokenizerConfig(
            "HuggingFaceTokenizer", str(folder), tokenizer_hf_include_special_tokens=True
        )
    )
    chat = build_chat(tokenizer, settings, SftConfig(sft_on_unrendered="note"))
    samples = [
        tokenize_samples(
            chat.tokenizer, read_conversation(row, Place("rows", 1), chat.sft), chat.sft
        )
        for row in ROWS
    ]
    decided = (
        [_texts_of(one) for one in (tokenizer, with_special)],
        (tokenizer.eos, tokenizer.bos, tokenizer.pad, tokenizer.unk, tokenizer.vocab_size),
        tokenizer.start_ids(),
        samples,
        chat.tokenizer.pad_token_id,
        end_tokens(config, tokenizer),
        tokenizer.fast_source(),
    )
    return Heard(decided, "\n".join([*tokenizer.notes(), *generation_notes(config, tokenizer)]))


def _texts_of(tokenizer: Tokenizer) -> list[Any]:
    ids = [tokenizer.tokenize(text) for text in TEXTS]
    shown = [
        tokenizer.detokenize(one, skip_special_tokens=skip) for one in ids for skip in (False, True)
    ]
    return [ids, shown]
