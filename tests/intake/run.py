"""Changes one leaf of an input at a time, and finds those that nobody hears.

python tests/intake/run.py --seed 7 --cases 500
python tests/intake/run.py --kind config_json --cases 0     # every leaf of every input
python tests/intake/run.py --replay 'CASE'                  # as a failure prints it
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.intake import (
    clip_files,
    config_json,
    conversations,
    flags,
    texts,
    tokenizer_files,
    video_lists,
)
from tests.intake.judge import Verdict, judge
from tests.intake.leaves import Change, changes

KINDS: dict[str, Any] = {
    "clip_files": clip_files,
    "config_json": config_json,
    "conversations": conversations,
    "flags": flags,
    "texts": texts,
    "tokenizer_files": tokenizer_files,
    "video_lists": video_lists,
}
"""Kinds of input: ``bases`` yields good ones, and ``hear`` reads one.

A kind may draw its ``changes`` itself, know which of them only ``says_what_is``, and which text
``names_whole`` what a leaf is a part of.
"""
_HOOKS = ("says_what_is", "names_whole")


@dataclass(frozen=True)
class Case:
    """One input and the change of one of its leaves."""

    kind: str
    base: str
    content: Any
    change: Change

    def replay(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def replayed(text: str) -> "Case":
        entry = json.loads(text)
        change = entry.pop("change")
        return Case(**entry, change=Change(**{**change, "path": tuple(change["path"])}))


def cases(seed: int, kinds: Sequence[str]) -> Iterator[Case]:
    """Yield a change of every leaf of every input, in an order drawn by the seed."""
    dice = random.Random(seed)
    every = [
        Case(kind, base, content, change)
        for kind in kinds
        for base, content in KINDS[kind].bases()
        for change in getattr(KINDS[kind], "changes", changes)(content, dice)
    ]
    dice.shuffle(every)
    yield from every


def verdict_of(case: Case) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="intake_") as folder:
        kind = KINDS[case.kind]
        options = {name: getattr(kind, name) for name in _HOOKS if hasattr(kind, name)}
        return judge(kind.hear, case.content, case.change, Path(folder), **options)


def shrunk(case: Case, verdict: Verdict) -> Case:
    """Return the case without the outer entries that its verdict does not need."""
    if not isinstance(case.content, dict):
        return case
    for key in list(case.content):
        if key == case.change.path[0]:
            continue
        rest = {name: value for name, value in case.content.items() if name != key}
        smaller = replace(case, content=rest)
        try:
            if verdict_of(smaller).answer == verdict.answer:
                case = smaller
        except Exception:
            continue
    return case


def search(drawn: Sequence[Case], minutes: float | None = None) -> list[tuple[Case, Verdict]]:
    """Judge the cases; return those that went wrong, shrunk, and print how many were heard how."""
    wrong: list[tuple[Case, Verdict]] = []
    answers: Counter[str] = Counter()
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for case in drawn:
        if end is not None and time.monotonic() > end:
            break
        verdict = verdict_of(case)
        answers[verdict.answer] += 1
        if verdict.is_wrong:
            wrong.append((shrunk(case, verdict), verdict))
    print(f"{sum(answers.values())} changed leaves: {dict(answers.most_common())}", flush=True)
    return wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=300, help="0: all that there are")
    parser.add_argument("--minutes", type=float, help="start no case after this")
    parser.add_argument("--replay", help="one case, as a failure prints it")
    arguments = parser.parse_args(argv)
    if arguments.replay is not None:
        drawn = [Case.replayed(arguments.replay)]
    else:
        drawn = list(cases(arguments.seed, arguments.kind or list(KINDS)))
        drawn = drawn[: arguments.cases or None]
    wrong = search(drawn, arguments.minutes)
    for case, verdict in wrong:
        path = ".".join(map(str, case.change.path))
        print(f"\n{verdict.answer}: {case.kind} of {case.base}: {path} {case.change.kind}")
        print(f"  now {case.change.value!r}\n  | {verdict.text}")
        print(f"  replay: python tests/intake/run.py --replay '{case.replay()}'")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
