"""Answers to ``--help``: an index of sections, one section, one flag, or a search for words.

A question may also name a flag that the program lacks, such as one of Megatron-LM; the answer is
what the flag would get on the command line.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby

from megatron_ext.config.flags import Flag, if_changed
from megatron_ext.config.inapplicable import answer_to, by_flag, megatron_flags
from megatron_ext.config.run import Program, RunConfig, TaskFlags
from megatron_ext.config.sections import (
    OWN_FLAGS,
    Elsewhere,
    all_flags,
    canonical,
    sections_of,
    spellings,
    usual_flag,
)
from megatron_ext.errors import tell_errors, terminal_width

ALL = "all"
"""The question that asks for all flags."""
SHORT = 60
"""Number of lines up to which ``--help`` shows all flags instead of an index."""
FEW = 20
"""Number of search results up to which each is shown with its text, and else by name only."""
INSIDE = 4
"""Number of letters from which a word is searched inside of longer ones, not only at starts."""

_IF_CHANGED = {
    "refuse": "a checkpoint that was trained with another value is refused",
    "refuse_to_resume": "a run that resumes must give the same value as before",
    "keep": "a run that resumes keeps the value of its checkpoint, and a note says so",
    "say": "a run that resumes may change it, and a note says so",
    "allow": "",
}

_QUESTIONS = {
    "--help WORD ...": "flags with these words in name or text, such as --help recompute",
    "--help --FLAG": "all about one flag; why Megatron-LM's flag is not here, or what replaces it",
    "--help SECTION": "the flags of a section",
    "--help all": "all flags",
}
"""The forms of a question, which the overview explains."""


def answer(program: Program, question: str, elsewhere: Elsewhere = tuple) -> int:
    """Print the answer to a question about flags; return the exit code, 2 if nothing is found.

    Args:
        program: the program whose flags the question is about.
        question: "" for an overview, "all" for all flags, or a section, a flag or words to find.
        elsewhere: returns entries about other programs' flags.
    """
    manual = Manual(program, elsewhere, terminal_width())
    question = " ".join(question.split())
    lines = manual.overview(question) if question in ("", ALL) else manual.found(question.lower())
    if not lines:
        tell_errors([manual.nothing_found(question)])
        return 2
    print("\n".join(lines))
    return 0


class Manual:
    """The flags of a program with their texts, wrapped to ``width`` columns."""

    def __init__(self, program: Program, elsewhere: Elsewhere, width: int) -> None:
        self.width = width
        self.elsewhere = elsewhere
        self.flags = all_flags(program)
        self.table = spellings(self.flags)
        self.kinds = sections_of(program)
        self.sections = {
            name: list(flags) for name, flags in groupby(self.flags, lambda flag: flag.section)
        }
        # Flags without which a program runs choose the task whose defaults are shown.
        self.task: TaskFlags = program.choose(RunConfig.from_dict({}, program.sections))
        self.lacking = megatron_flags() | by_flag(program.inapplicable)

    @cached_property
    def summaries(self) -> dict[str, str]:
        """Return what the flags of each section are about."""
        return {name: _summary(self.kinds[name], flags) for name, flags in self.sections.items()}

    def overview(self, question: str) -> list[str]:
        """Return the lines of all flags, or of the index if the former are many and not asked."""
        intro = self._filled("Flags have Megatron-LM's names; defaults stand in brackets.")
        intro.append("")
        own = {f"{name} {words}": text for name, (words, text) in OWN_FLAGS.items()}
        for head, text in {**_QUESTIONS, **own}.items():
            if not head.startswith(("--help [", "-h", "--no-")):
                intro += self._row(head, text, 24)
        whole = [line for name in self.sections for line in ["", *self._section(name)]]
        if question == ALL or len(whole) <= SHORT:
            return intro + whole
        index = [f"{len(self.flags)} flags in {len(self.sections)} sections:"]
        for name, summary in self.summaries.items():
            index += self._row(f"{name:17} {len(self.sections[name]):3}", summary, 24)
        return [*intro, "", *index]

    def found(self, question: str) -> list[str]:
        """Return the lines about what a question names; [] if it names nothing.

        A flag with its dashes is looked up; other words are also searched in all names and texts.
        """
        name = canonical(question.replace(" ", "-"))
        flags, parts = self._named(name)
        named = [flag for flag in self._by_name(question) if flag not in flags]
        if question.startswith("-"):
            if not parts:
                return self.found(question.strip("- ")) if question.strip("- ") else []
            return _joined([*parts, self._names("Similar names", named)])
        section = name.removeprefix("--").replace("-", "_")
        parts.append(self._section(section))
        flags += self.sections.get(section, [])
        named = [flag for flag in named if flag not in flags]
        parts.append(self._listed("More flags of this name" if flags else "", named))
        told = [flag for flag in self.flags if flag not in [*flags, *named]]
        told = [flag for flag in told if _in_text(question, flag.help)]
        if flags or named:
            parts.append(self._names("Mentioned by", told))
        else:
            parts.append(self._listed("", told))
        parts.append(self._sections_about(question, section))
        parts.append(self._lacking_ones(question, name))
        return _joined(parts)

    def nothing_found(self, question: str) -> str:
        """Return the error about a question that nothing matches, with words that are similar."""
        names = [*self.table, *self.lacking, *self.sections]
        texts = " ".join([*names, *(flag.help for flag in self.flags)])
        words = sorted(set(re.findall("[a-z0-9]+", texts.lower())))
        asked = question.lower().strip("-")
        near = _closest(asked, [name.strip("-") for name in names], 2)
        each = [_closest(word, words, 1) for word in re.findall(r"\w+", asked)]
        if not near and all(each):
            near = [" ".join(word for found in each for word in found)]
        remedy = f"did you mean {' or '.join(f'`{word}`' for word in near)}?"
        return f"No flag has `{question}` in its name or text; " + (
            remedy if any(near) else "`--help` lists the sections."
        )

    def _named(self, name: str) -> tuple[list[Flag], list[list[str]]]:
        """Return the flags that ``name`` stands for, and the parts of the answer about it."""
        if name in self.table:
            flag, _ = self.table[name]
            return [flag], [self._details(flag)]
        if (usual := usual_flag(name)) in self.table:
            return self._named(str(usual))
        if name in OWN_FLAGS:
            return [], [self._item(name, *OWN_FLAGS[name])]
        entry = answer_to(name, self.lacking) or answer_to(name, by_flag(self.elsewhere()))
        if entry is None:
            return [], []
        flags = [self.table[word][0] for word in entry.instead.split() if word in self.table]
        parts = [self._filled(entry.sentence(f"`{name}`")), *map(self._details, flags)]
        return flags, parts

    def facts(self, flag: Flag) -> dict[str, str]:
        """Return what is known about a flag beside its meaning: sentences and values by label."""
        old = [
            name
            for name, entry in self.lacking.items()
            if entry.instead.split()[:1] in [[spelled] for spelled in flag.positive]
        ]
        own = flag.positive[0].removeprefix("--")
        entries = [x for x in self.task.answers() if x.holds is not None and own in x.flags.split()]
        facts = {
            "values": _values(flag),
            "default": self.default(flag),
            "also": ", ".join(x for x in (*flag.positive, *flag.negative) if x != flag.shown),
            "replaces": ", ".join(old),
            "resuming": _IF_CHANGED[if_changed(self.kinds[flag.section])[flag.field]],
            "note": " ".join(_capital(entry.sentence("it")) for entry in entries),
        }
        return {label: fact for label, fact in facts.items() if fact}

    def _details(self, flag: Flag) -> list[str]:
        """Return all that is known about one flag."""
        lines = [*self._flag(flag), ""]
        facts = self.facts(flag)
        note = {"note": facts.pop("note")} if "note" in facts else {}
        section = {"section": f"{flag.section}; see `--help {flag.section}`"}
        for label, fact in {**facts, **section, **note}.items():
            lines += self._row(f"  {label}", fact, 22)
        return lines

    def _section(self, name: str) -> list[str]:
        """Return the lines of a section; [] if the program has no flags in such a section."""
        flags = self.sections.get(name, [])
        return [f"{name}:"] * bool(flags) + [line for flag in flags for line in self._flag(flag)]

    def _listed(self, title: str, flags: Sequence[Flag]) -> list[str]:
        """Return flags with their texts if they are few, else their names, by section."""
        lines = [f"{title}:", ""] if title and flags else []
        for name, members in groupby(flags, lambda flag: flag.section):
            if len(flags) > FEW:
                lines += self._names(name, list(members))
            else:
                lines += [f"{name}:", *(line for flag in members for line in self._flag(flag))]
        return lines

    def _names(self, title: str, flags: Sequence[Flag]) -> list[str]:
        names = ", ".join(flag.shown for flag in flags)
        return self._filled(f"{title}: {names}", later="  ") if flags else []

    def _sections_about(self, question: str, section: str) -> list[str]:
        """Return the sections whose summaries have the words of a question, except ``section``."""
        lines = []
        for name, summary in self.summaries.items():
            if name != section and _in_text(question, f"{name} {summary}"):
                lines += self._row(name, summary, 24)
        return ["Sections:", *lines] if lines else []

    def _lacking_ones(self, question: str, name: str) -> list[str]:
        """Return the flags of Megatron-LM and of other tasks that match and that this one lacks.

        The flag ``name`` itself is left out.
        """
        found: dict[int, list[str]] = {}
        for spelled, entry in self.lacking.items():
            if spelled != name and _in_name(question, spelled):
                found.setdefault(id(entry), []).append(spelled)
        idle = [names for names in found.values() if self.lacking[names[0]].is_idle]
        hidden = idle if len(found) > FEW // 3 else []
        lines = []
        for first, *others in found.values():
            if [first, *others] not in hidden:
                sentence = self.lacking[first].sentence(f"`{first}`")
                sentence += f" Likewise {_some(others)}." if others else ""
                lines += self._filled(sentence, "  ", "    ")
        if hidden:
            names = _some([name for names in hidden for name in names])
            text = f"Accepted without effect (`--help --NAME` says why): {names}."
            lines += self._filled(text, "  ", "    ")
        return ["Flags that are not here:", *lines] if lines else []

    def _by_name(self, question: str) -> list[Flag]:
        """Return the flags one of whose spellings, or choices, has the words of a question."""
        return [
            flag
            for flag in self.flags
            if any(_in_name(question, x) for x in (*flag.positive, *flag.negative))
            or any(_in_name(question, str(choice)) for choice in flag.choices or ())
        ]

    def meaning(self, flag: Flag) -> str:
        """Return what giving a flag does, without its default."""
        is_on = flag.type is bool and self.default(flag) == "on"
        return f"switch off: {flag.help}" if is_on else flag.help

    def _flag(self, flag: Flag) -> list[str]:
        default = self.default(flag)
        plain = flag.type is bool and default in ("on", "off")
        bracket = f" [{default}]" if default and not plain else ""
        return self._item(flag.shown, metavar(flag), self.meaning(flag) + bracket)

    def default(self, flag: Flag) -> str:
        """Return a flag's default in the task; "" for none, "on" or "off" for a switch."""
        of_task = self.task.defaults
        default = of_task.get(flag.field, of_task.get(f"usual_{flag.field}", flag.default))
        if flag.type is bool:
            on_gpu = of_task.get(f"{flag.field}_on_gpu")
            return "on a GPU" if on_gpu else "on" if default is True else "off"
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return "" if shown is None else str(shown)

    def _item(self, name: str, words: str, meaning: str) -> list[str]:
        """Return the lines of a flag: its name with its values, and below what it means."""
        head = f"  {name} {words}".rstrip()
        if len(head) > self.width:
            head = head.replace(",", ", ")
        return [*self._filled(head, later=" " * 6), *self._filled(meaning, " " * 8)]

    def _row(self, head: str, text: str, column: int) -> list[str]:
        """Return ``head`` with ``text`` to its right, from ``column`` on."""
        return self._filled(text, f"  {head}".ljust(column), " " * column)

    def _filled(self, text: str, first: str = "", later: str | None = None) -> list[str]:
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=first if later is None else later,
            break_on_hyphens=False,
            drop_whitespace=True,
        )


