"""Combinations of a fixed seed train or are refused, resume, and agree with other layouts.

Each number of a seed is a test of its own.
"""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from tests.combinations import conversion, experts, inputs, preprocess
from tests.combinations.draw import Case, as_pattern, cases_of
from tests.combinations.execute import load
from tests.combinations.run import Result, replay_text, settle

SEED = 15
LIMIT = 60.0
"""Seconds after which a run counts as hanging where other tests run beside it."""


def numbers(kind: str, count: int, *judges: str, slow: int = 0, seed: int = SEED) -> list[Any]:
    """Return so many cases of a seed, and ``slow`` more that are slow."""
    marks = [[], [pytest.mark.slow]]
    wanted = dict.fromkeys(judges, count + slow)
    return [
        pytest.param(case, id=f"{kind}-{case.number}", marks=marks[case.number >= count])
        for case in cases_of(kind, seed, count + slow, wanted, max_ranks=4)
    ]


def passes(case: Case) -> None:
    load()
    result: Result = settle(case, inputs.make(), LIMIT, [], shrinks=False)
    last = result.verdicts[-1]
    if last.failed:
        commands = "\n".join(last.commands)
        replay = f"python tests/combinations/run.py --replay '{replay_text(result.case)}'"
        pytest.fail(f"{last.kind}\n{commands}\n{last.text}\n{replay}", pytrace=False)


@pytest.mark.parametrize("case", numbers("gpt", 10, slow=40))
def test_a_combination_trains_or_is_refused(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize("case", numbers("gpt", 3, "one rank", slow=9, seed=16))
def test_a_layout_trains_as_one_rank_does(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize("case", numbers("gpt", 3, "one rank", slow=6, seed=18))
def test_a_pattern_of_layers_trains_as_on_one_rank(case: Case) -> None:
    passes(as_pattern(case))


@pytest.mark.parametrize(
    "case",
    [
        *numbers("gpt", 2, "resume", slow=10),
        *numbers("sft", 1, "resume", slow=5),
        *numbers("flow", 1, "resume", slow=5),
        *numbers("streaming", 1, "resume", slow=5),
    ],
)
def test_a_run_resumes_to_the_same_bits(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize(
    "case",
    [
        *numbers("gpt", 1, "kill", slow=8, seed=19),
        *numbers("sft", 1, "kill", slow=3, seed=19),
        *numbers("flow", 0, "kill", slow=3, seed=19),
        *numbers("streaming", 0, "kill", slow=3, seed=19),
    ],
)
def test_a_run_goes_on_after_a_kill_as_if_there_had_been_none(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize("case", numbers("gpt", 1, "relayout", slow=6, seed=17))
def test_a_run_goes_on_in_another_layout(case: Case) -> None:
    passes(case)


@pytest.mark.parametrize(
    ("search", "cases"),
    [
        pytest.param(preprocess.search, 16, id="preprocess"),
        pytest.param(conversion.search, 4, id="conversion"),
        pytest.param(experts.search, 1, id="experts"),
        pytest.param(preprocess.search, 60, id="more preprocess", marks=pytest.mark.slow),
        pytest.param(conversion.search, 20, id="more conversion", marks=pytest.mark.slow),
        pytest.param(experts.search, 30, id="more experts", marks=pytest.mark.slow),
    ],
)
def test_a_search_finds_no_failure(
    search: Callable[..., int], cases: int, capfd: pytest.CaptureFixture[str]
) -> None:
    load()
    arguments = argparse.Namespace(
        seed=SEED, cases=cases, jobs=1, limit=LIMIT, verbose=False, max_ranks=4
    )
    assert search(arguments, inputs.make()) == 0, capfd.readouterr().out
