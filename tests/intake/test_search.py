"""A drawn part of the search for leaves that nobody hears, with a fixed seed."""

import random
from pathlib import Path
from typing import Any

from tests.intake.judge import Heard, judge
from tests.intake.leaves import Change, changes
from tests.intake.run import Case, cases, search


def test_every_changed_leaf_is_heard_or_named() -> None:
    drawn = [case for kind in ("video_lists", "flags") for case in cases(11, [kind])][:130]
    sizes = {
        "clip_files": 10,
        "config_json": 60,
        "conversations": 150,
        "texts": 40,
        "tokenizer_files": 100,
    }
    for kind, size in sizes.items():
        drawn += list(cases(11, [kind]))[:size]
    wrong = search(drawn, minutes=1)
    assert [f"{verdict.answer}: {case.replay()}" for case, verdict in wrong] == []


def test_a_leaf_that_nobody_hears_is_found(tmp_path: Path) -> None:
    def deaf(content: Any, folder: Path) -> Heard:
        return Heard(content["used"], "")

    content = {"used": 1, "lost": 2}
    answers = {
        (change.name, change.kind): judge(deaf, content, change, tmp_path / str(number)).answer
        for number, change in enumerate(changes(content, random.Random(1)))
    }
    assert answers["used", "other"] == "changed"
    assert answers["lost", "other"] == answers["another_tool", "added"] == "unheard"
    assert answers["used", "gone"] == "traceback"


def test_a_case_survives_its_own_replay() -> None:
    case = Case("config_json", "llama", {"a": [1]}, Change(("a", 0), "other", 2))
    assert Case.replayed(case.replay()) == case
