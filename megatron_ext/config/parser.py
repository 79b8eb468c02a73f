"""The only argument parser: it makes flags with Megatron-LM's names from dataclass fields.

There are four kinds of flags: flags that work as in Megatron-LM; flags without effect here, for
which a note says why; refused flags, whose error names an alternative; and unknown flags, whose
error names similar ones. `inapplicable` lists the second and third kind. All errors of a command
line are reported together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config import sections
from megatron_ext.config.finalize import errors_of_ranges, finalize
from megatron_ext.config.flags import Flag
from megatron_ext.config.inapplicable import Inapplicable, answer_to, by_flag, megatron_flags
from megatron_ext.config.run import Program, RunConfig, TaskFlags, engine_sections
from megatron_ext.config.sections import Elsewhere, Values, canonical
from megatron_ext.errors import ConfigError, FlagError, flags_of

if TYPE_CHECKING:
    from megatron_ext.config.files import ConfigFiles


@dataclass(frozen=True)
class ParsedArgs:
    """The result of parsing a command line.

    Attributes:
        config: the complete, checked configuration.
        notes: one line for each flag that has no effect or an old name, and other remarks.
        task: the one of the program's tasks that the flags choose.
        given: names of the fields whose flags are on the command line.
        print_config: whether the user asked to print the configuration instead of running.
        as_flags: the line of flags to print instead of the whole configuration; None without
            ``--as-flags``.
        with_values: see `Completion`.
    """

    config: RunConfig
    notes: list[str]
    task: Any
    given: frozenset[str]
    print_config: bool = False
    as_flags: str | None = None
    with_values: Completion | None = None


@dataclass(frozen=True)
class Completion:
    """Completes and checks the configuration of a command line with other values of some fields.

    It reads no words, so it is quick enough for a search through thousands of layouts.

    Attributes:
        bare: the configuration as flags, files and task set it, before anything is derived.
        task: the task that the flags choose.
        device: "cpu" or "cuda".
        refusals: the check of `finalize` for flags that a run refuses.
    """

    bare: RunConfig
    task: Any
    device: str
    refusals: Callable[[RunConfig, RunConfig], Iterable[str]]

    def __call__(self, values: Mapping[str, Any], world_size: int) -> RunConfig:
        """Return the checked configuration on ``world_size`` ranks; ``values`` are by field.

        Raises:
            ConfigError: with a sentence for each error.
        """
        given = self.bare.with_values(values)
        return finalize(given, self.task, world_size, self.device, self.refusals, self.bare)


def parse_args(
    argv: Sequence[str],
    program: Program,
    *,
    world_size: int,
    device: str,
    checkpoint_config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    elsewhere: Elsewhere | None = None,
    reading: Reading | None = None,
) -> ParsedArgs:
    """Parse and check a command line; raise a ConfigError with a sentence for each error.

    Args:
        argv: the words after the program's name.
        program: the program, which knows its flags and tasks.
        world_size: number of ranks that torchrun started; 0 computes it from the flags.
        device: "cpu" or "cuda".
        checkpoint_config: the configuration in a checkpoint, for ``--use-checkpoint-args``. Only
            values that `sections.described` permits are used, and given flags override them.
        defaults: values by field that replace the defaults of the task and of the fields.
        elsewhere: returns entries about other programs' flags, for errors about unknown flags.
        reading: the result of `read_words` for the same ``argv``; None to read them here. Do not
            use it afterwards: notes and errors are added to it.
    """
    sections.check_sections(program.sections, engine_sections())
    question = sections.help_question(argv)
    if question is not None:
        # Other runs need no texts of flags.
        from megatron_ext.config.help import answer

        raise SystemExit(answer(program, question, elsewhere or tuple))
    reading = reading or read_words(argv, program, elsewhere)
    if reading.lacks_file:
        raise ConfigError(reading.errors)
    user_values = reading.values
    described: Values = {}
    try:
        # The flags choose the task, whose defaults stand below them.
        replaced = _by_section(defaults or {}, program)
        task = program.choose(
            RunConfig.from_dict(_joined([replaced, user_values]), program.sections)
        )
        layers = [_by_section(task.defaults, program), replaced]
        bare = RunConfig.from_dict(_joined([*layers, user_values]), program.sections)
        described = _joined([task.described_model(bare)])
        if described:
            # The model may choose another task than the defaults of the flags do.
            values = _joined([replaced, described, user_values])
            task = program.choose(RunConfig.from_dict(values, program.sections))
            layers[0] = _by_section(task.defaults, program)
        layers.append(described)
        if checkpoint_config is not None:
            stored = sections.described(checkpoint_config, program.sections)
            layers.append(dict(task.stored_model(stored, bare)))
        values = _joined([*layers, user_values])
        reading.settle_old_spellings(values)
        bare = RunConfig.from_dict(values, program.sections)
        usual = {**task.defaults, **(defaults or {})}
        refusals = partial(_refusals, task, sections.all_flags(program), usual)
        config = finalize(bare, task, world_size, device, refusals)
    except ConfigError as error:
        messages = _on_described(error.messages, described, user_values)
        raise ConfigError([*reading.errors, *reading.causes(messages)]) from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if checkpoint_config is None and not defaults:
            raise
        # A flag's own value has its type; one of a file may have any.
        raise ConfigError(
            f"The model's flags that its checkpoint stores do not fit together ({error!r}); load "
            "another checkpoint, or give the flags yourself."
        ) from error
    reading.errors += reading.settled_errors(config)
    if reading.errors:
        raise ConfigError(reading.errors)
    entries = by_flag(task.answers(), _values(config))
    notes = [*reading.notes, *reading.idle_notes(entries, usual)]
    if bare.model.transformer_impl == "transformer_engine" and config.device == "cpu":
        notes.append(
            "`--transformer-impl` (transformer_engine) has no effect on a CPU: Transformer Engine "
            "needs a GPU, and torch's layers compute the same."
        )
    if bare.model.transformer_impl == "local":
        notes.append("`--transformer-impl` (local) is torch here: there are no other local layers.")
    notes += config.training.notes()
    if "lr_warmup_iters" not in values["optimizer"]:
        notes += config.optimizer.warmup_notes()
    if "muon_extra_scale_factor" not in values["optimizer"]:
        notes += config.optimizer.muon_notes()
    fields = frozenset(reading.given)
    answered = fields | reading.switched_on_by_files()
    notes += sections.withheld_notes(checkpoint_config or {}, program.sections, answered)
    line = reading.as_line(_joined(layers)) if reading.as_flags else None
    completion = Completion(bare, task, device, refusals)
    return ParsedArgs(config, notes, task, fields, reading.print_config, line, completion)


def all_errors(
    errors: Sequence[str],
    argv: Sequence[str],
    program: Program,
    *,
    input_errors: Callable[[Any, RunConfig], Iterable[str]],
    defaults: Mapping[str, Any] | None = None,
    elsewhere: Elsewhere | None = None,
) -> list[str]:
    """Return ``errors``, which were found before, and the other errors of a command line.

    Other errors are unreadable words, numbers out of range, and unusable inputs. Each error is
    returned once. With ``--print-config``, which needs no inputs, only ``errors`` are returned.

    Args:
        errors: sentences from an earlier check, which may have stopped at its first error.
        input_errors: takes the task and the configuration as given, without derived values, and
            returns a sentence for each unusable input.
        defaults, elsewhere: as in `parse_args`.
    """
    reading = read_words(argv, program, elsewhere)
    if reading.print_config:
        return list(errors)
    earlier = list(dict.fromkeys([*reading.errors, *errors]))
    replaced = _by_section(defaults or {}, program)
    user_values = reading.values
    try:
        task = program.choose(
            RunConfig.from_dict(_joined([replaced, user_values]), program.sections)
        )
        layers = [_by_section(task.defaults, program), replaced, user_values]
        config = RunConfig.from_dict(_joined(layers), program.sections)
    except ConfigError:
        return earlier
    earlier = list(dict.fromkeys([*earlier, *errors_of_ranges(config)]))
    if reading.lacks_file:
        return earlier
    told = {_subject(error) for error in earlier}
    further = reading.causes(input_errors(task, config))
    return earlier + [error for error in dict.fromkeys(further) if _subject(error) not in told]


def _replaced(named: str, value: str, earlier: str) -> str:
    """Return the note about a flag, ``named`` in backticks, whose last value replaces another."""
    shown = f"{named} ({value})" if value else named
    before = f"the value ({earlier})" if earlier else "the one"
    return f"{shown} takes the place of {before} that was given before it."


def _shown(value: Any) -> str:
    """Return a value as it is written on a command line, for a note."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _subject(error: str) -> tuple[str, str] | str:
    """Return the flag and the value that an error is about; equal results mean the same error.

    For an error that names no value, the result is the error itself.
    """
    if isinstance(error, FlagError) and error.value is not None:
        return error.subject, error.value
    return error


