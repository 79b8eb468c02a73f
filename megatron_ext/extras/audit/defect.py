"""Defines a defect of megatron-core: its state in each release, and the flags that trigger it.

The defects are listed in `defects.yaml`, and the flags that trigger them in `rules`. From these,
`report` audits a run's flags, and the table in docs/numerics.md is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.extras.audit.flags import Flags, holds

RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Minor releases of megatron-core with measured defects: 0.16.1, 0.17.1, 0.18.2 and 0.19.2."""


Condition = Callable[[Flags], bool]
Sentence = Callable[[Flags], str] | str


@dataclass(frozen=True)
class State:
    """The state of a defect in a release.

    Attributes:
        kind: ``there``, ``fixed``, or ``changed`` (still there in another form).
        figure: text with what was measured on this release; "" if there is none.
    """

    kind: str
    figure: str

    @classmethod
    def of(cls, entry: Mapping[str, str]) -> State:
        """Return the state for a mapping in `defects.yaml` that may lack the ``figure``."""
        return cls(entry["kind"], entry.get("figure", ""))

    def __str__(self) -> str:
        return f"{self.kind}: {self.figure}" if self.figure else self.kind


@dataclass(frozen=True)
class Rule:
    """One combination of flags that triggers a defect.

    Attributes:
        all_of: conditions: functions of the flags, all of which return True if the rule holds.
        error: sentence on the size of the error, or a function of the flags that returns it.
        advice: what the user should do.
        only: minor releases to which the rule applies, as in "0.16 0.17"; "" for all.
        depends: text of a further condition, which flags cannot show; "" if there is none.
    """

    all_of: tuple[Condition, ...]
    error: Sentence
    advice: str
    only: str = ""
    depends: str = ""

    def hit(self, flags: Flags) -> bool:
        """Return whether the flags trigger the defect.

        Raises:
            Undecided: the result depends on a value that cannot be read.
        """
        return holds(*(lambda c=condition: bool(c(flags)) for condition in self.all_of))

    def size(self, flags: Flags) -> str:
        """Return a sentence on what goes wrong with these flags.

        It says how far a result is from the right one, or how the run fails.
        """
        return self.error if isinstance(self.error, str) else self.error(flags)


@dataclass(frozen=True)
class Defect:
    """One row of the table in docs/numerics.md: a known defect of megatron-core.

    Attributes:
        affected: the part of megatron-core that has the defect.
        stock: a sentence that says what megatron-core 0.16 does, with measured figures.
        since: the state on 0.19, as ``tools/audit.py --reproduce`` measures it.
        began: the first minor release in the state ``since``; earlier ones behave like 0.16.
        between: pairs (minor release, its state) for exceptions: neither like 0.16 nor ``since``.
        ours: what this package does instead.
        test: names of the tests of what this package does.
        rules: alternative combinations of flags that trigger the defect; the first that holds gives
            the error and advice. Empty if no flags show the defect.
    """

    number: str
    affected: str
    stock: str
    since: State
    ours: str
    test: str
    rules: tuple[Rule, ...] = ()
    began: str = "0.19"
    between: tuple[tuple[str, State], ...] = ()

    @classmethod
    def of(cls, number: str, entry: Mapping[str, Any], rules: tuple[Rule, ...]) -> Defect:
        """Return the defect ``number``, such as "D2", from its ``entry`` in `defects.yaml`."""
        texts = {name: entry[name] for name in ("affected", "stock", "ours", "test")}
        between = tuple((name, State.of(state)) for name, state in entry.get("between", {}).items())
        began = entry.get("began", "0.19")
        since = State.of(entry["since"])
        return cls(number, **texts, since=since, rules=rules, began=began, between=between)

    def state(self, release: str) -> State:
        """Return the state of the defect in a minor release such as ``0.16``."""
        before = State("there", self.stock)
        return dict(self.between).get(release, self.since if release >= self.began else before)

    def row(self) -> str:
        """Return the defect's row of the table in docs/numerics.md, in Markdown."""
        cells = self.number, self.affected, self.stock, str(self.since), self.ours, self.test
        return f"| {' | '.join(cells)} |"
