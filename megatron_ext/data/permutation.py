"""Keyed permutations of [0, n) in constant memory: the order of an epoch as a function.

A Feistel network permutes the integers of b bits, whatever its round function (Luby and Rackoff
1988). Here each round changes one half of the bits, left and right in turn, so that b may be odd.
The round function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), with another key in
each round. b is the least number of bits that hold n - 1. An image of n or more is permuted again
until it is below n ("cycle walking", Black and Rogaway 2002, method 2 of "Ciphers with Arbitrary
Finite Domains"), on average in less than two passes. Repeated permutation leads back to the index
itself, which is below n, so this ends, and is a bijection of [0, n). A network of a few bits would
favour some permutations, so up to n = 32 another method is used: each index gets a key, and its
image is the rank of its key among all n keys.

All functions work on arrays with a size and a key for each element, and give the same numbers on
every machine and in every release of numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS = 8
"""Rounds of the Feistel network; an even number, so that both halves are changed equally often."""
_RANKED = 32
"""The largest n for which [0, n) is permuted by ranks of keys instead of by a network."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The odd integer next to 2^64 divided by the golden ratio, SplitMix64's increment."""
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
"""`_FIRST` and `_SECOND` are the multipliers of SplitMix64's finalizer."""
_ONE = np.uint64(1)
LARGEST = 1 << 62
"""The largest n for which [0, n) can be permuted."""


def key_of(*parts: object) -> int:
    """Return a key of 64 bits: a hash of ``parts``, each as ``str`` shows it."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def mixed(values: Words) -> Words:
    """Return SplitMix64's finalizer of each word, a bijection with random-looking output bits."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    words: Words = values ^ (values >> np.uint64(31))
    return words


def derived(keys: Words, numbers: Ints, purpose: int = 0) -> Words:
    """Return a new key for each pair of a key and a number, element by element (broadcast).

    Different values of ``purpose`` give independent keys for the same pair.
    """
    words = numbers.astype(np.uint64) * _GOLDEN + np.uint64(purpose)
    return mixed(keys + mixed(words + _GOLDEN))


def permute(indices: Ints, sizes: Ints | int, keys: Words | int) -> Ints:
    """Return the image of each index under the permutation of [0, size) that its key selects.

    Args:
        indices: ``[m]``, each at least 0 and below its size.
        sizes: the size for each element, ``[m]``, or one for all; from 1 to `LARGEST`.
        keys: the key for each element, ``[m]``, or one for all.
    """
    return _walked(indices, sizes, keys, _ranks, _network)


def unpermute(images: Ints, sizes: Ints | int, keys: Words | int) -> Ints:
    """Return the indices whose images are ``images``: the inverse of `permute`."""
    return _walked(images, sizes, keys, _values_of_ranks, _inverse_network)


_Bijection = Callable[[Words, Words, Words], Words]


def _walked(
    values: Ints, sizes: Ints | int, keys: Words | int, small: _Bijection, network: _Bijection
) -> Ints:
    """Permute each value within [0, size), in one of two ways according to its size.

    Up to `_RANKED`, ``small`` permutes it. Above, ``network`` is applied until the value is below
    the size. If both functions are the inverse ones, this undoes the permutation.
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
    """Return the keys by which m permutations rank the integers below n, and a mask, ``[m, n]``.

    n is the largest of ``sizes``. Row i has a key for each integer, derived from ``keys[i]``; the
    mask is True for the integers below ``sizes[i]``.
    """
    all_values = np.arange(int(sizes.max()), dtype=np.int64)
    return derived(keys[:, None], all_values), all_values < sizes.astype(np.int64)[:, None]


def _ranks(values: Words, sizes: Words, keys: Words) -> Words:
    """Return the rank of each value's key among the keys of all values below its size."""
    weights, is_inside = _weights(sizes, keys)
    own = np.take_along_axis(weights, values.astype(np.int64)[:, None], axis=1)
    ranks: Words = ((weights < own) & is_inside).sum(axis=1).astype(np.uint64)
    return ranks


def _values_of_ranks(ranks: Words, sizes: Words, keys: Words) -> Words:
    """Return, for each of ``ranks``, the value that has this rank: the inverse of `_ranks`."""
    weights, is_inside = _weights(sizes, keys)
    order = np.lexsort((weights, ~is_inside), axis=1)
    values = np.take_along_axis(order, ranks.astype(np.int64)[:, None], axis=1)[:, 0]
    return values.astype(np.uint64)


def _halves(values: Words, sizes: Words) -> tuple[Words, Words, Words, Words, Words]:
    """Split words of b bits into halves, where b is the number of bits of ``sizes - 1``.

    Return both halves, their masks, and the number of bits of the right half.
    """
    bits = _bit_lengths(sizes - _ONE)
    low = bits >> _ONE
    low_mask = (_ONE << low) - _ONE
    high_mask = (_ONE << (bits - low)) - _ONE
    return values >> low, values & low_mask, high_mask, low_mask, low


def _network(values: Words, sizes: Words, keys: Words) -> Words:
    """Permute words of b bits with keys, where b is the number of bits of ``sizes - 1``."""
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
    """Invert `_network`: apply its rounds in reverse order."""
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
    # frexp is exact for halves of 32 bits; converting the whole word to a float would round it.
    high = (values >> np.uint64(32)).astype(np.float64)
    low = (values & np.uint64(0xFFFFFFFF)).astype(np.float64)
    lengths = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    words: Words = lengths.astype(np.uint64)
    return words
