"""Asks a fine-tuned model held-out questions, and counts the answers that are exactly right.

Every assistant turn in the file is a question: the messages before it are the prompt, and the
model's greedy answer, up to its end-of-turn token, is compared with the turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def questions(path: Path) -> list[tuple[list[dict[str, Any]], str]]:
    """Return (prompt as messages, expected answer) of each question in a file."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                pairs.append((messages[:i], message["content"]))
    return pairs


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: list[list[dict[str, Any]]]) -> list[str]:
    """Answer prompts greedily; batch prompts of equal length, so that none needs padding."""
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True) for p in prompts]
    ids = [list(one["input_ids"]) if hasattr(one, "keys") else list(one) for one in ids]
    texts = [""] * len(ids)
    for length in sorted({len(one) for one in ids}):
        members = [i for i, one in enumerate(ids) if len(one) == length]
        batch = torch.tensor([ids[i] for i in members])
        output = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        for i, row in zip(members, output[:, length:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            texts[i] = tokenizer.decode(row[:end])
    return texts


def main() -> int:
    """Print the share of exact answers; return exit code 1 if it is below the required share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder of Hugging Face's format")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--required", type=float, default=0.0, help="share of exact answers")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    pairs = questions(args.questions)
    given = answers(model, tokenizer, [prompt for prompt, _ in pairs])
    right = [answer == wanted for answer, (_, wanted) in zip(given, pairs, strict=True)]
    for (prompt, wanted), answer in list(zip(pairs, given, strict=True))[:5]:
        print(f"{prompt[-1]['content']!r}: {answer!r} (wanted {wanted!r})")
    share = sum(right) / len(right)
    print(f"held-out exact match: {share:.1%} ({sum(right)} of {len(right)})")
    return 0 if share >= args.required else 1


if __name__ == "__main__":
    sys.exit(main())
