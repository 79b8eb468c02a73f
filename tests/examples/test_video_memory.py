"""The memory that benchmarks/video_memory.py measures agrees with the formula that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.video_memory import KINDS, measure, row
from tests.examples.latents import make_latents

PADDING = 2e-3
"""Share of padding at the tiny size, whose parameters are small beside 64 elements."""


def test_bytes_of_a_rank_follow_the_formula(tmp_path: Path) -> None:
    latents = make_latents(tmp_path)
    one, two = (measure("tiny", "bf16", replicas, latents) for replicas in (1, 2))
    count = one["count"]
    expected = {1: (2, 4, 12, 4), 2: (2, 4, 6, 2)}
    for replicas, found in ((1, one), (2, two)):
        for kind, per_parameter in zip(KINDS, expected[replicas], strict=True):
            assert per_parameter * count <= found[kind]
            assert found[kind] == pytest.approx(per_parameter * count, rel=PADDING)
        # Nothing else of the size of a model is alive.
        assert found["others"] < 0.2 * count
    full = measure("tiny", "fp32", 1, latents)
    assert [round(full[kind] / count) for kind in KINDS] == [4, 4, 8, 4]
    assert "| +0.0" in row("fp32", 1, full)
