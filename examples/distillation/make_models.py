"""Makes a tiny random teacher and a smaller student for a tokenizer, as Hugging Face folders."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SIZES = {"teacher": (96, 4), "student": (64, 2)}
"""Hidden size and number of layers of each model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("--output", required=True, type=Path, help="folder for both models")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    torch.manual_seed(1)
    for name, (hidden, layers) in SIZES.items():
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            # Large weights, so that the teacher's distributions are far from uniform.
            initializer_range=0.2 if name == "teacher" else 0.05,
        )
        LlamaForCausalLM(config).save_pretrained(args.output / name)
        tokenizer.save_pretrained(args.output / name)


if __name__ == "__main__":
    main()
