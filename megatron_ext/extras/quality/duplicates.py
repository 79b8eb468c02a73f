"""Exact and near duplicates among documents.

Exact duplicates have the same 128-bit BLAKE2 digest. Near duplicates are found by MinHash with
locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman, "Mining of Massive
Datasets", chapter 3). A document is the set of its shingles: all sequences of `SHINGLE` consecutive
tokens. Two documents with Jaccard similarity s share at least one of b bands of r MinHashes with
probability 1 - (1 - s^r)^b. Each pair that shares a band is then compared shingle by shingle. So
every reported pair really is a near duplicate, and only pairs near the threshold may be missed.

A group is named by its leader, the first of its documents.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import Ints, Words, mixed
from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality.documents import Block, Documents

SHINGLE = 5
"""Tokens of a shingle. Shorter documents have no near duplicates."""
MAX_TOKENS = 1 << 20
"""Number of a document's tokens that are compared for near duplicates; the rest is ignored."""
_HASHES = 128
"""MinHashes of a document, which are divided into bands."""
_CACHED = 1 << 26
"""Number of shingles (8 bytes each) that are cached while pairs are compared."""
_WANTED = 0.99
"""Smallest acceptable probability that a pair at the threshold shares a band."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Digests:
    """The digests of documents, 16 bytes each."""

    def __init__(self, count: int, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._digests = np.zeros((count, 2), dtype=np.uint64)

    def add(self, block: Block) -> None:
        """Add the digests of a block's documents."""
        size = self._dtype.itemsize
        edges = block.edges.tolist()
        text = np.ascontiguousarray(block.tokens, dtype=self._dtype).view(np.uint8).data
        digests = b"".join(
            blake2b(text[size * edges[i] : size * edges[i + 1]], digest_size=16).digest()
            for i in range(len(edges) - 1)
        )
        rows = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
        self._digests[block.first : block.first + len(rows)] = rows

    def leaders(self, lengths: Ints) -> Ints:
        """Return, for each document, the position of the first document with the same tokens.

        The result is ``[documents]``. An empty document is no duplicate and gets its own position.
        """
        order = np.lexsort((self._digests[:, 1], self._digests[:, 0]))
        own = self._digests[order]
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = (own[1:] != own[:-1]).any(axis=1)
        firsts = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
        leaders = np.empty(len(order), dtype=np.int64)
        leaders[order] = order[firsts]
        return np.where(lengths > 0, leaders, np.arange(len(order)))