def _joined(layers: Iterable[Mapping[str, Mapping[str, Any]]]) -> Values:
    """Merge mappings ``{section: {field: value}}``; the last one that sets a field wins."""
    values: Values = {}
    for layer in layers:
        for section, entries in layer.items():
            values.setdefault(section, {}).update(entries)
    return values


def _on_described(errors: Iterable[str], described: Values, user_values: Values) -> Iterator[str]:
    """Yield the errors; those about a value that came with a model's files say so.

    Such a value cannot be changed, so its error asks for another value of the flag that it does
    not go with.

    Args:
        errors: the sentences about the configuration.
        described: values that the model's files gave, by section and field.
        user_values: values that the user gave, which stand above them.
    """
    given = {name for section in user_values.values() for name in section}
    theirs = {
        f"`--{name.replace('_', '-')}`"
        for section in described.values()
        for name in section
        if name not in given
    }
    for error in errors:
        others = [f"`{name}`" for name in sorted(flags_of(error)) if f"`{name}`" not in theirs]
        if others and isinstance(error, FlagError) and error.subject in theirs:
            value = f"{error.value}, which comes with the weights"
            yield FlagError(error.subject, value, error.rule, f"change {' or '.join(others)}")
        else:
            yield error


def _by_section(values: Mapping[str, Any], program: Program) -> Values:
    """Group values by the section that declares their field; drop values of unknown fields."""
    grouped: Values = {}
    for name, kind in sections.sections_of(program).items():
        fields = {field.name for field in dataclasses.fields(kind)}
        grouped[name] = {k: v for k, v in values.items() if k in fields}
    return grouped


