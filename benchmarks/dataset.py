#!/usr/bin/env python3
"""Time to the first sample, samples a second and memory: the direct order and megatron-core's.

Makes a dataset of many small documents in `--cache` (once), and as many documents again in 50
datasets. Then it measures, each in a process of its own with the files in the page cache:

- the time from nothing open to the first sample: megatron-core's GPTDataset with an empty index
  cache and again with a full one, and the direct order, which has none;
- samples a second of one process, sample by sample for GPTDataset, which has no other way, and
  batch by batch, collated, for the direct order;
- the memory that the order itself takes (allocations of Python and numpy, without the batches);
- the time in which the direct order of a mixture finds a sample far from the start, as each process
  of a resumed run does, where one more dataset has a ten-millionth of the samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHORTEST, LONGEST, VOCABULARY = 8, 57, 60_000
SOURCES = 50
_SEED = 20_261_126
_PIECE = 1 << 20


def make_dataset(prefix: Path, documents: int, seed: int) -> None:
    """Write documents of 8 to 56 random tokens."""
    from megatron_ext.data.indexed_writer import write_index

    if prefix.with_suffix(".idx").is_file():
        return
    rng = np.random.default_rng(seed)
    counts = [min(_PIECE, documents - at) for at in range(0, documents, _PIECE)]
    lengths = [rng.integers(SHORTEST, LONGEST, count, dtype=np.int32) for count in counts]
    with open(prefix.with_suffix(".bin"), "wb") as out:
        for piece in lengths:
            tokens = int(piece.sum())
            out.write(rng.integers(0, VOCABULARY, tokens, dtype=np.uint16).tobytes())
    ones = [np.ones(count, np.int32) for count in counts]
    temporary = prefix.with_suffix(".making")
    write_index(temporary, np.dtype(np.uint16), lambda: lengths, lambda: ones)
    os.replace(temporary, prefix.with_suffix(".idx"))


def warm(prefixes: list[str]) -> None:
    """Read all files once, so that both sides find them in the page cache."""
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            with open(prefix + suffix, "rb") as stream:
                while stream.read(1 << 24):
                    pass


# --------------------------------------------------------------------------- the two sides


def core_dataset(prefixes: list[str], seq_length: int, samples: int, cache: str) -> Any:
    """Return megatron-core's GPTDataset, or a blend of several with equal weights."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    weights = None if len(prefixes) == 1 else [1.0] * len(prefixes)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=(prefixes, weights),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def direct_dataset(prefixes: list[str], seq_length: int, samples: int) -> Any:
    """Return the same documents in the direct order."""
    from megatron_ext.data.order import SampleOrder, Stage
    from megatron_ext.data.token_spans import open_span
    from megatron_ext.text.data.direct import DirectDataset, Marks

    spans = [open_span(prefix, 0, None) for prefix in prefixes]
    tokens = {span.name: span.tokens for span in spans}
    stage = Stage(0, seq_length, {name: Fraction(1) for name in tokens})
    order = SampleOrder(tokens, [stage], seq_length, 1234)
    marks = Marks(VOCABULARY, -1, VOCABULARY + 1, eod_mask_loss=False, reset_position_ids=False)
    return DirectDataset(order, dict(enumerate(spans)), marks, samples)


def _tokenizer() -> Any:
    from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer

    kind = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY}
    return build_tokenizer(TokenizerConfig(**kind))  # type: ignore[arg-type]


