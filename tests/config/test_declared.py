"""Tests of the value of an absent flag, which numbers it takes, and what a change of it means."""

from pathlib import Path
from typing import Any

from megatron_ext.config.flags import Flag, Range, flags_of, if_changed
from megatron_ext.config.run import engine_sections, named
from megatron_ext.text.evaluation.tool import EVALUATION
from megatron_ext.text.generation.tool import GENERATION
from megatron_ext.text.task import TEXT
from megatron_ext.video.task import VIDEO

LIST = Path(__file__).with_name("declared.txt")


def interval(bounds: Range | None) -> str:
    """Return an interval such as ``(0, 1]``, whose round side is that of an end left out."""
    if bounds is None:
        return "any"
    ends = f"{bounds.low:.17g}, {bounds.high:.17g}"
    return f"{'(' if bounds.above else '['}{ends}{')' if bounds.below else ']'}"


def declared(flag: Flag, answer: str) -> str:
    values = "|".join(map(str, flag.choices)) if flag.choices else interval(flag.bounds)
    return f"{flag.field} = {flag.default!r} of {values}; {answer}"


def test_of_every_flag_is_decided_its_default_its_values_and_what_a_change_means() -> None:
    """Keep the list by hand: runs of users depend on each of these words.

    The last one says what follows if a checkpoint was written with another value; see `IfChanged`.
    """
    kinds: dict[str, Any] = dict(engine_sections())
    for program in (TEXT, VIDEO, GENERATION, EVALUATION):
        kinds |= named(program.sections)
    found = []
    for name, kind in kinds.items():
        answers = if_changed(kind)
        found.append(f"[{name}]")
        found += [declared(flag, answers[flag.field]) for flag in flags_of(name, kind)]
    decided = LIST.read_text(encoding="utf-8").splitlines()
    assert [line for line in found if line not in decided] == []
    assert found == [line for line in decided if line]
