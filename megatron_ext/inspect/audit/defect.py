"""Defines what is known of a defect of megatron-core, by release; shared with docs/numerics.md."""

from __future__ import annotations

from dataclasses import dataclass

RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Minor releases of megatron-core whose defects were measured: 0.16.1, 0.17.1, 0.18.2, 0.19.2."""


@dataclass(frozen=True)
class State:
    """The state of a defect in a release.

    Attributes:
        kind: ``there``, ``fixed`` or ``changed`` (there in another form).
        figure: what was measured on it.
    """

    kind: str
    figure: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.figure}" if self.figure else self.kind


@dataclass(frozen=True)
class Defect:
    """One row of the table in docs/numerics.md.

    Attributes:
        stock: what megatron-core 0.16 does, with measured figures.
        since: the state on 0.19, as measured by `tools/audit.py --reproduce`.
        began: the release from which that state holds; the ones before it are as 0.16.
        between: states of releases before 0.19 that are neither.
        ours: what this package does instead.
        test: the tests of that.
    """

    number: str
    affected: str
    stock: str
    since: State
    ours: str
    test: str
    began: str = "0.19"
    between: tuple[tuple[str, State], ...] = ()

    def state(self, release: str) -> State:
        """Return the state on a minor release such as ``0.16``."""
        before = State("there", self.stock)
        return dict(self.between).get(release, self.since if release >= self.began else before)

    def row(self) -> str:
        """Return the row of the table in docs/numerics.md."""
        cells = self.number, self.affected, self.stock, str(self.since), self.ours, self.test
        return f"| {' | '.join(cells)} |"
