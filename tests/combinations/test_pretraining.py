"""Combinations of a fixed seed train, or are refused in sentences before a rank starts."""

from __future__ import annotations

from tests.combinations.check import numbers, passes
from tests.combinations.draw import Case


@numbers("gpt", 45, slow=200)
def test_a_combination_trains_or_is_refused(case: Case) -> None:
    passes(case)


@numbers("gpt", 15, "one rank", slow=60, seed=16)
def test_a_layout_trains_as_one_rank_does(case: Case) -> None:
    passes(case)
