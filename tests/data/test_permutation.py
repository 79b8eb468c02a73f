"""Keyed permutations: bijections of any size, as random as numpy's, the same for ever."""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.data.permutation import Ints, derived, key_of, permute, unpermute

EDGES = [1, 2, 3, 31, 32, 33, 34]
POWERS = [2**k + d for k in range(6, 18) for d in (-1, 0, 1)]
PRIMES = [61, 127, 257, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 99991]
SIZES = sorted({*EDGES, *POWERS, *PRIMES, *np.random.default_rng(0).integers(35, 60_000, 150)})


def test_every_size_is_permuted() -> None:
    assert len(SIZES) >= 200
    for size in SIZES:
        images = permute(np.arange(size), int(size), key_of("size", size))
        assert (np.bincount(images, minlength=size) == 1).all() and len(images) == size, size


@pytest.mark.parametrize("size", [2**32 + 15, 2**33 - 9, 10**12 + 39, 2**53 + 1, 2**62])
def test_samples_of_large_sizes_have_different_images_inside(size: int) -> None:
    """Distinct and in range; a collision of two in a random function would be seen in 10^5."""
    chosen = np.unique(np.random.default_rng(1).integers(0, size, 100_000))
    images = permute(chosen, size, 7)
    assert images.min() >= 0 and images.max() < size
    assert len(np.unique(images)) == len(chosen)


def test_the_inverse_finds_every_index_again() -> None:
    for size in [*SIZES[::7], 2**32 + 15, 10**12 + 39, 2**62]:
        indices = np.unique(np.random.default_rng(6).integers(0, int(size), 300))
        key = key_of("inverse", size)
        assert (unpermute(permute(indices, int(size), key), int(size), key) == indices).all(), size
        assert (permute(unpermute(indices, int(size), key), int(size), key) == indices).all(), size


def test_elements_of_one_call_have_sizes_and_keys_of_their_own() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 5000, 300)
    indices = rng.integers(0, sizes)
    keys = derived(np.full(300, 5, np.uint64), np.arange(300))
    together = permute(indices, sizes, keys)
    alone = [
        int(permute(np.array([i]), int(n), int(k))[0])
        for i, n, k in zip(indices, sizes, keys, strict=True)
    ]
    assert together.tolist() == alone
    assert unpermute(together, sizes, keys).tolist() == indices.tolist()


MASK = 2**64 - 1


def _mixed(value: int) -> int:
    """Return SplitMix64's finalizer in plain integers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def _walked(index: int, size: int, key: int) -> int:
    """Return an image by a Feistel network of eight rounds in plain integers."""
    bits = (size - 1).bit_length()
    low, high = bits // 2, bits - bits // 2
    while True:
        left, right, own = index >> low, index & 2**low - 1, key
        for number in range(8):
            own = own + 0x9E3779B97F4A7C15 & MASK
            if number % 2 == 0:
                left ^= _mixed(right + _mixed(own) & MASK) & 2**high - 1
            else:
                right ^= _mixed(left + _mixed(own) & MASK) & 2**low - 1
        index = left << low | right
        if index < size:
            return index


@pytest.mark.parametrize("size", [33, 1000, 65_536, 10**9 + 7, 2**62])
def test_images_are_those_of_a_network_in_plain_integers(size: int) -> None:
    """An order that is saved today is found again by every later version."""
    indices = np.random.default_rng(4).integers(0, size, 40)
    wanted = [_walked(int(index), size, 42) for index in indices]
    assert permute(indices, size, 42).tolist() == wanted


@pytest.mark.parametrize("size", [1, 5, 32])
def test_images_of_small_sizes_are_ranks_of_keys(size: int) -> None:
    """Up to 32 indices are ordered by their own keys, in every version."""
    own = derived(np.full(size, 42, np.uint64), np.arange(size)).tolist()
    wanted = [sorted(own).index(key) for key in own]
    assert permute(np.arange(size), size, 42).tolist() == wanted


def test_small_permutations_are_equally_frequent() -> None:
    keys = derived(np.full(24_000, 9, np.uint64), np.arange(24_000))
    columns = [permute(np.full(24_000, i), 4, keys) for i in range(4)]
    found = Counter(zip(*(column.tolist() for column in columns), strict=True))
    assert set(found) == set(itertools.permutations(range(4)))
    expected = 1000
    # The 99.99% quantile of chi-squared with 23 degrees of freedom.
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 58.6


def _pairs(order: Ints) -> float:
    """Return chi-squared of successive images in 16 x 16 cells, standardized."""
    cells = order * 16 // len(order)
    counts = np.bincount(cells[:-1] * 16 + cells[1:], minlength=256)
    expected = (len(order) - 1) / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / np.sqrt(510))


def _runs(order: Ints) -> float:
    """Return the standardized number of ascending and descending runs (Knuth 3.3.2 G)."""
    n, signs = len(order), np.diff(order) > 0
    runs = 1 + int((signs[1:] != signs[:-1]).sum())
    return float((runs - (2 * n - 1) / 3) / np.sqrt((16 * n - 29) / 90))


def _spectral(order: Ints) -> float:
    """Return the largest power of a frequency, in units of its mean, minus log of the number."""
    power = np.abs(np.fft.rfft(order - order.mean())[1:-1]) ** 2
    return float(power.max() / power.mean() - np.log(len(power)))


def _serial(order: Ints) -> float:
    """Return the correlation of neighbours, standardized."""
    return float(np.corrcoef(order[:-1], order[1:])[0, 1] * np.sqrt(len(order)))


@pytest.mark.parametrize("measure", [_pairs, _runs, _spectral, _serial])
def test_statistics_are_those_of_numpys_permutations(measure: Callable[[Ints], float]) -> None:
    """Two hundred of each, compared by their means and spreads, and by the largest."""
    size, number = 20_011, 200
    ours = [measure(permute(np.arange(size), size, key_of("s", i))) for i in range(number)]
    rng = np.random.default_rng(3)
    theirs = [measure(rng.permutation(size)) for _ in range(number)]
    error = np.std(theirs) * np.sqrt(2 / number)
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error
    assert 0.75 < np.std(ours) / np.std(theirs) < 1.33
    assert max(ours) < np.mean(theirs) + 6 * np.std(theirs) + 4


def test_neighbouring_epochs_share_nothing() -> None:
    """Permutations under successive keys agree in as many places as random ones: about one."""
    size = 5003
    keys = derived(np.full(100, 1, np.uint64), np.arange(100))
    orders = [permute(np.arange(size), size, int(key)) for key in keys]
    equal = [int((a == b).sum()) for a, b in itertools.pairwise(orders)]
    assert 0.5 < np.mean(equal) < 1.6 and max(equal) < 10


def test_keys_are_those_of_earlier_versions() -> None:
    assert key_of("fim", 1234, "train") == 16132112186157090788
    assert len({key_of("a", "b c"), key_of("a b", "c"), key_of("a b c"), key_of("ab", " c")}) == 4
    for key, number, purpose in ((5, 0, 3), (5, 7, 3), (5, 7, 0), (2**64 - 1, 10**12, 1)):
        word = number * 0x9E3779B97F4A7C15 + purpose & MASK
        wanted = _mixed(key + _mixed(word + 0x9E3779B97F4A7C15 & MASK) & MASK)
        found = derived(np.array([key], dtype=np.uint64), np.array([number]), purpose)
        assert found.tolist() == [wanted]
