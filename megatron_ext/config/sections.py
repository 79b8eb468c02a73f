"""Sections that users add to the configuration: frozen dataclasses whose fields are flags.

A task names them (``Task(sections=(MyFlags,), ...)``). They appear in ``--help``, ``--config``
files and checkpoints beside the engine's sections::

    @dataclass(frozen=True)
    class MyFlags:
        hidden_cap: float | None = flag(
            None, "bound of the hidden states before the head", bounds=Range(0, 1e6, above=True)
        )

``config.section(MyFlags).hidden_cap`` reads a value. A number outside of its `bounds` is refused,
and so are NaN and infinity. A section may have a method ``errors(config) -> list[str]``, which
returns a sentence for each value that cannot be run. It may be a plain string or a `FlagError`,
which is not shown if it names a flag whose own value is unreadable or out of range. A section that
derives from `LayerSection` may also set fields of TransformerConfig, and so decide what the layers
compute. `section_of` makes a section from argparse's arguments, for Megatron-LM's
``extra_args_provider``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

from megatron_ext.config.flags import Flag, flag, flags_of, from_checkpoint
from megatron_ext.config.inapplicable import Inapplicable, by_flag, megatron_flags
from megatron_ext.config.parallel import ABBREVIATIONS
from megatron_ext.config.run import (
    Program,
    engine_sections,
    in_present_sections,
    named,
    section_name,
)
from megatron_ext.errors import CheckpointError, ConfigError, FlagError

Values = dict[str, dict[str, Any]]
"""Name of a section -> name of a field -> value."""
Elsewhere = Callable[[], Sequence[Inapplicable]]
"""A function that returns entries about other programs' flags, to explain an unknown flag."""
OWN_FLAGS = {
    "--help": ("[WORD ...]", "this overview, or help on what is asked"),
    "-h": ("[WORD ...]", "the same as --help"),
    "--config": ("FILE.yaml", "the same names from a file; the command line wins"),
    "--layout": ("NAME", "the values of this layout too, one of the file's `layouts`, or none"),
    "--print-config": ("", "print the resolved configuration as YAML and stop"),
    "--as-flags": ("", "with --print-config: print one line of flags instead"),
    "--no-position-embedding": ("", "refused or without effect: use `--position-embedding-type`"),
}
"""Flags that the parser handles itself, with their values and meanings."""
TRAINER_NAMES = {
    "learning-rate": "--lr",
    "max-steps": "--train-iters",
    "num-train-epochs": "--train-epochs",
    "per-device-train-batch-size": "--micro-batch-size",
    "gradient-accumulation-steps": "--global-batch-size",
    "gradient-checkpointing": "--recompute-granularity",
    "activation-checkpointing": "--recompute-granularity",
    "gradient-accumulation": "--global-batch-size",
    "max-grad-norm": "--clip-grad",
    "warmup-steps": "--lr-warmup-iters",
    "warmup-ratio": "--lr-warmup-fraction",
    "lr-scheduler-type": "--lr-decay-style",
    "model-name-or-path": "--load-hf",
    "max-length": "--seq-length",
    "max-seq-length": "--seq-length",
    "output-dir": "--save",
    "resume-from-checkpoint": "--load",
    "logging-steps": "--log-interval",
    "save-steps": "--save-interval",
    "eval-steps": "--eval-interval",
    "fsdp": "--data-parallel-sharding-strategy",
    "adam-epsilon": "--adam-eps",
    "optim": "--optimizer",
    "dataloader-num-workers": "--num-workers",
    "save-total-limit": "--keep-last",
    "load-best-model-at-end": "--keep-best",
    "eval-strategy": "--eval-interval",
    "save-strategy": "--save-interval",
    "logging-dir": "--tensorboard-dir",
    "run-name": "--wandb-exp-name",
    "report-to": "--wandb-project",
    "attn-implementation": "--attention-backend",
    "dataset-name": "--data-path",
    "train-file": "--data-path",
    "lora-r": "--lora-rank",
    "steps": "--train-iters",
    "local-batch-size": "--micro-batch-size",
    "seq-len": "--seq-length",
    "max-norm": "--clip-grad",
    "tensor-parallel-degree": "--tensor-model-parallel-size",
    "pipeline-parallel-degree": "--pipeline-model-parallel-size",
    "context-parallel-degree": "--context-parallel-size",
    "expert-parallel-degree": "--expert-model-parallel-size",
    "data-parallel-shard-degree": "--data-parallel-sharding-strategy",
    "devices": "--nproc-per-node",
}
"""The flags by the names that other trainers (Hugging Face's, torchtitan) give them, without
dashes and without the sections that torchtitan puts before a dot."""
LAYOUTS = "layouts"
"""The key of a ``--config`` file under which its layouts are, where sections have their names."""


