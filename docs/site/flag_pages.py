"""Writes the pages of flags: one for each section, an index, and Megatron-LM's other flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import Flag
from megatron_ext.config.help import Manual, metavar
from megatron_ext.config.inapplicable import Inapplicable, megatron_flags
from megatron_ext.config.run import Program, engine_sections
from megatron_ext.config.sections import OWN_FLAGS, TRAINER_NAMES
from megatron_ext.text.task import TEXT
from megatron_ext.video.task import VIDEO

FOLDER = "flags"
INDEX = f"{FOLDER}/README.md"
ALL = f"{FOLDER}/all.md"
LACKING = f"{FOLDER}/megatron_lm.md"
PROGRAMS: dict[str, Program] = {"pretrain_gpt.py": TEXT, "pretrain_video.py": VIDEO}
EVERY = "Every run"
"""Stands for both programs."""
RELEASES = "tests/config/megatron_flags.txt"
"""The list of all flags of Megatron-LM, each with the first and the last release that has it."""
PORTING = "docs/porting.md"
OTHER_DEFAULT = re.compile(r"^\| `(--[\w-]+)` \| \S+ \| (\S+) \| .* \|$", re.MULTILINE)
"""A row of that page about a flag whose default is another one in Megatron-LM: that default."""
ALL_RELEASES = ("0.16", "0.20")

NAME = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]")
"""A flag in a text."""
CODE = re.compile(r"(`[^`]*`)")
LABELS = {
    "values": "Values",
    "default": "Default",
    "also": "Also",
    "replaces": "Replaces",
    "resuming": "When a checkpoint is loaded",
    "note": "Note",
}
"""The facts of `Manual.facts` in the order of the page, and their names there."""
TEXTS = ("values", "resuming", "note")
"""The facts that are words; the others are names and values."""


def flag_pages(root: Path) -> tuple[dict[str, str], list[Any]]:
    """Return the pages by path, and their part of the navigation."""
    reference = Reference(root)
    pages = {INDEX: reference.index(), ALL: reference.all(), LACKING: reference.lacking()}
    nav: dict[str, list[dict[str, str]]] = {}
    for section in reference.sections:
        path = f"{FOLDER}/{section}.md"
        pages[path] = reference.section(section)
        nav.setdefault(reference.program_of(section), []).append({section: path})
    return pages, [INDEX, ALL, LACKING, *({title: paths} for title, paths in nav.items())]


class Reference:
    """The flags of both training programs, as Markdown."""

    def __init__(self, root: Path) -> None:
        self.manuals = {
            name: Manual(program, tuple, width=100) for name, program in PROGRAMS.items()
        }
        text = (root / RELEASES).read_text(encoding="utf-8")
        lines = [line.split(" ", 2) for line in text.splitlines()]
        self.releases = {name: releases for name, releases, *_default in lines}
        porting = (root / PORTING).read_text(encoding="utf-8")
        self.other_defaults = dict(OTHER_DEFAULT.findall(porting.replace("\\|", "|")))
        self.sections: dict[str, dict[str, Flag]] = {}
        for manual in self.manuals.values():
            for name, flags in manual.sections.items():
                for flag in flags:
                    self.sections.setdefault(name, {}).setdefault(flag.field, flag)
        self.places = {
            spelled: f"{section}.md#{_anchor(flag)}"
            for section, flags in self.sections.items()
            for flag in flags.values()
            for spelled in (*flag.positive, *flag.negative)
        }

    def program_of(self, section: str) -> str:
        """Return the program that alone has a section; `EVERY` if both have it."""
        if section in engine_sections():
            return EVERY
        return next(name for name, manual in self.manuals.items() if section in manual.sections)

    def index(self) -> str:
        """Return the first page: how flags are answered, and a table of the sections."""
        rows = [
            (
                f"[{section}]({section}.md)",
                str(len(flags)),
                self.text(self._summary(section)),
                self.program_of(section),
            )
            for section, flags in self.sections.items()
        ]
        own = [
            (_code(f"{name} {words}".strip()), self.text(text))
            for name, (words, text) in OWN_FLAGS.items()
        ]
        trainer = [
            (_code(f"--{name}"), self.text(flag)) for name, flag in sorted(TRAINER_NAMES.items())
        ]
        return "\n\n".join(
            [
                "# Flags",
                "Flags have Megatron-LM's names and meanings. Where a flag differs, its entry says "
                f"how; [another page]({Path(LACKING).name}) has the flags of Megatron-LM that are "
                f"not here. [All flags]({Path(ALL).name}) stand on one page too. Underscores may "
                "replace dashes, and `--no-` or `--disable-` before a name switches it off. "
                "`python pretrain_gpt.py --help WORD` finds the same on a terminal.",
                _table(("section", "flags", "about", "program"), rows),
                "## Flags of the parser",
                _table(("flag", "meaning"), own),
                "## Names of other trainers",
                "An error about one of these names says which flag is meant.",
                _table(("there", "here"), trainer),
            ]
        )

    def all(self) -> str:
        """Return the page with a row for each flag."""
        flags = [flag for section in self.sections.values() for flag in section.values()]
        rows = [
            (self.text(f"`{flag.shown}`"), self.defaults(flag), self.text(self.meaning(flag)))
            for flag in sorted(flags, key=lambda flag: flag.positive[0])
        ]
        head = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n\n# All flags"
        intro = f"{len(rows)} flags of both programs; each leads to its entry."
        return "\n\n".join([head, intro, _table(("flag", "default", "meaning"), rows)])

    def section(self, name: str) -> str:
        """Return the page of a section."""
        flags = self.sections[name]
        summary = _sentence(self.text(self._summary(name)))
        program = self.program_of(name)
        only = "" if program == EVERY else f" Only `{program}` has them."
        entries = [self.entry(flag) for flag in flags.values()]
        return "\n\n".join([f"# {name} flags", summary + only, *entries])

    def entry(self, flag: Flag) -> str:
        """Return all about one flag."""
        words = "" if flag.choices else metavar(flag)
        lines = [f"## `{f'{flag.shown} {words}'.strip()}` {{ #{_anchor(flag)} }}", ""]
        lines += [_sentence(self.text(self.meaning(flag))), ""]
        facts = dict.fromkeys(LABELS, "")
        owners = [name for name, manual in self.manuals.items() if flag in manual.flags]
        facts |= self.manuals[owners[0]].facts(flag)
        if flag.choices:
            facts["values"] = ", ".join(f"`{choice}`" for choice in flag.choices)
        for label, title in LABELS.items():
            fact = facts[label]
            if label == "default":
                fact = self.defaults(flag)
            elif label in TEXTS:
                fact = self.text(fact)
            elif fact:
                fact = ", ".join(map(_code, fact.split(", ")))
            if fact:
                lines.append(f"- **{title}:** {fact}")
        if flag.renamed:
            renamed = (f"`{theirs}` is `{ours}`" for theirs, ours in flag.renamed.items())
            lines.append(f"- **Values by other names:** {', '.join(renamed)}")
        if len(owners) < len(PROGRAMS) and flag.section in engine_sections():
            lines.append(f"- **Program:** `{owners[0]}` only")
        lines.append(f"- **Megatron-LM:** {self.in_megatron(flag)}")
        return "\n".join(lines)

    def meaning(self, flag: Flag) -> str:
        owner = next(manual for manual in self.manuals.values() if flag in manual.flags)
        return owner.meaning(flag)

    def defaults(self, flag: Flag) -> str:
        """Return a flag's default; if the programs have different ones, that of each."""
        values = {
            name: manual.default(flag)
            for name, manual in self.manuals.items()
            if flag in manual.flags
        }
        if len(set(values.values())) == 1:
            return _value(next(iter(values.values())))
        return ", ".join(f"{_value(value) or 'none'} in {name}" for name, value in values.items())

    def in_megatron(self, flag: Flag) -> str:
        """Return which releases of Megatron-LM have a flag, and what differs there."""
        spelled = (*flag.positive, *flag.negative)
        releases = [self.releases[x].split("-") for x in spelled if x in self.releases]
        if not releases:
            return "has no such flag"
        first = min(first for first, _ in releases)
        last = max(last for _, last in releases)
        which = "" if (first, last) == ALL_RELEASES else f", in releases {first} to {last}"
        same = f"the same flag{which}"
        other = next((self.other_defaults[x] for x in spelled if x in self.other_defaults), None)
        if other is None:
            return same
        default = "no default" if other == "none" else f"the default {_value(other)}"
        return f"{same}, with {default}"

    def lacking(self) -> str:
        """Return the page of the flags of Megatron-LM that are not here."""
        entries = list({id(entry): entry for entry in megatron_flags().values()}.values())
        replaced = [
            (_code(f"--{name}"), self.text(f"`{entry.instead}`"))
            for entry in entries
            if entry.instead
            for name in entry.flags.split()
        ]
        idle = [
            (_sentence(self.text(entry.reason)), _names(entry))
            for entry in entries
            if entry.is_idle
        ]
        parts = [
            "# Megatron-LM's other flags",
            "The flags of Megatron-LM 0.16 to 0.20, and of programs that are built on it, that are "
            "no flags here. Each has an answer before a rank starts.",
            "## Spelled otherwise",
            "A note names the spelling that replaces the flag.",
            _table(("flag", "here"), replaced),
            "## Without effect",
            "A note says why the flag changes nothing.",
            _table(("why", "flags"), idle),
            "## Refused",
            "An error says what the flag is for and what to do instead. The flag's default in "
            "Megatron-LM is accepted.",
        ]
        refused = [entry for entry in entries if entry.remedy]
        for source in dict.fromkeys(entry.source for entry in refused):
            rows = [
                (_names(x), _sentence(self.text(x.reason)), _sentence(self.text(x.remedy)))
                for x in refused
                if x.source == source
            ]
            parts += [f"### {source}", _table(("flags", "what for", "instead"), rows)]
        return "\n\n".join(parts)

    def text(self, text: str) -> str:
        """Return a text as Markdown, in which each flag leads to its entry."""
        parts = []
        for part in CODE.split(text):
            if part.startswith("`") and part.strip("`").split(" ")[0] in self.places:
                parts.append(self._link(part.strip("`")))
            elif part.startswith("`"):
                parts.append(part.replace("|", "&#124;"))
            else:
                plain = re.sub(r"([\\*_<>\[\]#|])", r"\\\1", part)
                parts.append(NAME.sub(lambda match: self._link(match[0].replace("\\", "")), plain))
        return "".join(parts)

    def _link(self, words: str) -> str:
        """Return a flag, perhaps with a value, as a link to its entry if it has one."""
        place = self.places.get(words.split(" ")[0].replace("_", "-"))
        return f"[{_code(words)}]({place})" if place else _code(words)

    def _summary(self, section: str) -> str:
        return next(
            manual.summaries[section]
            for manual in self.manuals.values()
            if section in manual.summaries
        )


def _anchor(flag: Flag) -> str:
    return flag.positive[0].removeprefix("--")


def _code(words: str) -> str:
    return f"`{words}`"


def _value(default: str) -> str:
    return default if default in ("", "on", "off", "on a GPU") else _code(default)


def _names(entry: Inapplicable) -> str:
    return " ".join(_code(f"--{name}") for name in entry.flags.split())


def _sentence(text: str) -> str:
    capital = text[:1].upper() + text[1:]
    return capital if capital.endswith((".", "?", "!")) else f"{capital}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
