"""Judges whether a changed leaf of an input was heard: it changes what is trained, or is named."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import MegatronExtError
from tests.intake.leaves import Change


@dataclass(frozen=True)
class Heard:
    """The outcome of an input.

    Attributes:
        trained: whatever decides what is trained: tokens, masks, weights, configuration; compared
            with ``==``.
        printed: the notes and warnings that a user sees.
    """

    trained: Any
    printed: str = ""


Hear = Callable[[Any, Path], Heard]
"""Takes a content and an empty folder; raises a MegatronExtError for what it refuses."""


@dataclass(frozen=True)
class Verdict:
    """An answer to one change.

    Attributes:
        answer: "changed", "named" or "refused", which are right; "same" for a leaf that was taken
            away without effect, which is right too; "unheard", "refused without its name" or
            "traceback", which are wrong.
        text: what was printed, or the error.
    """

    answer: str
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.answer not in ("changed", "named", "refused", "same")


def judge(
    hear: Hear,
    whole: Any,
    change: Change,
    folder: Path,
    says_what_is: Callable[[Change, Heard], bool] = lambda change, usual: False,
    names_whole: Callable[[Change, str], bool] = lambda change, text: False,
) -> Verdict:
    """Return the verdict on a change of ``whole``, whose input is written into new folders.

    ``says_what_is`` returns whether a change only says aloud what holds without it, and
    ``names_whole`` whether a text names something that the leaf is a part of.
    """
    before, after = folder / "before", folder / "after"
    for place in (before, after):
        place.mkdir(parents=True)
    usual = hear(whole, before)
    try:
        heard = hear(change.applied(whole), after)
    except MegatronExtError as error:
        text = str(error)
        is_named = names(change, text) or names_whole(change, text)
        return Verdict("refused" if is_named else "refused without its name", text)
    # Anything else that is raised reaches a user as a traceback.
    except Exception as error:
        return Verdict("traceback", f"{type(error).__name__}: {error}")
    if heard.trained != usual.trained:
        return Verdict("changed")
    # What is printed anyway does not tell of the change.
    lines = set(heard.printed.splitlines()) - set(usual.printed.splitlines())
    if change.kind in ("gone", "null") or says_what_is(change, usual):
        return Verdict("same")
    if any(
        tells(change, text)
        for tells in (names, names_whole)
        for text in ("\n".join(lines), heard.printed)
    ):
        return Verdict("named", heard.printed)
    return Verdict("unheard", heard.printed)


def names(change: Change, text: str) -> bool:
    """Return whether a text names the leaf by its key, as code or as words, or by its value."""
    name = re.sub(r"^--(no-|disable-)?", "", change.name)
    pattern = re.sub(r"\\?[_-]", "[_ -]", re.escape(name))
    if re.search(rf"(?<![^\W_]){pattern}s?(?![^\W_])", text):
        return True
    return isinstance(change.value, str) and len(change.value) > 6 and change.value in text