def _joined(parts: Iterable[list[str]]) -> list[str]:
    """Return the lines of all parts that have any, with an empty line between two parts."""
    return [line for part in parts if part for line in ["", *part]][1:]


def _closest(word: str, candidates: Sequence[str], count: int) -> list[str]:
    return difflib.get_close_matches(word, candidates, n=count, cutoff=0.75)


def _some(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    others = len(names) - FEW // 2
    return ", ".join(names[: FEW // 2]) + (f" and {others} more" if others > 0 else "")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def metavar(flag: Flag) -> str:
    """Return the words that stand for a flag's values, such as "N"; "" for a switch."""
    if flag.type is bool:
        return ""
    if flag.choices:
        return f"{{{','.join(map(str, flag.choices))}}}"
    name = (flag.unit or {int: "N", float: "X", str: "TEXT"}[flag.type]).upper()
    if isinstance(flag.nargs, int):
        return " ".join([name] * flag.nargs)
    return f"{name} ..." if flag.nargs == "+" else name


def _values(flag: Flag) -> str:
    """Return which values a flag takes, such as "an integer, at least 1"."""
    if flag.type is bool or flag.choices:
        return ""
    kind = {int: "an integer", float: "a number", str: "a text"}[flag.type]
    count = "one or more" if flag.nargs == "+" else flag.nargs
    shown = kind if count is None else f"{count}, each {kind}"
    bounds = "" if flag.bounds is None else flag.bounds.in_words()
    return f"{shown}, {bounds}" if bounds else shown


def _summary(kind: type, flags: Sequence[Flag]) -> str:
    """Return what a section is about: the first sentence of its docstring without usual words.

    A dataclass without a docstring of its own is described by the names of its flags.
    """
    text = (kind.__doc__ or "").strip().split("\n")[0]
    if not text or text.startswith(f"{kind.__name__}("):
        return ", ".join(flag.shown for flag in flags)
    text = re.sub(r"^(The f|F)lags? (of|for|that) ", "", text.rstrip("."))
    return re.sub(r"[;,] (names|with) .*Megatron-LM's.*", "", text).replace("``", "`")


def _in_name(question: str, name: str) -> bool:
    """Return whether each word of a question is in a name, see `INSIDE`."""
    parts = re.split("[-_]", name.lower())
    words = re.split(r"[\s_-]+", question.strip("- "))
    return all(
        any(part.startswith(word) or (len(word) >= INSIDE and word in part) for part in parts)
        for word in words
    )


def _in_text(question: str, text: str) -> bool:
    """Return whether each word of a question starts a word of a text, or is one if it is short."""
    parts = re.findall(r"\w+", text.lower())
    words = re.findall(r"\w+", question)
    return bool(words) and all(
        any(part == word or (len(word) >= INSIDE and part.startswith(word)) for part in parts)
        for word in words
    )
