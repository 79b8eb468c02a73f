#!/usr/bin/env python3
"""Documents that best-fit packing cuts, its speed, and the time to the first sample.

Makes a dataset of documents of log-normal lengths in `--cache` (once), and reads it in the direct
order at each `--seq-lengths`, with and without packing, by one process with the files in the page
cache. Counts are taken over whole samples: the share of positions that hold text, and the documents
that lie in several samples. A document longer than a sample has to.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VOCABULARY = 60_000
_SEED = 20_261_126


def make_dataset(prefix: Path, documents: int, median: float, sigma: float) -> None:
    """Write documents of random tokens whose lengths are log-normal."""
    from megatron_ext.data.indexed_writer import write_index

    if prefix.with_suffix(".idx").is_file():
        return
    rng = np.random.default_rng(_SEED)
    lengths = np.maximum(2, rng.lognormal(np.log(median), sigma, documents)).astype(np.int32)
    piece = rng.integers(0, VOCABULARY, 1 << 22, dtype=np.uint16)
    left = int(lengths.sum(dtype=np.int64))
    with open(prefix.with_suffix(".bin"), "wb") as out:
        while left:
            left -= out.write(piece[:left].tobytes()) // 2
    temporary = prefix.with_suffix(".making")
    write_index(temporary, np.dtype(np.uint16), lambda: [lengths], lambda: [np.ones_like(lengths)])
    os.replace(temporary, prefix.with_suffix(".idx"))


def opened(prefix: str, length: int, *, packed: bool) -> Any:
    """Return the dataset in the direct order."""
    from megatron_ext.data.indexed import read_index
    from megatron_ext.data.order import SampleOrder, Stage
    from megatron_ext.data.packed_order import PackedOrder
    from megatron_ext.data.packing import IndexedDocuments
    from megatron_ext.data.token_spans import open_span
    from megatron_ext.text.data.direct import DirectDataset, Marks

    span = open_span(prefix, 0, None)
    stages, sizes = [Stage(0, length, {prefix: Fraction(1)})], {prefix: span.tokens}
    order = SampleOrder(sizes, stages, length, 1234)
    if packed:
        documents = {prefix: IndexedDocuments(partial(read_index, prefix), span.first)}
        order = PackedOrder(sizes, stages, length, 1234, documents)
    marks = Marks(VOCABULARY, -1, VOCABULARY + 1, eod_mask_loss=False, reset_position_ids=False)
    return DirectDataset(order, {0: span}, marks, 1 << 40)


def measured(prefix: str, length: int, samples: int, *, packed: bool) -> dict[str, float]:
    """Return the time to the first micro-batch and the rate of reading."""
    started = time.perf_counter()
    dataset = opened(prefix, length, packed=packed)
    dataset.batch(0, 1)
    first = time.perf_counter() - started
    dataset.batch(0, 8)
    eight = time.perf_counter() - started
    started = time.perf_counter()
    for at in range(8, 8 + samples, 512):
        dataset.batch(at, at + 512)
    rate = samples / (time.perf_counter() - started)
    return {"first sample (ms)": 1e3 * first, "first 8 (ms)": 1e3 * eight, "samples/s": rate}


def counted(prefix: str, length: int, samples: int) -> dict[str, float]:
    """Return how full packed samples are, and how many documents are cut in both ways."""
    order = opened(prefix, length, packed=True).order
    pieces = order.locate(0, samples)
    cuts = order.cuts(0, 16)
    return {
        "positions with text": int(pieces.lengths.sum()) / (samples * length),
        "documents cut, concatenated": cuts.concatenated / cuts.documents,
        "documents cut, packed": cuts.packed / cuts.documents,
        "documents longer than a sample": cuts.longer / cuts.documents,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the dataset")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--median", type=float, default=400, help="tokens of the median document")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of lengths")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--samples", type=int, default=16_384, help="samples that are timed")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    prefix = args.cache / f"lognormal_{args.documents}_{args.median:.0f}_{100 * args.sigma:.0f}"
    make_dataset(prefix, args.documents, args.median, args.sigma)
    opened(str(prefix), 512, packed=True).batch(0, 1)  # imports and files are not timed
    print(f"{args.documents:,} documents, load {os.getloadavg()[0]:.1f}")
    for length in args.seq_lengths:
        print(f"\n### {length} tokens\n\n| | concatenated | packed |\n|---|---|---|")
        plain, packed = (
            measured(str(prefix), length, args.samples, packed=each) for each in (False, True)
        )
        for name in plain:
            print(f"| {name} | {plain[name]:,.1f} | {packed[name]:,.1f} |")
        for name, value in counted(str(prefix), length, args.samples).items():
            print(f"{name}: {value:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