_OF_SHELL = re.compile(r"(~|\$\{?[A-Za-z_]\w*\}?)/\S*")
"""Paths whose beginning a shell replaces, but neither a file nor a program started without one."""


def usual_flag(name: str) -> str | None:
    """Return the flag that ``name``, with or without dashes, abbreviates or is elsewhere.

    Of a name with sections before a dot, such as ``optimizer.lr``, the last part counts.
    """
    path, _, bare = canonical(name).removeprefix("--").rpartition(".")
    return ABBREVIATIONS.get(bare) or TRAINER_NAMES.get(bare) or (f"--{bare}" if path else None)


def help_question(argv: Sequence[str]) -> str | None:
    """Return the words after ``--help`` or ``-h``; "" if there are none, None without the flag.

    One flag may follow, as in ``--help --lr``, or the words up to the next flag. ``--help=lr`` is
    the same as ``--help lr``.
    """
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name not in ("--help", "-h"):
            continue
        asked = [value] if equals else list(argv[index + 1 :])
        if asked and asked[0].startswith("-"):
            return asked[0].partition("=")[0]
        return " ".join(takewhile(lambda word: not word.startswith("-"), asked))
    return None


def check_sections(sections: Sequence[type], engine: Mapping[str, type]) -> None:
    """Raise a ConfigError unless added sections are frozen dataclasses whose fields are flags.

    Names of sections, names of fields and flags must also be unique: neither another section nor
    the parser may use them already. ``engine`` has the classes of the engine's sections, by name.
    """
    errors: list[str] = []
    renamed = [name for name, entry in megatron_flags().items() if entry.instead]
    taken = dict.fromkeys([*OWN_FLAGS, LAYOUTS, *renamed], "the parser")
    for name, kind in engine.items():
        taken |= dict.fromkeys(_names(name, kind), f"the section `{name}`")
    for kind in sections:
        wrong = list(_shape_errors(kind))
        errors += wrong
        names = [] if wrong else _names(section_name(kind), kind)
        errors += [
            f"The section `{kind.__name__}` has the name `{name}`, which is that of "
            f"{taken[name]}; choose another."
            for name in names
            if name in taken
        ]
        taken |= dict.fromkeys(names, f"the section `{section_name(kind)}`")
    if errors:
        raise ConfigError(errors)


def _names(name: str, kind: Any) -> list[str]:
    """Return all names that a section uses.

    They are the names of the section and of the fields, and the spellings of the flags.
    """
    spelled = [(*flag.positive, *flag.negative) for flag in flags_of(name, kind)]
    return [name, *(field.name for field in dataclasses.fields(kind)), *chain(*spelled)]


def _shape_errors(kind: Any) -> Iterator[str]:
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        yield (
            f"The section `{getattr(kind, '__name__', kind)}` must be a frozen dataclass; write "
            "`@dataclass(frozen=True)` above its class."
        )
        return
    for field in dataclasses.fields(kind):
        if not {"help", "derived"} & set(field.metadata):
            yield (
                f"The field `{field.name}` of the section `{kind.__name__}` must be a flag; "
                "declare it with `megatron_ext.config.flags.flag(default, help)`."
            )
    for declared in flags_of(section_name(kind), kind):
        if declared.type not in (bool, int, float, str):
            name = getattr(declared.type, "__name__", declared.type)
            yield (
                f"The field `{declared.field}` of the section `{kind.__name__}` is of type "
                f"{name}, but a flag must be a bool, an int, a float, a str or a list of "
                "them; convert it where it is read."
            )


Provider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

_TRUE = argparse._StoreTrueAction
_FALSE = argparse._StoreFalseAction


def section_of(provider: Provider, name: str = "ExtraArgs") -> type:
    """Return a section class whose flags are the arguments that ``provider`` adds to a parser.

    ``name`` is the name of the class.
    """
    parser = argparse.ArgumentParser(add_help=False)
    provider(parser)
    fields = [_field(action) for action in parser._actions]
    required = [action.dest for action in parser._actions if action.required]

    def errors(self: Any, config: Any) -> list[FlagError]:
        missing = [name for name in required if getattr(self, name) is None]
        return [
            FlagError(f"--{name.replace('_', '-')}", None, "is required", "give it")
            for name in missing
        ]

    namespace = {"errors": errors, "__module__": __name__}
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace=namespace)


