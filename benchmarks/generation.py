#!/usr/bin/env python3
"""Measure generated tokens per second with a key-value cache, ours beside transformers'.

    python benchmarks/generation.py
    python benchmarks/generation.py --layers 8 --hidden-size 512 --batch-size 1 16 --new-tokens 64

Both write greedy continuations of the same prompts, of unequal length, with the same random Llama
weights, in one process with one thread; they take turns, and the median of ``--repeats`` counts.
Seconds are the process's CPU time, so that other programs on the machine do not matter. The texts
must be equal. ``--markdown FILE`` writes the table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.parser import parse_args
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.convert.huggingface import Import, import_model
from megatron_ext.text.generation.decode import Decoder, Request
from megatron_ext.text.generation.forward import PackedForward
from megatron_ext.text.generation.run import build_frozen_chunk
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.generation.tool import inference_task, model_defaults
from megatron_ext.text.tokenizers.base import NullTokenizer
from megatron_ext.train.forking import fork_ranks

VOCABULARY = 4096
Texts = list[tuple[int, ...]]


def prompts(count: int, longest: int) -> Texts:
    """Return prompts whose lengths are spread evenly up to ``longest``."""
    draw = torch.Generator().manual_seed(1)
    lengths = [max(1, longest * (i + 1) // count) for i in range(count)]
    return [tuple(torch.randint(VOCABULARY, (n,), generator=draw).tolist()) for n in lengths]


def make_model(flags: argparse.Namespace, folder: Path) -> Any:
    """Save a random Llama model, and return it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=flags.hidden_size,
        intermediate_size=flags.hidden_size * 11 // 4,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.hidden_size // 64,
        num_key_value_heads=max(1, flags.hidden_size // 64 // flags.heads_per_group),
        max_position_embeddings=flags.prompt_tokens + flags.new_tokens,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def theirs(model: Any, texts: Texts, new_tokens: int) -> Texts:
    """Return the tokens that transformers' `generate` adds."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return [tuple(row[longest:].tolist()) for row in out]


def our_decoder(root: Path, context: Any, batch_size: int) -> Decoder:
    """Load the imported model as tools/generate_text.py does."""
    words, task = ["--load", str(root)], inference_task()
    defaults, _ = model_defaults(words, task, "the benchmark")
    config = parse_args(words, task, world_size=1, device="cpu", defaults=defaults).config
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(build_frozen_chunk, config, transformer_config, context, VOCABULARY)
    wrapped = wrap_chunks(chunks, config, transformer_config, context, torch.device("cpu"))
    CheckpointManager(config.checkpoint, context).load(
        model=wrapped, optimizer=None, scheduler=None
    )
    forward = PackedForward(wrapped, transformer_config, config, context, torch.device("cpu"))
    return Decoder(forward, NullTokenizer(VOCABULARY), (), batch_size=batch_size)


def medians(work: Callable[[], Texts], other: Callable[[], Texts], repeats: int) -> list[float]:
    """Return the median CPU seconds of both; they take turns. Their texts must be equal."""
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        found = []
        for own, function in zip(times, (work, other), strict=True):
            began = time.process_time()
            found.append(function())
            own.append(time.process_time() - began)
        assert found[0] == found[1], "the texts differ"
    return [statistics.median(own) for own in times]


def measure(flags: argparse.Namespace) -> int:
    """Measure both, and print a table; return the exit code."""
    from megatron_ext.checkpoint.conversion import one_rank

    torch.set_num_threads(1)
    lines = [
        f"Llama of {flags.layers} layers, width {flags.hidden_size}, {flags.heads_per_group} heads "
        f"per group; prompts up to {flags.prompt_tokens} tokens, {flags.new_tokens} new tokens "
        f"each; fp32, one CPU thread, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; medians of {flags.repeats} alternating runs",
        "",
        "| batch | ours, tokens/s | transformers, tokens/s | ratio |",
        "|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(flags, Path(scratch) / "hf")
        import_model(Import(Path(scratch) / "hf", Path(scratch) / "ours"))
        with one_rank(1234) as context:
            for size in flags.batch_size:
                decoder = our_decoder(Path(scratch) / "ours", context, size)
                times = measure_batch(flags, decoder, model, size)
                ours, others = (size * flags.new_tokens / seconds for seconds in times)
                lines.append(f"| {size} | {ours:.1f} | {others:.1f} | {ours / others:.2f} |")
    print("\n".join(lines))
    if flags.markdown is not None:
        Path(flags.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def measure_batch(
    flags: argparse.Namespace, decoder: Decoder, model: Any, size: int
) -> list[float]:
    """Return the median CPU seconds in which we and transformers continue ``size`` prompts."""
    texts = prompts(size, flags.prompt_tokens)
    sampling = Sampling(max_new_tokens=flags.new_tokens)
    requests = [Request(i, text, sampling) for i, text in enumerate(texts)]

    def ours() -> Texts:
        return [found.ids for found in sorted(decoder.complete(requests), key=_number)]

    def others() -> Texts:
        with torch.no_grad():
            return theirs(model, texts, flags.new_tokens)

    return medians(ours, others, flags.repeats)


def _number(found: Any) -> int:
    return int(found.number)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the command line asks, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads-per-group", type=int, default=2)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", help="file for the table")
    flags = parser.parse_args(argv)
    return fork_ranks(lambda: measure(flags), 1)


if __name__ == "__main__":
    sys.exit(main())
