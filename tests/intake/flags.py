"""Every flag of both programs, and every flag of Megatron-LM that the tables know."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import Flag
from megatron_ext.config.inapplicable import megatron_flags
from megatron_ext.config.sections import all_flags, spellings
from megatron_ext.text.task import TEXT
from tests.combinations.options import values_of
from tests.intake.judge import Heard
from tests.intake.leaves import Change
from tests.training_runs import SMALL, parsed


def bases() -> Iterator[tuple[str, Any]]:
    yield "pretrain_gpt.py", {}


def changes(content: Any, dice: random.Random) -> Iterator[Change]:
    """Yield each flag with each of its values but the default, and each flag of the tables."""
    usual = set(SMALL)
    for flag in all_flags(TEXT):
        if usual.isdisjoint(flag.positive):
            for words in _values(flag, dice):
                name, _, value = words.partition(" ")
                yield Change((name,), "added", value)
    for name in megatron_flags():
        yield Change((name,), "added", "")
        yield Change((name,), "added", "1")


def _values(flag: Flag, dice: random.Random) -> Iterator[str]:
    usual = f"{flag.positive[0]} {flag.default}"
    if flag.type is bool:
        yield flag.negative[-1] if flag.default is True else flag.positive[0]
        return
    drawn = {int: str(dice.randint(2, 9)), float: "0.25"}.get(flag.type, "somewhere")
    for words in values_of(flag) or [f"{flag.positive[0]} {drawn}"]:
        # A default that is said aloud changes nothing, and that is right.
        if words != usual and "{data}" not in words:
            yield words


def says_what_is(change: Change, usual: Heard) -> bool:
    """Return whether a flag has the value that is worked out for it where it is left out."""
    table = spellings(all_flags(TEXT))
    if change.name not in table:
        return False
    flag = table[change.name][0]
    derived = usual.trained[flag.section].get(flag.field)
    given = change.value if flag.type is not bool else str(table[change.name][1])
    return str(derived) == given or (isinstance(derived, list | tuple) and {*derived} == {given})


def hear(content: Any, folder: Path) -> Heard:
    words = [*SMALL]
    for name, value in content.items():
        words += [name, *value.split()]
    outcome = parsed(words)
    return Heard(outcome.config.to_dict(), "\n".join(outcome.notes))