def _field(action: argparse.Action) -> tuple[str, Any, Any]:
    """Return name, type and dataclass field of the flag that replaces an argparse argument.

    Raises:
        ConfigError: no flag can replace the argument.
    """
    shown = action.option_strings[0] if action.option_strings else action.dest
    options = tuple(x for x in action.option_strings if x.startswith("--"))
    stores = type(action) in (argparse._StoreAction, _TRUE, _FALSE)
    simple = action.type in (None, int, float, str) and action.nargs != "?"
    if not stores or not simple or not options:
        raise ConfigError(
            f"The argument `{shown}` of `extra_args_provider` must be an option with two dashes "
            "that stores True, False, or values of int, float or str; declare it as a field of a "
            "section (see megatron_ext.config.sections)."
        )
    meaning = action.help or "an argument of the program's own"
    if isinstance(action, (_TRUE, _FALSE)):
        spelled: dict[str, Any] = {"names" if isinstance(action, _TRUE) else "negative": options}
        return action.dest, bool, flag(bool(action.default), meaning, **spelled)
    kind: Any = action.type or str
    nargs = "+" if action.nargs == "*" else action.nargs
    if nargs is not None:
        kind = list[kind]
    choices = None if action.choices is None else list(action.choices)
    field = flag(action.default, meaning, choices=choices, nargs=nargs, names=options)
    return action.dest, kind | None, field


def described(stored: Mapping[str, Any], kinds: Sequence[type]) -> dict[str, dict[str, Any]]:
    """Return the values that a run may take from a checkpoint's configuration, ``stored``.

    Both map section -> field -> value. A checkpoint may come from a stranger, so it may describe a
    model and its data, but may neither permit nor name code to run, nor name places to write to.
    ``flag(..., from_checkpoint=...)`` says whether a field may be taken. Fields that neither the
    engine's sections nor ``kinds``, the classes of the task's sections, have are left out. A field
    that an earlier version stored in another section is moved to its present one.

    Raises:
        CheckpointError: a section is not a mapping from names to values.
    """
    by_section = {}
    stored = in_present_sections(stored, kinds)
    for name, kind in (engine_sections() | named(kinds)).items():
        values = stored.get(name)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"The stored configuration has `{name}` ({values!r:.50}) in the place of a section "
                "of flags, which must hold names and values; load another checkpoint."
            )
        may = from_checkpoint(kind)
        by_section[name] = {field: value for field, value in values.items() if may.get(field)}
    return by_section


def withheld_notes(
    stored: Mapping[str, Any], kinds: Sequence[type], given: Collection[str]
) -> list[str]:
    """Return a note for each switch that permits code to run and that a checkpoint's run had on.

    No file may turn on such a switch; the user must give it on the command line.

    Args:
        stored: the stored configuration, by section and field.
        kinds: classes of the task's sections.
        given: names of the fields whose flags are on the command line; these get no note.
    """
    stored = in_present_sections(stored, kinds)
    return [
        f"The checkpoint was trained with `{flag.shown}` ({flag.help}), which no file can give; "
        "give it yourself if you trust that code."
        for name, kind in (engine_sections() | named(kinds)).items()
        for flag in flags_of(name, kind)
        if flag.from_checkpoint is False and flag.type is bool and flag.field not in given
        if (stored.get(name) or {}).get(flag.field)
    ]


def sections_of(program: Program) -> dict[str, type]:
    """Return section classes by name: the engine's, which every run has, then the program's."""
    return engine_sections() | named(program.sections)


def all_flags(program: Program) -> list[Flag]:
    """Return the flags that a program accepts, section by section."""
    flags = [flag for name, kind in sections_of(program).items() for flag in flags_of(name, kind)]
    lacking = lacking_flags(program)
    return [flag for flag in flags if flag.field not in lacking]


def lacking_flags(program: Program) -> dict[str, Flag]:
    """Return, by field, the flags that its sections declare but the program always refuses."""
    refused = [entry for entry in program.inapplicable if entry.remedy]
    answers = by_flag(refused)
    flags = [flag for name, kind in sections_of(program).items() for flag in flags_of(name, kind)]
    return {flag.field: flag for flag in flags if flag.positive[0] in answers}


def unknown(named: str, near: Sequence[str]) -> str:
    """Return the error about a name that is no flag; ``near`` are names that resemble it."""
    advice = f"did you mean {' or '.join(near)}?" if near else "see --help."
    return f"{named} is not a flag of this program; {advice}"


def spellings(flags: Sequence[Flag]) -> dict[str, tuple[Flag, bool]]:
    """Return spelling -> (flag, True), or (flag, False) for spellings such as ``--no-x``."""
    table: dict[str, tuple[Flag, bool]] = {}
    for each in flags:
        table.update({canonical(name): (each, False) for name in each.negative})
        table.update({canonical(name): (each, True) for name in each.positive})
    return table


def canonical(name: str) -> str:
    """Return a flag's name with two leading dashes, and dashes for underscores."""
    return "--" + name.lstrip("-").replace("_", "-")