def read_words(
    argv: Sequence[str], program: Program, elsewhere: Elsewhere | None = None
) -> Reading:
    """Read a command line and its ``--config`` files into values of fields, notes and errors.

    ``elsewhere`` returns entries about other programs' flags, so that the error about a flag that
    this program lacks can say which program has it.
    """
    reading = Reading(
        table=sections.spellings(sections.all_flags(program)),
        answers=megatron_flags() | by_flag(program.inapplicable),
        elsewhere=elsewhere or tuple,
    )
    entries: list[tuple[str, list[str]]] = []
    for word in reading.words(argv):
        if word.startswith("--"):
            entries.append((word, []))
        elif entries:
            entries[-1][1].append(word)
        else:
            reading.errors.append(
                f"`{word}` is no flag; flags start with two dashes, and a value follows its flag."
            )
    reading.spellings_given = frozenset(canonical(word) for word, _ in entries)
    for word, values in entries:
        reading.read_flag(word, canonical(word), values)
    reading.finish(program)
    return reading


@dataclass
class Reading:
    """The state of parsing a command line: the known flags, and the results so far.

    Attributes:
        table: spelling -> (flag, True), or (flag, False) for spellings such as ``--no-x``.
        answers: spelling of a flag that the program lacks -> entry that tells the user about it.
        elsewhere: returns entries about other programs' flags.
        values: the values read so far, by section and field; in the end also those of the files,
            which those of the command line replace.
        given: for the field of each flag on the command line, the flag and its spelling there, in
            backticks.
        config_files: the paths of the ``--config`` files.
        layout: the name of the chosen layout of these files; None for none.
        files: what the files say; None without files.
        unread: main spellings of the flags whose values could not be read.
        refused: for each field or flag whose last value is refused, the errors and that value.
        spellings_given: the flags on the command line, with dashes for underscores.
        renamed: for each new spelling, the old spelling that the user gave.
    """

    table: dict[str, tuple[Flag, bool]]
    answers: dict[str, Inapplicable]
    elsewhere: Elsewhere
    values: Values = field(default_factory=dict)
    given: dict[str, tuple[Flag, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    layout: str | None = None
    files: ConfigFiles | None = None
    print_config: bool = False
    as_flags: bool = False
    no_position_embedding: bool = False
    unread: set[str] = field(default_factory=set)
    refused: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    spellings_given: frozenset[str] = frozenset()
    renamed: dict[str, str] = field(default_factory=dict)

    def words(self, argv: Sequence[str]) -> Iterator[str]:
        """Yield a command line's words; split ``--a=b`` in two; replace old flags and add notes."""
        for word in argv:
            name, equals, value = word.partition("=") if word[:2] == "--" else (word, "", "")
            entry = answer_to(canonical(name), self.answers) if word[:2] == "--" else None
            if entry is not None and entry.instead:
                self.notes.append(entry.sentence(f"`{name}`"))
                now = entry.instead.split()
                self.renamed |= {flag: name for flag in now if flag.startswith("--")}
                yield from now
            else:
                yield name
            if equals:
                yield value

    def read_flag(self, word: str, name: str, values: list[str]) -> None:
        """Store the values of a flag, or add a note or an error about the flag.

        ``word`` is the flag as the user wrote it; ``name`` is the same flag with two leading dashes
        and with dashes for underscores.
        """
        if name in ("--print-config", "--as-flags"):
            self._read_switch(word, name, values)
        elif name == "--layout":
            self._read_layout(word, values)
        elif name == "--config":
            self.config_files.extend(values)
            if not values:
                self.errors.append(FlagError(word, None, "takes a file, but got none"))
        elif name == "--no-position-embedding":
            self.no_position_embedding = True
        elif name in self.table:
            self._read_value(word, values, *self.table[name])
        elif (off := name.replace("--disable-", "--no-", 1)) in self.table:
            self._read_value(word, values, *self.table[off])
        elif entry := answer_to(name, self.answers) or answer_to(name, by_flag(self.elsewhere())):
            self._answer(word, name, values, entry)
        else:
            renamed = [old for old, entry in self.answers.items() if entry.instead]
            accepted = [*self.table, *renamed, *sections.OWN_FLAGS]
            near = difflib.get_close_matches(name, accepted, n=3, cutoff=0.6)
            usual = sections.usual_flag(name)
            near = [usual] if usual in self.table else near
            self.errors.append(sections.unknown(f"`{word}`", [f"`{x}`" for x in near]))

    def _read_switch(self, word: str, name: str, values: list[str]) -> None:
        """Store ``--print-config`` or ``--as-flags``, which take no value."""
        if values:
            rule = f"takes no value, but got {' '.join(values)}"
            self.errors.append(FlagError(word, None, rule, "leave it out"))
        elif name == "--print-config":
            self.print_config = True
        else:
            self.as_flags = True

    def _read_layout(self, word: str, values: list[str]) -> None:
        """Store the name of the chosen layout."""
        if len(values) != 1:
            self.errors.append(
                FlagError(word, None, f"takes the name of one layout, but got {len(values)}")
            )
            return
        if self.layout not in (None, values[0]):
            self.notes.append(_replaced(f"`{word}`", values[0], self.layout or ""))
        self.layout = values[0]

    def _answer(self, word: str, name: str, values: list[str], entry: Inapplicable) -> None:
        """Add a note or an error about a flag that the program lacks.

        ``word`` is the flag as the user wrote it; ``name`` is the same flag with two leading dashes
        and with dashes for underscores. ``entry`` decides between note and error.
        """
        default = entry.defaults.get(name.removeprefix("--"))
        entry = entry.beside(self.spellings_given)
        self._forget_refusal(name, f"`{word}`", values)
        if not entry.remedy:
            self.notes.append(entry.sentence(f"`{word}`"))
        elif entry.source and values == [default]:
            self.notes.append(
                f"`{word}` ({default}) has no effect: it is {entry.source}'s default, and what is "
                "done here."
            )
        else:
            self._refuse(name, [entry.sentence(f"`{word}`")], values)

    def _refuse(self, name: str, errors: Sequence[str], values: list[str]) -> None:
        """Add the errors about the values of a field or flag, unless it is given again later."""
        self.errors += errors
        self.refused[name] = list(errors), " ".join(values)

    def _forget_refusal(self, name: str, named: str, values: list[str]) -> None:
        """Take back the errors about a field or flag that is given again: the last value counts.

        A note says which value is replaced. ``named`` is the flag in backticks.
        """
        errors, earlier = self.refused.pop(name, ([], ""))
        for error in errors:
            self.errors.remove(error)
        if errors:
            self.notes.append(_replaced(named, " ".join(values), earlier))

    def _read_value(self, word: str, values: list[str], flag: Flag, positive: bool) -> None:
        named = self._spelled(word)
        self._forget_refusal(flag.field, named, values)
        self.unread.discard(flag.positive[0])
        value: Any = positive
        if flag.type is bool and values:
            rule = f"takes no value, but got {' '.join(values)}"
            self._refuse(flag.field, [FlagError(named, None, rule, "leave it out")], values)
        if flag.type is not bool:
            try:
                value = sections.value_of_words(flag, named, values)
            except ConfigError as error:
                self._refuse(flag.field, error.messages, values)
                self.unread.add(flag.positive[0])
                return
            self.notes += sections.renaming_notes(flag, named, values)
        entries = self.values.setdefault(flag.section, {})
        earlier = entries.get(flag.field, value)
        if earlier != value:
            self.notes.append(_replaced(named, _shown(value), _shown(earlier)))
        entries[flag.field] = value
        self.given[flag.field] = flag, named

    def _spelled(self, word: str) -> str:
        """Return a flag in backticks, followed by the old spelling if the user gave that."""
        old = self.renamed.get(word)
        return f"`{word}`" if old is None else f"`{word}` (given as `{old}`)"

    def causes(self, errors: Iterable[str]) -> list[str]:
        """Return ``errors`` without those about flags whose values could not be read.

        Unreadable values have been reported already. If the user gave a flag by an old spelling,
        the errors about the flag mention that spelling too.
        """
        return [
            self._with_old_spellings(error)
            for error in errors
            if flags_of(error).isdisjoint(self.unread)
        ]

    def _with_old_spellings(self, error: str) -> str:
        for name, old in self.renamed.items():
            if isinstance(error, FlagError) and name in error.flags and old not in error.flags:
                error = error.with_note(f"`{name}` was given as `{old}`")
        return error

    def finish(self, program: Program) -> None:
        """Read the ``--config`` files, and check what goes only with another flag."""
        if self.as_flags and not self.print_config:
            self.errors.append(FlagError("--as-flags", None, "needs `--print-config`", "give both"))
        if not self.config_files and self.layout is None:
            return
        from megatron_ext.config.files import ConfigFiles

        files = ConfigFiles(program, self.table, self.answers, self.elsewhere, self.layout)
        for path in self.config_files:
            files.read(path)
        files.finish()
        self.files = files
        self.errors += files.errors
        self.notes += files.all_notes()
        self.unread |= files.unread(self.values)
        self.values = _joined([files.below(self.values), self.values])

    def idle_notes(
        self, entries: Mapping[str, Inapplicable], usual: Mapping[str, Any]
    ) -> list[str]:
        """Return a note for each given flag, and each value of a file, without effect in the run.

        A file's value that is the default anyway gets none, since a printed configuration has all
        values.

        Args:
            entries: the entries that apply in the run, by the flag's main spelling.
            usual: the task's own defaults, by field, beside those of the flags.
        """
        in_files = {
            name: (entry.flag, entry.named)
            for name, entry in (self.files.entries() if self.files else {}).items()
            if entry.value not in (entry.flag.default, usual.get(name, entry.flag.default))
        }
        notes = []
        for flag, named in (in_files | self.given).values():
            answer = entries.get(flag.positive[0])
            if answer is not None and not answer.remedy:
                notes.append(answer.sentence(named))
        return notes

    def switched_on_by_files(self) -> frozenset[str]:
        """Return the names of the boolean fields that the files set to True."""
        entries = self.files.entries() if self.files else {}
        return frozenset(name for name, entry in entries.items() if entry.value is True)

    def settled_errors(self, config: RunConfig) -> Iterator[str]:
        """Yield an error for each entry of a file that sets a refused flag to another value."""
        if self.files is not None:
            yield from self.files.settled_errors(config)

    @property
    def lacks_file(self) -> bool:
        """Return whether a ``--config`` file could not be used, so that its values are missing."""
        return self.files is not None and self.files.unusable

    def as_line(self, lower: Values) -> str:
        """Return the given values as one line of flags that makes the same configuration.

        ``lower`` holds the values that given ones replace, by section and field.
        """
        from megatron_ext.config.flag_line import flag_line

        return flag_line(self.values, lower, self.table)

    def settle_old_spellings(self, values: Values) -> None:
        """Apply a given number format and ``--no-position-embedding`` to ``values``.

        If ``--bf16``, ``--no-bf16`` or ``--fp16`` is given, bf16 is no longer the default on a GPU.
        ``--no-position-embedding`` adds an error if the model has a learned position table, else
        a note that the flag has no effect.
        """
        precision = values.get("precision", {})
        if "bf16" in precision or precision.get("fp16"):
            precision["bf16_on_gpu"] = False
        if not self.no_position_embedding:
            return
        given = {k: v for section in values.values() for k, v in section.items()}
        kind = given.get("position_embedding_type", "learned_absolute")
        if kind in ("rope", "yarn", "none"):
            self.notes.append(
                f"`--no-position-embedding` has no effect: `--position-embedding-type {kind}` has "
                "no learned table."
            )
        else:
            self.errors.append(
                FlagError(
                    "--no-position-embedding",
                    None,
                    f"contradicts `--position-embedding-type` ({kind})",
                    "use `--position-embedding-type none`",
                )
            )


def _values(config: RunConfig) -> dict[str, Any]:
    """Return the values of all fields by name, and the device as "device"."""
    values = {k: v for section in config.by_name().values() for k, v in vars(section).items()}
    return {**values, "device": config.device}


def _refusals(
    task: TaskFlags,
    flags: Iterable[Flag],
    usual: Mapping[str, Any],
    decided: RunConfig,
    run: RunConfig,
) -> Iterator[str]:
    """Yield a sentence for each flag that this run refuses and whose value is not a default.

    Args:
        task: the task, whose `TaskFlags.answers` say which flags are refused.
        flags: the flags to check.
        usual: the task's own defaults, by field, accepted like the defaults of the flags.
        decided: the configuration as the user and the task set it. Its values are checked, so that
            a value which the engine derives for a refused flag is no error.
        run: the completed configuration, from which the entries tell whether they apply.
    """
    entries = by_flag(task.answers(), _values(run))
    by_section = decided.by_name()
    for flag in flags:
        entry = entries.get(flag.positive[0])
        if entry is None or not entry.remedy:
            continue
        value = getattr(by_section[flag.section], flag.field)
        if value not in (flag.default, usual.get(flag.field, flag.default)):
            yield entry.sentence(f"`{flag.shown}`")