def bands_for(threshold: float) -> tuple[int, int]:
    """Return numbers of bands and of MinHashes per band that find 99% of pairs at ``threshold``."""
    rows = [r for r in range(1, _HASHES + 1) if shared(threshold, _HASHES // r, r) >= _WANTED]
    best = max(rows, default=1)
    return _HASHES // best, best


def shared(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents with this Jaccard similarity share a band.

    There are ``bands`` bands of ``rows`` MinHashes each.
    """
    return float(1 - (1 - similarity**rows) ** bands)


def shingles(tokens: Array, edges: Ints) -> tuple[Words, Ints]:
    """Hash the shingles of documents that have at least `SHINGLE` tokens.

    Args:
        tokens: the documents one after another, ``[t]``.
        edges: where each document begins, and the end of the last one, ``[d + 1]``.

    Returns:
        The hashes of all shingles, and where those of each document begin and end, ``[d + 1]``.
    """
    words = tokens.astype(np.int64).view(np.uint64)
    count = len(words) - SHINGLE + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE):
        hashes = mixed(hashes) * _MULTIPLIER + words[offset : offset + count]
    is_whole = np.ones(len(words), dtype=np.bool_)
    is_whole[edges[1:, None] - np.arange(1, SHINGLE)] = False
    starts: Ints = edges - (SHINGLE - 1) * np.arange(len(edges))
    return mixed(hashes[is_whole[:count]]), starts


def near_leaders(documents: Documents, candidates: Ints, threshold: float, seed: int) -> Ints:
    """Return, for each candidate, the index of the first candidate in its group, ``[candidates]``.

    Two documents are in the same group if a chain of near duplicates connects them.

    Args:
        candidates: positions of documents with at least `SHINGLE` tokens, in ascending order,
            without exact duplicates.
        threshold: the least Jaccard similarity of two near duplicates.
        seed: seed of the MinHashes.
    """
    rensa = require_rensa()
    bands, rows = bands_for(threshold)
    count = len(candidates)
    if count < 2:
        return np.arange(count)
    # Only one band is sorted at a time, so the others wait in a file.
    with TemporaryFile() as file:
        keys = np.memmap(file, dtype=np.uint64, mode="w+", shape=(bands, count))
        for block in documents.blocks("Hashing shingles", candidates):
            edges = np.minimum(block.edges, MAX_TOKENS) if len(block.edges) == 2 else block.edges
            hashes, starts = shingles(block.tokens[: edges[-1]], edges)
            matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
                hashes, starts.astype(np.uint64), bands * rows, seed
            )
            signatures = np.array(matrix.to_rows(), dtype=np.uint64).reshape(-1, bands, rows)
            folded = np.zeros(signatures.shape[:2], dtype=np.uint64)
            for row in range(rows):
                folded = mixed(folded * _MULTIPLIER + signatures[:, :, row])
            keys[:, block.first : block.first + len(folded)] = folded.T
        return _grouped(documents, candidates, keys, threshold)


def require_rensa() -> Any:
    """Import the MinHash library; raise a ConfigError if it is not installed."""
    try:
        import rensa
    except ImportError:
        raise ConfigError(
            "`--near-duplicates` needs the package rensa, which is not installed; run "
            "`pip install rensa`, or leave the flag out."
        ) from None
    return rensa


def _grouped(documents: Documents, candidates: Ints, keys: Words, threshold: float) -> Ints:
    """Group candidates that share a band and are near duplicates.

    ``keys`` has the hash of each band of each candidate, ``[bands, candidates]``. Return the index
    of the first candidate in each candidate's group, ``[candidates]``.
    """
    count = len(candidates)
    leaders = np.arange(count)
    refused = np.zeros(0, dtype=np.int64)

    longest = min(int(documents.lengths()[candidates].max()), MAX_TOKENS)

    @lru_cache(maxsize=max(2, min(4096, _CACHED // longest)))
    def shingle_set(place: int) -> Words:
        tokens = documents.read(int(candidates[place]), MAX_TOKENS)
        return np.unique(shingles(tokens, np.array([0, len(tokens)]))[0])

    joined = [np.zeros(0, dtype=np.int64)]
    for band in tqdm(keys, desc="Comparing pairs", delay=1.0, leave=False, disable=None):
        pairs = np.setdiff1d(_pairs(band), refused, assume_unique=True)
        pairs = pairs[leaders[pairs // count] != leaders[pairs % count]]
        is_near = np.array(
            [
                jaccard(shingle_set(pair // count), shingle_set(pair % count)) >= threshold
                for pair in pairs.tolist()
            ],
            dtype=np.bool_,
        )
        refused = np.union1d(refused, pairs[~is_near])
        joined.append(pairs[is_near])
        edges = np.concatenate(joined)
        leaders = components(count, edges // count, edges % count)
    return leaders


def _pairs(band: Words) -> Ints:
    """Return pairs of documents with equal keys; the pair (i, j) of n documents is i * n + j.

    ``band`` has the documents' keys in one band, ``[n]``. Each document is paired only with the
    first and with the previous document that have its key: all pairs if up to three share a key.
    """
    order = np.argsort(band, kind="stable")
    own = band[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = own[1:] != own[:-1]
    firsts = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    later = np.flatnonzero(~is_new)
    to_first = order[firsts[later]] * len(order) + order[later]
    to_previous = order[later - 1] * len(order) + order[later]
    return np.unique(np.concatenate([to_first, to_previous]))


def jaccard(one: Words, other: Words) -> float:
    """Return the Jaccard similarity of two sets, given as arrays without repetitions."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)


def components(count: int, left: Ints, right: Ints) -> Ints:
    """Return, for each node of a graph, the lowest node in its connected component, ``[count]``."""
    labels = np.arange(count)
    while (labels[left] != labels[right]).any():
        low = np.minimum(labels[left], labels[right])
        # Lowering the label's label as well lets long chains finish in few rounds.
        for nodes in (left, right):
            np.minimum.at(labels, labels[nodes], low)
            np.minimum.at(labels, nodes, low)
        labels = labels[labels]
    return labels
