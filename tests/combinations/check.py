"""A fixed part of the search as tests: each number of a seed is a test of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.combinations import inputs
from tests.combinations.draw import Case, cases_of
from tests.combinations.execute import load
from tests.combinations.run import Result, replay_text, settle

SEED = 15
LIMIT = 60.0
"""Seconds after which a run counts as hanging where other tests run beside it."""


@functools.cache
def _cases(kind: str, seed: int, count: int, judges: tuple[str, ...]) -> list[Case]:
    return cases_of(kind, seed, count, dict.fromkeys(judges, count), max_ranks=4)


def numbers(
    kind: str, count: int, *judges: str, slow: int = 0, seed: int = SEED
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test with ``case``: so many of a seed, and ``slow`` more that are slow."""
    everything = _cases(kind, seed, count + slow, judges)
    marked = [
        pytest.param(
            case, id=f"{kind}-{case.number}", marks=[pytest.mark.slow] * (case.number >= count)
        )
        for case in everything
    ]
    return pytest.mark.parametrize("case", marked)


def passes(case: Case) -> None:
    """Fail with the command of a case that is not as it should be."""
    load()
    result: Result = settle(case, inputs.make(), LIMIT, [], shrinks=False)
    last = result.verdicts[-1]
    if last.failed:
        commands = "\n".join(last.commands)
        replay = f"python tests/combinations/run.py --replay '{replay_text(result.case)}'"
        pytest.fail(f"{last.kind}\n{commands}\n{last.text}\n{replay}", pytrace=False)
