"""Targets of the GPU benchmarks, and the verdict on a measurement.

The targets are for one H200 at the sizes that the scripts take by default. On a CPU, and with
``--tiny``, nothing is judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A limit of a ratio.

    Attributes:
        name: G1 to G5 as docs/gpu.md counts them, and the subject.
        limit: the ratio that must be reached, or must not be exceeded.
        at_least: the limit must be reached.
    """

    name: str
    limit: float
    at_least: bool

    def holds(self, ratio: float) -> bool:
        """Return whether a ratio keeps to the limit."""
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def verdict(self, ratio: float) -> str:
        """Return the verdict in words, with both numbers."""
        holds = self.holds(ratio)
        sign = ("≥" if holds else "<") if self.at_least else ("≤" if holds else ">")
        return f"{self.name} {'met' if holds else 'MISSED'}: {ratio:.3f} {sign} {self.limit:g}"


MFU = Target("G1 MFU", 0.60, at_least=True)
OVER_PEERS = Target("G1 over the best peer", 1.10, at_least=True)
FP8_OVER_BF16 = Target("G2 fp8 over bf16", 1.30, at_least=True)
LOSS_MEMORY = Target("G3 memory", 0.15, at_least=False)
LOSS_TIME = Target("G3 time", 0.85, at_least=False)
LOSS_TIME_OF_OTHERS = Target("G3 time over Liger and torch.compile", 1.0, at_least=False)
ATTENTION = Target("G4 time over the fastest backend", 1.05, at_least=False)
VIDEO_MFU = Target("G5 MFU", 0.55, at_least=True)


def over(part: float, whole: float) -> float | None:
    """Return a ratio; None where there is nothing to divide by."""
    return part / whole if whole > 0 else None


def verdict(args: argparse.Namespace, found: Sequence[tuple[Target, float | None]]) -> str:
    """Return the last cell of a row.

    Args:
        args: with ``device`` and ``tiny``.
        found: targets and their ratios, None where there is nothing to compare with.
    """
    if not found:
        return "no target"
    if args.device == "cpu" or args.tiny:
        return f"not judged: {'cpu' if args.device == 'cpu' else 'tiny'}"
    return "; ".join(
        f"{target.name} not judged: nothing to compare with"
        if ratio is None
        else target.verdict(ratio)
        for target, ratio in found
    )
