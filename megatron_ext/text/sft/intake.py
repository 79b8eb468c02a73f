"""Counts of what was read from rows of conversations, what was changed, and what was not used.

Every part of a row is used or is counted here under its name; otherwise the row is refused. The
counts are stored with the tokens, so that every run that reads a store reports the same as the run
that made it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_SHOWN = 40
"""The largest number of names that a sentence lists; the JSON file of a store has all names."""

_TITLES = {
    "changed": "read in another form",
    "doubtful": "roles that may be misspelt",
    "ignored": "ignored, because neither this program nor the chat template uses it",
    "unrendered": "left out of the text by the chat template (`--sft-on-unrendered note`)",
    "dropped": "dropped",
}


@dataclass
class Intake:
    """The counts of what was read from one or more rows.

    Attributes:
        counts: number of rows, conversations, turns and so on, by name.
        changed: number of values that were converted to another form, by kind of conversion.
        doubtful: number of messages whose role resembles a usual one, by both roles.
        ignored: number of values that nothing uses, by the name of their column or key.
        unrendered: number of values that the chat template leaves out of the text, by the name of
            what is lost.
        dropped: number of conversations that are not used, by reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    doubtful: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    unrendered: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Intake") -> None:
        """Add the counts of ``other`` to this object, in place."""
        for name in self.__dataclass_fields__:
            getattr(self, name).update(getattr(other, name))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON values, which `from_dict` reads."""
        return {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, int]]) -> "Intake":
        """Return the `Intake` for which `as_dict` returned ``values``."""
        return cls(**{name: Counter(values.get(name, {})) for name in cls.__dataclass_fields__})

    @classmethod
    def total(cls, parts: Iterable["Intake"]) -> "Intake":
        """Return the sum of the counts in ``parts``."""
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    def summary(self) -> str:
        """Return the counts of what was read, as one line of text."""
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)

    def notes(self) -> list[str]:
        """Return sentences on the values that were converted; [] if none was."""
        return self._sentences("changed")

    def warnings(self) -> list[str]:
        """Return sentences on values and conversations that were not used; [] if there are none."""
        return self._sentences("doubtful", "ignored", "unrendered", "dropped")

    def _sentences(self, *kinds: str) -> list[str]:
        sentences = []
        for kind in kinds:
            listed = getattr(self, kind).most_common()
            names = [f"{name} ({count:,})" for name, count in listed[:_SHOWN]]
            if len(listed) > _SHOWN:
                names.append(f"and {len(listed) - _SHOWN} more names")
            if names:
                sentences.append(f"{_TITLES[kind]}: {', '.join(names)}")
        return sentences
