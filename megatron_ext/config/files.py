"""Reads ``--config`` files: values of flags, and layouts, one of which ``--layout`` chooses.

A file holds names of flags with their values, in any order or grouped by section. Its block
``layouts`` holds further such mappings by name; the values of the chosen layout take the place of
the file's other values. A later file takes precedence over an earlier one, its layout included.
A file that cannot be used at all gets one error, and the run's configuration is not checked
further: each value that the file should have given would be reported as missing.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext.config import sections
from megatron_ext.config.inapplicable import Inapplicable, answer_to, by_flag
from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import ConfigError, FlagError, did_you_mean

if TYPE_CHECKING:
    from megatron_ext.config.flags import Flag
    from megatron_ext.config.run import Program, RunConfig
    from megatron_ext.config.sections import Elsewhere, Values

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NO_LAYOUT = "none"
"""The value of ``--layout`` that chooses none of a file's layouts, without a note about them."""
SHOWN = 3
"""The most entries of one kind that an error names."""
ASSUMED = ("dry_run_nodes", "dry_run_gpu")
"""Fields of what a dry run assumes, which a file may hold for any run; only a dry run uses them."""


@dataclass(frozen=True)
class Entry:
    """A value in a file.

    Attributes:
        named: the entry as notes and errors show it, such as "`lr` in `run.yaml`".
        flag: the flag that it sets.
        value: the flag's value.
    """

    named: str
    flag: Flag
    value: Any


