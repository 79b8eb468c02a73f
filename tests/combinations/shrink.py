"""Shrinks a failure: fewer options, a simpler layout, the same kind of failure."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.combinations.draw import Case
from tests.combinations.execute import work_directory
from tests.combinations.judge import Verdict, judge
from tests.combinations.layouts import ONE, SIMPLE, Layout

HANG = 15.0
"""Seconds that a smaller case of a hang is given."""


@dataclass
class Shrinking:
    """The smallest case so far that fails alike; nothing more is tried after `end`."""

    best: Case
    verdict: Verdict
    data: Path
    limit: float
    end: float

    def take(self, smaller: Case) -> bool:
        if time.monotonic() > self.end:
            return False
        with work_directory(self.data) as folder:
            found = judge(smaller, self.data, folder, self.limit)
        alike = found.signature == self.verdict.signature or (
            found.kind == self.verdict.kind and "differs" in found.kind
        )
        if alike:
            self.best, self.verdict = smaller, found
        return alike

    def fewer_options(self) -> None:
        """Drop halves of the options, then quarters, then single ones."""
        size = max(1, len(self.best.options) // 2)
        while True:
            place = 0
            while place < len(self.best.options):
                options = self.best.options
                rest = options[:place] + options[place + size :]
                if not self.take(dataclasses.replace(self.best, options=rest)):
                    place += size
            if size == 1:
                return
            size //= 2

    def simpler_layout(self, name: str) -> None:
        layout: Layout = getattr(self.best, name) or ONE
        for simple in _simpler(self.best, layout):
            if self.take(dataclasses.replace(self.best, **{name: simple})):
                return
        for piece in layout.pieces:
            if "parallel-size" not in piece or "expert" in piece:
                now: Layout = getattr(self.best, name)
                rest = tuple(x for x in now.pieces if x != piece)
                fewer = dataclasses.replace(now, pieces=rest)
                self.take(dataclasses.replace(self.best, **{name: fewer}))

    def fewer_words(self) -> None:
        for place in range(len(self.best.options)):
            for group in _groups(self.best.options[place]):
                options = list(self.best.options)
                rest = options[place].replace(group, "").strip()
                if rest and rest != options[place]:
                    options[place] = rest
                    self.take(dataclasses.replace(self.best, options=tuple(options)))


def shrink(
    case: Case, verdict: Verdict, data: Path, limit: float, seconds: float = 240
) -> tuple[Case, Verdict]:
    """Return the smallest case found in time that fails alike, and its verdict."""
    limit = min(limit, HANG) if verdict.kind == "hang" else limit
    judges = tuple(name for name in case.judges if verdict.kind.startswith(name))
    if not judges and len(verdict.commands) > 1:
        judges = case.judges
    end = time.monotonic() + seconds
    state = Shrinking(dataclasses.replace(case, judges=judges), verdict, data, limit, end)
    state.simpler_layout("layout")
    state.fewer_options()
    if case.other is not None and "relayout" in judges:
        state.simpler_layout("other")
    state.fewer_words()
    return state.best, state.verdict


def _simpler(case: Case, layout: Layout) -> Iterator[Layout]:
    """Yield layouts of fewer ranks or flags, the simplest first."""
    model = layout.model.replace("--num-experts 4", "").strip()
    experts = "--num-experts 4" if model != layout.model else ""
    for simple in SIMPLE:
        if simple.ranks > layout.ranks or simple == dataclasses.replace(layout, model=model):
            continue
        if simple.ranks == layout.ranks and len(simple.pieces) >= len(layout.pieces):
            continue
        if "expert" in str(simple.pieces) and "--num-experts" not in " ".join(case.words("")):
            continue
        yield dataclasses.replace(simple, model=f"{simple.model} {experts}".strip())


def _groups(text: str) -> Sequence[str]:
    """Return the flags of an option, each with its values; nothing for a single flag."""
    groups: list[list[str]] = []
    for word in text.split():
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [" ".join(group) for group in groups] if len(groups) > 1 and "'" not in text else []
