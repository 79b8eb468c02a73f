"""A tiny UMT5 with random weights, in the folders of a pipeline of diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WIDTH = 16
WORDS = "a red green square circle moves left right &".split()


def write_umt5(root: Path, *, tokenizer: str = "tokenizer") -> Path:
    """Write ``text_encoder`` and a folder of its tokenizer, which knows whole words.

    Returns:
        The folder of the weights.
    """
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    # White space counts as a word, as it may do to a sentencepiece model, unless it is one space.
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(root / tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = transformers.UMT5Config(
            vocab_size=len(vocabulary), d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        )
        transformers.UMT5EncoderModel(config).save_pretrained(root / "text_encoder")
    return root / "text_encoder"