def value_of_words(flag: Flag, named: str, words: Sequence[str]) -> Any:
    """Convert the words after a flag to the flag's value, or raise a ConfigError.

    ``named`` is the flag as the error shows it, in backticks. A list of numbers may be several
    words, or one word as Python and Megatron-LM write it: "(127,0)".
    """
    numeric = flag.type in (int, float)
    if numeric and flag.nargs is not None:
        parts = [part for word in words for part in word.strip("()[] ").split(",")]
        # A comma that ends a word, as in "(127, 0)" without quotes, leaves an empty part.
        words = [part.strip() for part in parts if part.strip()]
    if flag.joins and words:
        words = [" ".join(words)]
    words = [flag.renamed.get(word, word) for word in words]
    nargs = flag.nargs or 1
    if (nargs == "+" and not words) or (isinstance(nargs, int) and len(words) != nargs):
        raise ConfigError(_wrong_number(flag, named, words))
    if flag.type is str:
        words = [_as_path(flag, named, word) for word in words]
    if flag.type is str and flag.default != "" and not all(words):
        raise ConfigError.about(
            named,
            "",
            "must not be empty, as it is where a variable of the script is not set",
            "give a value, or leave the flag out",
        )
    try:
        # Megatron-LM's scripts write "1_000" for counts.
        converted = [flag.type(w.replace("_", "") if flag.type is int else w) for w in words]
    except ValueError:
        kind = {int: "an integer", float: "a number"}[flag.type]
        raise ConfigError.about(named, " ".join(words), f"must be {kind}") from None
    wrong = [value for value in converted if flag.choices and value not in flag.choices]
    if wrong:
        allowed = ", ".join(str(choice) for choice in flag.choices or ())
        rule = f"must be one of {allowed}"
        raise ConfigError.about(named, wrong[0], rule, flag.advice or "")
    return converted if flag.nargs else converted[0]


def _as_path(flag: Flag, named: str, word: str) -> str:
    """Return ``word`` with the home folder in place of ``~/`` at its start.

    A shell does that only at the start of a word, so not in ``--save=~/run`` or in a file. A
    variable that no shell has replaced is refused, as it would become the name of a folder.
    """
    begins = _OF_SHELL.fullmatch(word)
    if begins is None or flag.choices:
        return word
    if begins[1] == "~":
        return os.path.expanduser(word)
    rule = f"begins with the variable {begins[1]}, which a shell would replace, but nothing here"
    raise ConfigError.about(named, word, rule, "write the path itself")


def renaming_notes(flag: Flag, named: str, words: Iterable[str]) -> list[str]:
    """Return a note for each value that has another name here; ``named`` is the flag in backticks.

    ``words`` are the values as the user wrote them.
    """
    return [
        f"{named} ({word}) is {flag.renamed[word]} here, which does the same."
        for word in words
        if word in flag.renamed
    ]


def _wrong_number(flag: Flag, named: str, words: Sequence[str]) -> FlagError:
    """Return the error about a flag with too few or too many values."""
    if flag.nargs == "+":
        return FlagError(named, None, "takes at least one value, but got 0")
    remedy = ""
    if flag.nargs is None and flag.type is str and not flag.choices and len(words) > 1:
        remedy = f"quote it: {flag.positive[0]} {shlex.quote(' '.join(words))}"
    rule = f"takes {flag.nargs or 1} value(s), but got {len(words)}"
    if words and not remedy:
        rule += f" ({' '.join(words)})"
    return FlagError(named, None, rule, remedy)


def blend_in_one_word(named: str, words: Sequence[str]) -> FlagError | None:
    """Return the error about data and its weights in one word, as quotes make it; None for none."""
    for word in words:
        weight, *rest = word.split() or [""]
        if rest and re.fullmatch(r"[\d.]+(e-?\d+)?", weight):
            rule = "is one word, but each weight and each path is a word of its own"
            shown = ", ".join([weight, *rest])
            return FlagError(
                named, word, rule, f"leave the quotes out, or in a file write [{shown}]"
            )
    return None


def value_of_entry(flag: Flag, named: str, value: Any) -> Any:
    """Convert a value from a YAML file to a flag's value; raise a ConfigError if it does not fit.

    Text such as 1e-4, which YAML does not read as a number, is converted too. ``named`` is the
    entry as the error shows it, in backticks.
    """
    if value == flag.default or (value is None and flag.optional):
        return value
    if flag.type is bool:
        if not isinstance(value, bool):
            raise ConfigError.about(named, str(value), "must be true or false")
        return value
    if value is None or isinstance(value, Mapping):
        raise ConfigError.about(named, str(value), "must be a value or a list of values")
    words = value if isinstance(value, (list, tuple)) else [value]
    if flag.nargs is None and isinstance(value, list):
        text = ",".join(map(str, value))
        raise ConfigError.about(named, value, "must be one value, not a list", f"write {text}")
    return value_of_words(flag, named, [str(word) for word in words])
