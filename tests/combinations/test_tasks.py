"""Combinations of fine-tuning, video flow and streaming of a fixed seed train or are refused."""

from __future__ import annotations

from tests.combinations.check import numbers, passes
from tests.combinations.draw import Case


@numbers("sft", 14, "resume", slow=40)
def test_fine_tuning(case: Case) -> None:
    passes(case)


@numbers("flow", 10, "resume", slow=40)
def test_video_flow(case: Case) -> None:
    passes(case)


@numbers("streaming", 8, "resume", slow=30)
def test_streaming(case: Case) -> None:
    passes(case)