def measure(side: str, prefixes: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one side; imports are not timed."""
    import torch

    from megatron_ext.text.data import direct, gpt  # noqa: F401

    torch.set_num_threads(1)
    _tokenizer()
    warm(prefixes)
    asked = args.documents // 20
    found: dict[str, float] = {}
    if side == "core":
        # A blend asks for its rank.
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        shutil.rmtree(args.cache / "indices", ignore_errors=True)
        for name in ("first sample, new indices (s)", "first sample, indices kept (s)"):
            started = time.perf_counter()
            dataset = core_dataset(prefixes, args.seq_length, asked, str(args.cache / "indices"))
            dataset[0]
            found[name] = time.perf_counter() - started
        own = args.samples // 5
        found["samples/s, one by one"] = _rate(1 for number in range(own) if dataset[number])
        return found
    started = time.perf_counter()
    dataset = direct_dataset(prefixes, args.seq_length, asked)
    dataset.batch(0, 1)
    found["first sample (s)"] = time.perf_counter() - started
    for batch in (1, 8, 64, 512):
        found[f"samples/s, batches of {batch}"] = max(
            _rate(_batches(dataset, batch, args.samples)) for _ in range(3)
        )
    tracemalloc.start()
    dataset = direct_dataset(prefixes, args.seq_length, asked)
    for at in range(0, args.samples, 512):
        dataset.order.locate(at, at + 512)
    found["memory of the order (MB)"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    if len(prefixes) > 1:
        found["sample 10^9 with a share of 1e-7 (s)"] = _resume(len(prefixes), args.seq_length)
    return found


def _resume(sources: int, seq_length: int) -> float:
    """Return the CPU seconds in which a new order finds sample 10^9; the longest of five places."""
    from megatron_ext.data.order import SampleOrder, Stage

    rng = np.random.default_rng(_SEED)
    weights = [Fraction(repr(float(x))) for x in rng.uniform(0.1, 1, sources)]
    weights.append(sum(weights, Fraction(0)) / 10**7)
    stage = Stage(0, seq_length, {str(i): weight for i, weight in enumerate(weights)})
    tokens = dict.fromkeys(stage.weights, 10**6)
    longest = 0.0
    for place in range(10**9, 10**9 + 10**7, 2 * 10**6):
        started = time.process_time()
        SampleOrder(tokens, [stage], seq_length, 1234).locate(place, place + 1)
        longest = max(longest, time.process_time() - started)
    return longest


def _batches(dataset: Any, batch: int, samples: int) -> Iterator[int]:
    for at in range(0, samples // max(1, 8 // batch), batch):
        yield len(dataset.batch(at, at + batch)["tokens"])


def _rate(counts: Iterator[int]) -> float:
    started = time.perf_counter()
    count = sum(counts)
    return count / (time.perf_counter() - started)


# --------------------------------------------------------------------------- the report


def report(name: str, core: dict[str, float], direct: dict[str, float]) -> list[str]:
    """Return lines of a Markdown table, and the two ratios."""
    lines = [f"### {name}", "", "| | megatron-core | direct |", "|---|---|---|"]
    for key in dict.fromkeys([*core, *direct]):
        cells = [f"{side[key]:,.4g}" if key in side else "" for side in (core, direct)]
        lines.append(f"| {key} | {cells[0]} | {cells[1]} |")
    first = core["first sample, new indices (s)"] / direct["first sample (s)"]
    rate = direct["samples/s, batches of 512"] / core["samples/s, one by one"]
    ratios = f"First sample {first:,.0f} times as early; {rate:.1f} times as many samples a second."
    return [*lines, "", ratios, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the datasets")
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--samples", type=int, default=100_000, help="samples that are timed")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("FIGURES " + json.dumps(measure(args.child[0], args.child[1:], args)))
        return 0
    args.cache.mkdir(parents=True, exist_ok=True)
    one = args.cache / f"one_{args.documents}"
    make_dataset(one, args.documents, _SEED)
    many = [args.cache / f"many_{args.documents}_{number}" for number in range(SOURCES)]
    for number, prefix in enumerate(many):
        make_dataset(prefix, args.documents // SOURCES, _SEED + 1 + number)
    for name, prefixes in (
        (f"{args.documents:,} documents, one dataset", [str(one)]),
        (f"{args.documents:,} documents, a mixture of {SOURCES} datasets", [*map(str, many)]),
    ):
        sides = [_child(side, prefixes, args) for side in ("core", "direct")]
        print("\n".join(report(name, *sides)), flush=True)
    return 0


def _child(side: str, prefixes: list[str], args: argparse.Namespace) -> dict[str, float]:
    own = [str(Path(__file__)), "--cache", str(args.cache), "--documents", str(args.documents)]
    own += ["--seq-length", str(args.seq_length), "--samples", str(args.samples)]
    done = subprocess.run(
        [sys.executable, *own, "--child", side, *prefixes],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(x for x in done.stdout.splitlines() if x.startswith("FIGURES "))
    return dict(json.loads(line.removeprefix("FIGURES ")))


if __name__ == "__main__":
    sys.exit(main())
