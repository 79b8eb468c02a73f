"""Keyed permutations of [0, n) in constant memory: the order of an epoch as a function.

A Feistel network permutes the integers of b bits for any round function (Luby and Rackoff 1988).
Here the two halves take turns, so that b may be odd, and the round function is the finalizer of
SplitMix64 (Steele, Lea and Flood 2014) under a key of its own for each round. Where n is no power
of two, b is the least that holds n, and an image of n or more is permuted again until it is below n
("cycle walking", Black and Rogaway 2002, method 2 of "Ciphers with Arbitrary Finite Domains"). The
orbit of an index returns to [0, n), so this is a bijection of [0, n), and it takes less than two
passes on average. A network of a few bits would favour some permutations, so up to n = 32 the image
of an index is the rank of its key among the keys of all n.

All functions work on arrays, each element with a size and a key of its own, and give the same
numbers on every machine and in every release of numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS = 8
_RANKED = 32
"""The largest n whose permutations rank keys."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
LARGEST = 1 << 62
"""The largest n."""


def key_of(*parts: object) -> int:
    """Return a key of 64 bits that is determined by the text of ``parts``."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def mixed(values: Words) -> Words:
    """Return SplitMix64's finalizer of each word: a bijection whose output bits look random."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    words: Words = values ^ (values >> np.uint64(31))
    return words


def derived(keys: Words, numbers: Ints, purpose: int = 0) -> Words:
    """Return a key for each pair of a key and a number; keys of another purpose are independent."""
    words = numbers.astype(np.uint64) * _GOLDEN + np.uint64(purpose)
    return mixed(keys + mixed(words + _GOLDEN))


def permute(indices: Ints, sizes: Ints | int, keys: Words | int) -> Ints:
    """Return the images of ``indices`` under the permutations of [0, size) that the keys choose.

    Args:
        indices: ``[m]``, each at least 0 and below its size.
        sizes: the size of each element, ``[m]``, or of all; from 1 to `LARGEST`.
        keys: the key of each element, ``[m]``, or of all.
    """
    return _walked(indices, sizes, keys, _ranks, _network)


def unpermute(images: Ints, sizes: Ints | int, keys: Words | int) -> Ints:
    """Return the indices whose images are ``images`` (see `permute`)."""
    return _walked(images, sizes, keys, _of_ranks, _inverse_network)


_Bijection = Callable[[Words, Words, Words], Words]


def _walked(
    values: Ints, sizes: Ints | int, keys: Words | int, small: _Bijection, network: _Bijection
) -> Ints:
    """Permute values by ``small`` up to size `_RANKED`, else by ``network`` until it is in range.

    The inverse of a network walks the same cycle backwards.
    """
    count = len(values)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.uint64), (count,))
    key = np.broadcast_to(np.asarray(keys, dtype=np.uint64), (count,))
    permuted = values.astype(np.uint64)
    ranked = np.flatnonzero(size <= np.uint64(_RANKED))
    if len(ranked):
        permuted[ranked] = small(permuted[ranked], size[ranked], key[ranked])
    walking = np.flatnonzero(size > np.uint64(_RANKED))
    while len(walking):
        all_walk = len(walking) == count
        own_size, own_key = (size, key) if all_walk else (size[walking], key[walking])
        images = network(permuted if all_walk else permuted[walking], own_size, own_key)
        permuted[walking] = images
        walking = walking[images >= own_size]
    return permuted.astype(np.int64)


def _weights(sizes: Words, keys: Words) -> tuple[Words, NDArray[np.bool_]]:
    """Return the keys of all values up to the largest size, and which lie below each size."""
    all_values = np.arange(int(sizes.max()), dtype=np.int64)
    return derived(keys[:, None], all_values), all_values < sizes.astype(np.int64)[:, None]


def _ranks(values: Words, sizes: Words, keys: Words) -> Words:
    """Return the rank of each value's key among the keys of all values below its size."""
    weights, is_inside = _weights(sizes, keys)
    own = np.take_along_axis(weights, values.astype(np.int64)[:, None], axis=1)
    ranks: Words = ((weights < own) & is_inside).sum(axis=1).astype(np.uint64)
    return ranks


def _of_ranks(ranks: Words, sizes: Words, keys: Words) -> Words:
    """Return the value whose key has a rank among the keys of all values below its size."""
    weights, is_inside = _weights(sizes, keys)
    order = np.lexsort((weights, ~is_inside), axis=1)
    values = np.take_along_axis(order, ranks.astype(np.int64)[:, None], axis=1)[:, 0]
    return values.astype(np.uint64)


def _halves(values: Words, sizes: Words) -> tuple[Words, Words, Words, Words, Words]:
    """Cut words of b bits, where b is the number of bits of ``sizes - 1``.

    Return both halves, the masks of both, and the number of bits of the right one.
    """
    bits = _bit_lengths(sizes - _ONE)
    low = bits >> _ONE
    low_mask = (_ONE << low) - _ONE
    high_mask = (_ONE << (bits - low)) - _ONE
    return values >> low, values & low_mask, high_mask, low_mask, low


def _network(values: Words, sizes: Words, keys: Words) -> Words:
    """Permute words of b bits, where b is the number of bits of ``sizes - 1``."""
    left, right, high_mask, low_mask, low = _halves(values, sizes)
    round_keys = keys
    for _ in range(_ROUNDS // 2):
        round_keys = round_keys + _GOLDEN
        left = left ^ (mixed(right + mixed(round_keys)) & high_mask)
        round_keys = round_keys + _GOLDEN
        right = right ^ (mixed(left + mixed(round_keys)) & low_mask)
    joined: Words = (left << low) | right
    return joined


def _inverse_network(values: Words, sizes: Words, keys: Words) -> Words:
    """Return the words that `_network` permutes to ``values``: its rounds, the last one first."""
    left, right, high_mask, low_mask, low = _halves(values, sizes)
    round_keys = keys + np.uint64(_ROUNDS * int(_GOLDEN) % 2**64)
    for _ in range(_ROUNDS // 2):
        right = right ^ (mixed(left + mixed(round_keys)) & low_mask)
        round_keys = round_keys - _GOLDEN
        left = left ^ (mixed(right + mixed(round_keys)) & high_mask)
        round_keys = round_keys - _GOLDEN
    joined: Words = (left << low) | right
    return joined


def _bit_lengths(values: Words) -> Words:
    """Return the number of bits of each word, exact up to 2**62."""
    # frexp is exact on halves of 32 bits, where a conversion of the whole word would round.
    high = (values >> np.uint64(32)).astype(np.float64)
    low = (values & np.uint64(0xFFFFFFFF)).astype(np.float64)
    lengths = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    words: Words = lengths.astype(np.uint64)
    return words
