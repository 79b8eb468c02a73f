"""Judges the tests of a bash script, such as ``[ $X = a ]``, as far as they are decided."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence

from megatron_ext.inspect.audit.expand import World, arithmetic, known_part, unknowns

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def test(words: Sequence[str], world: World) -> bool | None:
    """Return whether a test holds, None if what it asks is open, such as whether a file exists."""
    words = list(words)
    for joint in ("||", "-o"):
        if joint in words:
            at = words.index(joint)
            return either(test(words[:at], world), test(words[at + 1 :], world))
    for joint in ("&&", "-a"):
        if joint in words[1:]:
            at = words.index(joint, 1)
            left, right = test(words[:at], world), test(words[at + 1 :], world)
            return invert(either(invert(left), invert(right)))
    if words and words[0] == "!":
        return invert(test(words[1:], world))
    if len(words) > 2 and (words[0], words[-1]) == ("(", ")"):
        return test(words[1:-1], world)
    if len(words) == 3:
        return _compare(words[0], words[1], words[2], world)
    if len(words) == 2 and words[0] in ("-z", "-n"):
        if unknowns(words[1]):
            return words[0] == "-n" if known_part(words[1]) else None
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 2 and words[0] == "-v":
        return True if world.get(words[1]) is not None else None
    if len(words) == 1:
        return None if unknowns(words[0]) else words[0] != ""
    return False if not words else None


def _compare(left: str, sign: str, right: str, world: World) -> bool | None:
    if sign in _COMPARISONS:
        numbers = arithmetic(left, world), arithmetic(right, world)
        if numbers[0] is None or numbers[1] is None:
            return None
        return _COMPARISONS[sign](numbers[0], numbers[1])
    if unknowns(left) or unknowns(right):
        return None
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    if sign == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    if sign in "<>":
        return left < right if sign == "<" else left > right
    return None


def either(left: bool | None, right: bool | None) -> bool | None:
    """Return whether one of two tests holds, as far as it is known."""
    if left or right:
        return True
    return None if left is None or right is None else False


def invert(status: bool | None) -> bool | None:
    """Return the opposite, which stays open if the status is."""
    return None if status is None else not status
