"""Preprocessing, conversion and layouts of experts of a fixed seed."""

from __future__ import annotations

import argparse

import pytest

from tests.combinations import conversion, experts, inputs, preprocess
from tests.combinations.execute import load

SEARCHES = {
    "preprocess": (preprocess.search, 16),
    "conversion": (conversion.search, 4),
    "experts": (experts.search, 12),
}


def _run(name: str, cases: int | None, max_ranks: int) -> int:
    load()
    search, _ = SEARCHES[name]
    arguments = argparse.Namespace(
        seed=15, cases=cases, jobs=1, limit=60.0, verbose=False, max_ranks=max_ranks
    )
    return search(arguments, inputs.make())


@pytest.mark.parametrize("name", SEARCHES)
def test_a_few_of_a_seed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(name, SEARCHES[name][1], 4) == 0, capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cases"), [("preprocess", 60), ("conversion", 20)])
def test_many_of_a_seed(name: str, cases: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(name, cases, 4) == 0, capfd.readouterr().out


@pytest.mark.slow
def test_every_layout_of_experts_has_the_gradients_of_one_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert _run("experts", None, 4) == 0, capfd.readouterr().out
