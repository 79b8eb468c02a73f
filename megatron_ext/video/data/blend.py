"""The sets of clips that a run reads: the paths and weights of ``--video-data-path``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_ext.config.sections import blend_in_one_word
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Blend:
    """The sets of clips that a run reads, in order.

    Attributes:
        paths: the path of each set; each path occurs once.
        weights: the relative share of samples from each set; None if no weights are given.
        repeats: how many times ``--video-data-path`` names each set; 1 with weights.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None
    repeats: tuple[int, ...]

    @classmethod
    def once(cls, paths: Sequence[str]) -> Blend:
        """Return a blend in which each set is read once per epoch."""
        return cls(tuple(paths), None, (1,) * len(paths))

    def passes(self, sizes: Sequence[int]) -> list[Fraction]:
        """Return how many times an epoch reads each set; ``sizes`` has each set's number of clips.

        Without weights, a set is read as often as the flag names it. With weights, the set that is
        read least often is read exactly once, and sets of weight 0 are not read.
        """
        if self.weights is None:
            return [Fraction(count) for count in self.repeats]
        rates = [Fraction(weight) / size for weight, size in zip(self.weights, sizes, strict=True)]
        least = min(rate for rate in rates if rate)
        return [rate / least for rate in rates]


def blend_of(words: Sequence[str], flag: str = "--video-data-path") -> Blend:
    """Parse the words of ``flag``: paths or, as in Megatron-LM, a weight before each path.

    Paths may be repeated. ConfigError is raised for bad weights, and if only some paths have a
    weight.
    """
    if (error := blend_in_one_word(flag, words)) is not None:
        raise ConfigError(error)
    numbers = [_number(word) for word in words]
    if len(words) == 1 or not any(x is not None for x in numbers):
        paths = tuple(dict.fromkeys(words))
        return Blend(paths, None, tuple(words.count(path) for path in paths))
    given = " ".join(words)
    weights = numbers[::2]
    paths = tuple(dict.fromkeys(words[1::2]))
    mixed = None in weights or any(x is not None for x in numbers[1::2]) or len(words) % 2
    if mixed:
        raise ConfigError.about(
            flag,
            given,
            "mixes weights and paths",
            "give only paths, or a weight before each path",
        )
    sums = dict.fromkeys(paths, 0.0)
    for weight, path in zip(weights, words[1::2], strict=True):
        sums[path] += weight or 0.0
    if min(x or 0.0 for x in weights) < 0 or not 0 < sum(sums.values()) < math.inf:
        raise ConfigError.about(
            flag,
            given,
            f"has the weights {weights}, which must be finite, at least 0 and not all 0",
            "correct them",
        )
    return Blend(paths, tuple(sums.values()), (1,) * len(paths))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
