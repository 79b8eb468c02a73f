"""Makes a toy task without downloads: conversations about strings of digits, and a tokenizer.

A conversation has one to three turns, each with a string of five digits:

    user: add one to 40897      assistant: 51908   (each digit by itself; 9 becomes 0)
    user: reverse 40897         assistant: 79804

No string of the held-out file occurs in the others, so a model can answer only by the rule.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DIGITS = 5
TASKS = ("add one to", "reverse")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def answer(task: str, digits: str) -> str:
    """Return the assistant's answer."""
    if task == "reverse":
        return digits[::-1]
    return "".join(str((int(digit) + 1) % 10) for digit in digits)


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of words, spaces and single digits."""
    special = ["<|im_start|>", "<|im_end|>", "<|unknown|>"]
    words = ["user", "assistant", "add", "one", "to", "reverse", " ", *map(str, range(10))]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9]|[a-z]+| "), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def conversation(strings: list[str], choose: random.Random) -> dict[str, Any]:
    """Return a conversation with a turn for each string."""
    messages = []
    for digits in strings:
        task = choose.choice(TASKS)
        messages.append({"role": "user", "content": f"{task} {digits}"})
        messages.append({"role": "assistant", "content": answer(task, digits)})
    return {"messages": messages}


def write(path: Path, strings: list[str], choose: random.Random) -> None:
    """Write conversations of one to three turns until all strings are used."""
    with path.open("w", encoding="utf-8") as file:
        while strings:
            turns = choose.randint(1, 3)
            file.write(json.dumps(conversation(strings[:turns], choose)) + "\n")
            del strings[:turns]


def main() -> None:
    """Write train.jsonl, valid.jsonl, test.jsonl and tokenizer/ into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=12000, help="turns in the training file")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    choose = random.Random(1234)
    strings = [f"{i:0{DIGITS}d}" for i in choose.sample(range(10**DIGITS), args.turns + 600)]
    write(args.output / "test.jsonl", strings[:300], choose)
    write(args.output / "valid.jsonl", strings[300:600], choose)
    write(args.output / "train.jsonl", strings[600:], choose)
    tokenizer().save_pretrained(args.output / "tokenizer")


if __name__ == "__main__":
    main()
