"""The program ``tools/audit.py``: reports the defects of megatron-core that given flags trigger.

It also lists all known defects, and reproduces single ones on the installed megatron-core.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ext.config.tool_options import own_options
from megatron_ext.disk.reading import read_yaml
from megatron_ext.errors import ConfigError, MegatronExtError, tell_errors
from megatron_ext.extras.audit.defect import RELEASES, Defect
from megatron_ext.extras.audit.flags import Flags, Undecided
from megatron_ext.extras.audit.recipe import read_recipe
from megatron_ext.extras.audit.rules import RULES


def _defects() -> tuple[Defect, ...]:
    """Return the defects in `defects.yaml`, each with its rules."""
    entries = read_yaml(Path(__file__).with_name("defects.yaml"))
    return tuple(
        Defect.of(number, entry, RULES.get(number, ())) for number, entry in entries.items()
    )


DEFECTS = _defects()
"""All known defects of megatron-core (`defects.yaml`), ordered by number."""

PROGRAM = "pretrain_gpt.py"
"""The program of Megatron-LM whose flags are audited, unless another one is named."""

FILES = "data layers losses mtp optimizer router schedules stages".split()
"""The ``*`` of each file ``reproduce_*.py`` in this folder; these files reproduce defects."""


@dataclass(frozen=True)
class Finding:
    """A defect that the flags trigger.

    Attributes:
        number: such as "D2".
        what: the part of megatron-core that has the defect.
        state: ``there`` or ``changed``, as in `State.kind`.
        error: sentence on the size of the error.
        flags: the given flags that trigger it.
        depends: text of a further condition, which flags cannot show; "" if there is none.
    """

    number: str
    what: str
    state: str
    error: str
    advice: str
    flags: tuple[str, ...]
    depends: str = ""


@dataclass(frozen=True)
class Audit:
    """The defects that some flags trigger in version ``core`` of megatron-core.

    ``notes`` are sentences about what could not be checked.
    """

    core: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def certain(self) -> list[Finding]:
        """The findings that depend only on flags, and not on a further condition."""
        return [finding for finding in self.findings if not finding.depends]


def release_of(core: str | None) -> tuple[str, str]:
    """Return ``core``, a version of megatron-core, and its minor release, such as "0.16".

    None stands for the installed version.

    Raises:
        ConfigError: the release is not in `RELEASES`, or ``core`` is None and none is installed.
    """
    try:
        version = core or importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("megatron-core is not installed; name a version with --core.") from None
    minor = ".".join(version.split(".")[:2])
    if minor not in RELEASES:
        raise ConfigError(f"--core ({version}) must be a version of {', '.join(RELEASES)}.")
    return version, minor


def audit(words: Sequence[str], core: str | None = None, program: str = PROGRAM) -> Audit:
    """Return the defects that the flags of a training program of Megatron-LM trigger.

    Args:
        words: the words after the name of the program.
        core: a version of megatron-core, by default the installed one.
        program: name of the program, since some defects depend on it.

    Raises:
        ConfigError: the version of megatron-core is unknown.
    """
    version, minor = release_of(core)
    findings: list[Finding] = []
    notes: list[str] = []
    for defect in DEFECTS:
        state = defect.state(minor)
        for rule in defect.rules if state.kind != "fixed" else ():
            if rule.only and minor not in rule.only.split():
                continue
            flags = Flags(words, program)
            try:
                if not rule.hit(flags):
                    continue
                size = rule.size(flags)
            except Undecided as reason:
                notes.append(f"{defect.number} is not judged: {reason}")
                continue
            finding = Finding(
                number=defect.number,
                what=defect.affected,
                state=state.kind,
                error=size,
                advice=rule.advice,
                flags=tuple(dict.fromkeys(flags.used)),
                depends=rule.depends,
            )
            findings.append(finding)
            break
    if Flags(words, program).has("--use-checkpoint-args", "--yaml-cfg", "--config"):
        notes.append("Flags that come from a checkpoint or from a YAML file are not audited.")
    return Audit(version, tuple(findings), tuple(dict.fromkeys(notes)))


def show(console: Console, result: Audit) -> None:
    """Print a table of the certain findings, then those with a further condition, then notes."""
    certain = result.certain
    head = f"megatron-core {result.core}: "
    head += f"{len(certain)} known defect(s) on these flags" if certain else "no known defect"
    console.print(head, highlight=False)
    if certain:
        table = Table("defect", "what is wrong, by how much", "what to do", "flags")
        for x in certain:
            cells = x.number, f"{x.what}: {x.error}", x.advice, "\n".join(x.flags)
            table.add_row(*map(escape, cells), end_section=True)
        console.print(table)
    for x in result.findings:
        if x.depends:
            text = f"{x.number} only if {x.depends}: {x.error} {x.advice}"
            console.print(text, highlight=False, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def show_list(console: Console) -> None:
    """Print all defects with their states in each release."""
    table = Table("defect", "affected", *RELEASES, "flags")
    for x in DEFECTS:
        judged = "judged by flags" if x.rules else "no flag hits it"
        cells = x.number, x.affected, *(x.state(y).kind for y in RELEASES), judged
        table.add_row(*map(escape, cells))
    console.print(table)


def reproduce(number: str) -> str:
    """Reproduce a defect, such as "D2", on the installed megatron-core; return its figures as text.

    Raises:
        ConfigError: the defect is unknown, or has no reproduction.
    """
    if number not in [x.number for x in DEFECTS]:
        raise ConfigError(f"--reproduce ({number}) is no defect; use D1 to {DEFECTS[-1].number}.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    # Hide these packages, so that the figures are the same on machines that have them.
    for name in ("transformer_engine", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for file in FILES:
        module = importlib.import_module(f"megatron_ext.extras.audit.reproduce_{file}")
        if number in module.REPRODUCTIONS:
            result = module.REPRODUCTIONS[number]()
            return (
                f"{number} stock {result.stock:.6g} right {result.right:.6g} "
                f"ratio {result.ratio:.6g}: {result.what}"
            )
    raise ConfigError(f"--reproduce ({number}) has no reproduction.")


def main(argv: Sequence[str], description: str = "") -> int:
    """Run ``tools/audit.py`` with the arguments ``argv``; ``description`` is the text of its help.

    Return 1 if flags certainly trigger a defect, 2 after an error, else 0.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="recipe of a functional test in YAML")
    parser.add_argument("--core", metavar="VERSION", help="version of megatron-core (installed)")
    parser.add_argument("--list", action="store_true", help="list all defects with their states")
    parser.add_argument("--reproduce", metavar="D2", help="run a defect on the installed core")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args, words = own_options(parser, argv)
    try:
        return _carry_out(args, words)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2


def _carry_out(args: argparse.Namespace, words: list[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 140)
    if args.list:
        show_list(console)
        return 0
    if args.reproduce:
        print(reproduce(args.reproduce.upper()))
        return 0
    if args.recipe is not None and args.recipe.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"`recipe` ({args.recipe}) must be a YAML file, as launch scripts are not read; to "
            "audit a script, put this package's pretrain_gpt.py in the place of its training "
            "program, add `--audit` to the flags and run it, or give the flags after `--`."
        )
    if (args.recipe is None) == (not words):
        raise ConfigError("Give either flags of a training program after `--`, or a recipe.")
    if args.recipe is not None:
        words = read_recipe(args.recipe)
    program = PROGRAM
    if words and words[0].endswith(".py"):
        program = words.pop(0)
    result = audit(words, args.core, program)
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=1, ensure_ascii=False))
    else:
        show(console, result)
    return 1 if result.certain else 0
