"""Tiny byte-level tokenizers with the templates of public model families.

Each byte is a token, but for a few merges and the special tokens of the family, so that a text is
its tokens and a mask can be shown in the text.
"""

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_ext.text.sft.masks import TokenizedConversation
from megatron_ext.text.tokenizers.base import require_package

TEMPLATES = Path(__file__).parent / "templates"

_CHATML = ["<|im_start|>", "<|im_end|>"]
_SPECIAL: dict[str, tuple[str, str, list[str]]] = {  # bos, eos, further special tokens
    "chatml": ("", "<|im_end|>", _CHATML),
    "chatml_generation": ("", "<|im_end|>", _CHATML),
    "hermes": ("", "<|im_end|>", [*_CHATML, "<tool_call>", "</tool_call>"]),
    "qwen3": ("", "<|im_end|>", [*_CHATML, "<think>", "</think>"]),
    "llama2": ("<s>", "</s>", []),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": ("<s>", "</s>", []),
    "mistral_system_last": ("<s>", "</s>", ["[INST]", "[/INST]"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "phi3": ("<s>", "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
    "deepseek": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ["<｜User｜>", "<｜Assistant｜>"],
    ),
    "zephyr": ("<s>", "</s>", []),
}


def tokenizer(
    family: str,
    *,
    template: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
    drop: str | None = None,
) -> Any:
    """Return a family's tokenizer; pad is eos, as many users set it; ``drop`` gets no tokens."""
    tokenizers = require_package("tokenizers", "this test")
    transformers = require_package("transformers", "this test")
    bos, eos, more = _SPECIAL[family]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges)))
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [tokenizers.pre_tokenizers.Split(drop, "removed")] if drop else []
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([text for text in [bos, eos, *more] if text])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos or None, eos_token=eos, pad_token=eos,
        chat_template=template or (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
    )  # fmt: skip


def save(folder: Path, family: str = "chatml") -> Path:
    tokenizer(family).save_pretrained(str(folder))
    return folder


def chats(count: int, *, turns: int = 3, words: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of messages, of unlike lengths; each begins with its number."""
    dice = random.Random(seed)

    def text() -> str:
        return " ".join(dice.choices(["ab", "cde", "f", "ghij"], k=dice.randint(1, words)))

    rows = []
    for number in range(count):
        messages = []
        for _ in range(dice.randint(1, turns)):
            messages.append({"role": "user", "content": f"{number} {text()}"})
            messages.append({"role": "assistant", "content": text()})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shown(tokenizer: Any, tokenized: TokenizedConversation) -> str:
    """Return the text, with what is trained between [[ and ]]."""
    pieces = []
    for trained, group in groupby(zip(*tokenized, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        pieces.append(f"[[{text}]]" if trained else text)
    return "".join(pieces)
