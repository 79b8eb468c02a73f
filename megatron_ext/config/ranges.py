"""Ranges of numeric flags: declared beside the flag, checked before anything uses its value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

NumberT = TypeVar("NumberT", int, float)

LARGEST_INT = 2**31 - 1
LARGEST_LONG = 2**63 - 1
WORTH_SAYING = 1000
"""Upper ends up to here are told with the lower end; larger ones only keep nonsense out."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers; NaN and infinity lie in none.

    Attributes:
        low: the smallest number, or the one above which numbers begin.
        high: the largest number, or the one below which numbers end.
        above: `low` itself is left out.
        below: `high` itself is left out.
    """

    low: float
    high: float = LARGEST_INT
    above: bool = False
    below: bool = False

    def broken_rule(self, value: float) -> str | None:
        """Return the rule that a number breaks, such as "must be at least 1"; None if it fits."""
        small = value < self.low or (self.above and value == self.low)
        large = value > self.high or (self.below and value == self.high)
        finite = not isinstance(value, float) or math.isfinite(value)
        if finite and not small and not large:
            return None
        lower = f"{'above' if self.above else 'at least'} {_plain(self.low)}"
        upper = f"{'below' if self.below else 'at most'} {_plain(self.high)}"
        if self.high <= WORTH_SAYING:
            lower = upper = f"{lower} and {upper}"
        if not finite:
            return "must be a finite number" + (f", {lower}" if self.low > -self.high else "")
        return f"must be {lower if small else upper}"

    def integer(self, text: str) -> int:
        """Read an integer of this range from a word; a ``type`` of argparse."""
        return self._read(text, int, "an integer")

    def number(self, text: str) -> float:
        """Read a number of this range from a word; a ``type`` of argparse."""
        return self._read(text, float, "a number")

    def _read(self, text: str, kind: Callable[[str], NumberT], named: str) -> NumberT:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"({text}) must be {named}") from None
        rule = self.broken_rule(value)
        if rule is not None:
            raise argparse.ArgumentTypeError(f"({text}) {rule}")
        return value


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else f"{value:g}"


COUNT = Range(1)
NATURAL = Range(0)
LONG_COUNT = Range(1, LARGEST_LONG)
"""A number of samples."""
LONG_NATURAL = Range(0, LARGEST_LONG)
SIZE = Range(1, 10**6)
"""A width, a number of layers or experts, or a number of ranks that share them."""
PROCESSES = Range(1, 1024)
SHARE = Range(0, 1)
BELOW_ONE = Range(0, 1, below=True)
"""A probability that must not be certain, or the decay of an average."""
RATE = Range(0, WORTH_SAYING)
"""A learning rate; far larger ones overflow single precision within a few steps."""
WEIGHT = Range(0, 1e6)
"""The weight of a loss; gradients of far larger ones overflow single precision."""
FACTOR = Range(0, 1e6, above=True)
FINITE = Range(-1e6, 1e6)
NORM = Range(0, 1e30)
"""A limit of a norm, which may be as good as none."""
