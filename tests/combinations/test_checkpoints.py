"""Runs of a fixed seed go on from their middle: to the same bits, and in another layout."""

from __future__ import annotations

from tests.combinations.check import numbers, passes
from tests.combinations.draw import Case


@numbers("gpt", 18, "resume", slow=60)
def test_a_run_resumes_to_the_same_bits(case: Case) -> None:
    passes(case)


@numbers("gpt", 10, "relayout", slow=40, seed=17)
def test_a_run_goes_on_in_another_layout(case: Case) -> None:
    passes(case)