@dataclass
class Block:
    """The entries of a file outside its layouts, or those of one layout.

    Attributes:
        entries: the entries of flags that the program accepts, by field.
        settled: the entries of flags that the program always refuses; `settled_errors` checks them.
        notes: sentences about entries without effect.
        unread: the flags whose values could not be read.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    settled: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[Flag] = field(default_factory=list)


@dataclass
class ConfigFiles:
    """Reads ``--config`` files one after the other, and keeps what their entries say together.

    Attributes:
        program: the program, which knows its flags.
        table: spelling -> (flag, True), or (flag, False) for spellings such as ``--no-x``.
        answers: spelling of a flag that the program lacks -> entry that tells the user about it.
        elsewhere: returns entries about other programs' flags.
        layout: the name of the chosen layout; None for none.
        chosen: the blocks that count: of each file, its entries and then those of the layout.
        layouts: names of all layouts in the files that have been read.
        errors: sentences about wrong entries, also of layouts that are not chosen.
        unusable: whether a file could not be used at all, so that its values are missing.
    """

    program: Program
    table: Mapping[str, tuple[Flag, bool]]
    answers: Mapping[str, Inapplicable]
    elsewhere: Elsewhere
    layout: str | None
    chosen: list[Block] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unusable: bool = False
    _foreign: dict[str, list[str]] = field(default_factory=dict)
    """Another program -> names of the entries of the file being read that set its flags."""

    def read(self, path: str) -> None:
        """Read one file."""
        place = _place(path)
        if place != path:
            self.notes.append(f"`{path}` is not in this folder, so {place} is read.")
        if path.endswith(".toml"):
            self._give_up(FlagError("--config", path, "must be YAML, and its name ends as TOML's"))
            return
        try:
            content = _content(place)
        except UnreadableFile as error:
            remedy = _remedy(path) if error.missing else ""
            self._give_up(FlagError("--config", path, f"cannot be read: {error.reason}", remedy))
            return
        if content is None:
            self.notes.append(f"`{path}` is empty, so it gives no values.")
            return
        if not isinstance(content, dict):
            self._give_up(FlagError("--config", path, "must hold names and values"))
            return
        if (key := self._misnamed_layouts(content)) is not None:
            rule = "holds blocks of flags by name, as only the block of layouts does"
            remedy = f"call it `{sections.LAYOUTS}`"
            self._give_up(FlagError(f"`{key}` in `{path}`", None, rule, remedy))
            return
        self._foreign = {}
        self._read_content(content, path)
        for program, names in self._foreign.items():
            shown = ", ".join(f"`{name}`" for name in names[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            rule = f"sets flags of {program}, which this program lacks: {shown}{more}"
            remedy = f"give the file to {program}, or leave them out"
            self._give_up(FlagError("--config", path, rule, remedy))

    def _give_up(self, error: FlagError) -> None:
        """Add the error about a file that cannot be used at all."""
        self.errors.append(error)
        self.unusable = True

    def _misnamed_layouts(self, content: Mapping[Any, Any]) -> str | None:
        """Return the key of a block that holds blocks, other than `LAYOUTS`; None if none does."""
        for key, block in content.items():
            if key == sections.LAYOUTS or not isinstance(block, dict):
                continue
            inner = {sections.canonical(str(x)) for x, y in block.items() if isinstance(y, dict)}
            if inner - self.table.keys() - self._derived:
                return str(key)
        return None

    def _read_content(self, content: Mapping[Any, Any], path: str) -> None:
        """Read the entries of one file and of its layouts."""
        layouts = content.get(sections.LAYOUTS) or {}
        rest = {key: value for key, value in content.items() if key != sections.LAYOUTS}
        self.chosen.append(self._block(rest, f"`{path}`"))
        if not isinstance(layouts, dict):
            rule = "must hold the names of layouts, each with names and values"
            self.errors.append(FlagError(f"`{sections.LAYOUTS}` in `{path}`", layouts, rule))
            return
        for key, values in layouts.items():
            name = str(key)
            where = f"the layout {name} in `{path}`"
            if not isinstance(values, dict):
                self.errors.append(FlagError(where, values, "must hold names and values"))
                continue
            self.layouts.append(name)
            block = self._block(values, where)
            if name == self.layout:
                self.chosen.append(block)
        if layouts and self.layout is None:
            self.notes.append(
                f"`{path}` has layouts, but none is chosen; choose by `--layout`: "
                f"{', '.join(map(str, layouts))}, or {NO_LAYOUT}."
            )

    def finish(self) -> None:
        """Add an error if no file has the chosen layout; call it after the last file."""
        if self.unusable or self.layout is None or self.layout in (NO_LAYOUT, *self.layouts):
            return
        if self.layouts:
            names = ", ".join(dict.fromkeys(self.layouts))
            rule = f"must be a layout of the `--config` file, which has {names}"
            self.errors.append(FlagError("--layout", self.layout, rule))
        elif not self.errors:
            self.errors.append(without_layouts(self.layout))

    def below(self, given: Values) -> Values:
        """Return the values of all files for a run whose command line gives ``given``.

        What a dry run assumes is left out for a run that is none.
        """
        entries = self.entries()
        dry = given.get("planning", {}).get("dry_run", _value_of(entries.get("dry_run")))
        values: Values = {}
        for name, entry in entries.items():
            if dry or name not in ASSUMED:
                values.setdefault(entry.flag.section, {})[name] = entry.value
        return values

    def entries(self) -> dict[str, Entry]:
        """Return the entries that count, by field."""
        return {name: entry for block in self.chosen for name, entry in block.entries.items()}

    def unread(self, given: Values) -> set[str]:
        """Return the main spellings of the flags that have no value, as the last one is wrong.

        ``given`` are the values on the command line, which stand above those of files.
        """
        last: dict[str, str] = {}
        for block in self.chosen:
            for name in block.entries:
                last.pop(name, None)
            last |= {flag.field: flag.positive[0] for flag in block.unread}
        said = {name for section in given.values() for name in section}
        return {spelling for name, spelling in last.items() if name not in said}

    def all_notes(self) -> list[str]:
        """Return the notes about the files and about the entries that count."""
        return [*self.notes, *(note for block in self.chosen for note in block.notes)]

    def settled_errors(self, config: RunConfig) -> Iterator[str]:
        """Yield an error for each entry that sets a refused flag to another value.

        The flag's default and the value in ``config``, the run's configuration, are accepted.
        """
        for entry in (entry for block in self.chosen for entry in block.settled):
            flag = entry.flag
            has = getattr(config.by_name()[flag.section], flag.field)
            if entry.value not in (list(has) if isinstance(has, tuple) else has, flag.default):
                answer = self.answers[flag.positive[0]]
                yield answer.sentence(f"{entry.named} ({entry.value})")

    def _block(self, content: Mapping[Any, Any], where: str) -> Block:
        """Return the entries of a mapping, with or without sections; collect their errors."""
        block = Block()
        for key, value in content.items():
            if key == "device":
                continue
            for name, each in value.items() if isinstance(value, dict) else [(key, value)]:
                self._read_entry(block, str(name), each, f"`{name}` in {where}")
        return block

    def _read_entry(self, block: Block, key: str, value: Any, named: str) -> None:
        """Add an entry to ``block``, or a note or an error about it.

        ``named`` is the entry as notes and errors show it.
        """
        name = sections.canonical(key)
        answers = self.answers
        flag, _ = self.table.get(name, (None, True))
        if value is None and (flag is None or flag.type is bool):
            return  # A null asks for nothing, and Megatron-LM's files have many.
        if name in self.table:
            self._read_value(block, *self.table[name], value, named)
        elif (lacking := self._lacking.get(name)) is not None:
            block.settled.append(Entry(named, lacking, value))
        elif name in self._derived:
            return
        elif entry := answer_to(name, answers) or answer_to(name, by_flag(self.elsewhere())):
            # A switch that is off asks for nothing. Configurations that earlier versions printed
            # hold the defaults of other programs' flags.
            default = entry.defaults.get(name.removeprefix("--"))
            if value is None or value is False or value == default:
                return
            if entry.program:
                names = self._foreign.setdefault(entry.program, [])
                names += [] if key in names else [key]
            elif entry.instead or entry.remedy:
                self.errors.append(entry.sentence(f"{named} ({value})"))
            else:
                block.notes.append(entry.sentence(named))
        elif name in sections.OWN_FLAGS:
            rule = "belongs on the command line, not in a file"
            self.errors.append(FlagError(named, value, rule, f"give `{name}` there"))
        else:
            fields = {flag.field for flag, _ in self.table.values()}
            near = sorted(difflib.get_close_matches(key.replace("-", "_"), fields, n=2))
            usual = sections.usual_flag(name)
            if usual is not None and usual in self.table:
                near = [self.table[usual][0].field]
            self.errors.append(sections.unknown(named, near))

    def _read_value(self, block: Block, flag: Flag, positive: bool, value: Any, named: str) -> None:
        try:
            if positive:
                read = sections.value_of_entry(flag, named, value)
            elif isinstance(value, bool):
                read = not value
            else:
                raise ConfigError.about(named, value, "must be true or false")
        except ConfigError as error:
            self.errors += error.messages
            block.unread.append(flag)
            return
        given = value if isinstance(value, list) else [value]
        block.notes += sections.renaming_notes(flag, named, map(str, given))
        earlier = block.entries.get(flag.field)
        if earlier is not None and earlier.value != read:
            block.notes.append(
                f"{named} ({read}) takes the place of the value ({earlier.value}) that was given "
                "before it."
            )
        block.entries[flag.field] = Entry(named, flag, read)

    @functools.cached_property
    def _lacking(self) -> dict[str, Flag]:
        """Return the flags that the program always refuses, by their first spelling."""
        lacking = sections.lacking_flags(self.program)
        return {flag.positive[0]: flag for flag in lacking.values()}

    @functools.cached_property
    def _derived(self) -> set[str]:
        """Return the spellings of fields that follow from others.

        Printed configurations hold them too.
        """
        return {
            sections.canonical(field.name)
            for kind in sections.sections_of(self.program).values()
            for field in dataclasses.fields(kind)
            if "help" not in field.metadata
        }


def _place(path: str) -> str:
    """Return ``path``, or where the package has that recipe if ``path`` does not exist.

    Who has installed the package without its repository has recipes nowhere else.
    """
    if os.path.exists(path) or os.path.dirname(path) != "recipes":
        return path
    recipe = os.path.join(_PACKAGE, path)
    return recipe if os.path.isfile(recipe) else path


def _content(path: str) -> Any:
    """Return what a file holds, None if that is nothing.

    A program may parse its flags many times, but reads a file again only if it has changed, and a
    shell's pipe, as in ``--config <(command)``, never.
    """
    version = os.stat(path).st_mtime_ns if os.path.isfile(path) else 0
    return _content_of(path, version)


@functools.lru_cache(maxsize=8)
def _content_of(path: str, _version: int) -> Any:
    return read_yaml(path)


def _remedy(path: str) -> str:
    """Return advice about a path at which there is no file, such as a file with a similar name."""
    if "=" in path:
        return "files are followed by flags with two dashes, such as `--lr 1e-4`"
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return f"{folder} is no folder, seen from {os.getcwd()}"
    return did_you_mean(name, names, shown=functools.partial(os.path.join, folder))


def _value_of(entry: Entry | None) -> Any:
    return None if entry is None else entry.value


def without_layouts(layout: str) -> FlagError:
    """Return the error about ``--layout`` in a run whose files, if any, have no layouts."""
    return FlagError(
        "--layout",
        layout,
        "needs a `--config` file with a block `layouts`",
        "give one, such as recipes/llama3_8b.yaml, or leave it out",
    )
