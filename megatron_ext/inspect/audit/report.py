"""Judges launches by the rules of all defects, and prints findings, lists and reproductions."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.inspect.audit.defect import RELEASES, Defect
from megatron_ext.inspect.audit.defects_model import MODEL
from megatron_ext.inspect.audit.defects_rest import REST
from megatron_ext.inspect.audit.defects_step import STEP
from megatron_ext.inspect.audit.expand import readable
from megatron_ext.inspect.audit.flags import Flags, Undecided
from megatron_ext.inspect.audit.launches import Launch
from megatron_ext.inspect.audit.script import Script, read_script

DEFECTS: tuple[Defect, ...] = (*MODEL, *STEP, *REST)
"""All defects in the order of their numbers."""

FILES = "data layers losses mtp optimizer router schedules stages".split()
"""Endings of the files beside this one that reproduce defects."""


@dataclass(frozen=True)
class Finding:
    """A defect that flags hit.

    Attributes:
        flags: the flags that decided.
        depends: a condition that no flag says; empty for a finding that counts.
        where: conditions of the script on the way to the launch.
    """

    number: str
    what: str
    state: str
    error: str
    advice: str
    flags: tuple[str, ...]
    depends: str = ""
    where: str = ""


@dataclass(frozen=True)
class Audit:
    """The findings of a script, and sentences about what could not be judged."""

    core: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def certain(self) -> list[Finding]:
        """The findings that count: those that hang on flags alone."""
        return [finding for finding in self.findings if not finding.depends]


def release_of(core: str | None) -> tuple[str, str]:
    """Return a version of megatron-core, by default the installed one, and its minor release.

    Raises:
        ConfigError: the version is unknown, or none is installed.
    """
    try:
        version = core or importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("megatron-core is not installed; name a version with --core.") from None
    minor = ".".join(version.split(".")[:2])
    if minor not in RELEASES:
        raise ConfigError(f"--core ({version}) must be a version of {', '.join(RELEASES)}.")
    return version, minor


def judge(launch: Launch, minor: str) -> tuple[list[Finding], list[str]]:
    """Return the findings of a launch on a minor release, and what the script leaves open."""
    found: list[Finding] = []
    notes: list[str] = []
    for defect in DEFECTS:
        number, state = defect.number, defect.state(minor)
        for rule in defect.rules if state.kind != "fixed" else ():
            if rule.only and minor not in rule.only.split():
                continue
            flags = Flags(launch)
            try:
                if not rule.hit(flags):
                    continue
                size = rule.size(flags)
            except Undecided as error:
                given = " ".join(f"--var {name}=…" for name in error.names if name.isidentifier())
                notes.append(
                    f"{number} is not judged: {error}{f'; give {given}' if given else ''}."
                )
                continue
            used = tuple(dict.fromkeys(flags.used))
            where = ", ".join(f"{text}: {'yes' if yes else 'no'}" for text, yes in launch.assumed)
            about = number, defect.affected, state.kind, size, rule.advice
            found.append(Finding(*about, used, rule.depends, where))
            break
    return found, notes


def audit(script: Script, core: str | None = None) -> Audit:
    """Return the findings of all launches of a script; one that repeats itself is named once.

    Raises:
        ConfigError: the version of megatron-core is unknown.
    """
    version, minor = release_of(core)
    findings: dict[str, Finding] = {}
    notes = list(script.notes)
    hits: Counter[str] = Counter()
    for launch in script.launches:
        found, open_values = judge(launch, minor)
        hits.update(finding.number for finding in found)
        for finding in found:
            everywhere = hits[finding.number] == len(script.launches)
            if everywhere:
                findings[finding.number] = dataclasses.replace(finding, where="")
            else:
                findings.setdefault(finding.number, finding)
        notes += open_values
        notes += _of_words(launch)
    ordered = sorted(findings.values(), key=lambda x: int(x.number[1:]))
    return Audit(version, tuple(ordered), tuple(dict.fromkeys(notes)))


def _of_words(launch: Launch) -> list[str]:
    """Return sentences about words that may hold more flags than can be seen."""
    flags = Flags(launch)
    found = [
        f"`{readable(word)}` may hold more flags, which are not audited." for word in flags.open
    ]
    if flags.has("--use-checkpoint-args", "--yaml-cfg"):
        found.append("Flags that come from a checkpoint or from a YAML file are not audited.")
    return found


def show(console: Console, result: Audit) -> None:
    """Print the findings as a table, then what depends on more than flags, then notes."""
    certain = result.certain
    head = f"megatron-core {result.core}: "
    head += f"{len(certain)} known defect(s) on these flags" if certain else "no known defect"
    console.print(head, highlight=False)
    if certain:
        table = Table("defect", "what is wrong, by how much", "what to do", "flags")
        for x in certain:
            where = f"\nonly where {x.where}" if x.where else ""
            cells = x.number, f"{x.what}: {x.error}{where}", x.advice, "\n".join(x.flags)
            table.add_row(*map(escape, cells), end_section=True)
        console.print(table)
    for x in result.findings:
        if x.depends:
            text = f"{x.number} only if {x.depends}: {x.error} {x.advice}"
            console.print(text, highlight=False, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def show_list(console: Console) -> None:
    """Print all defects with their states."""
    table = Table("defect", "affected", *RELEASES, "flags")
    for x in DEFECTS:
        judged = "judged by flags" if x.rules else "no flag hits it"
        cells = x.number, x.affected, *(x.state(y).kind for y in RELEASES), judged
        table.add_row(*map(escape, cells))
    console.print(table)


def reproduce(number: str) -> str:
    """Run a defect on the installed megatron-core; return stock, right, ratio and what it was.

    Raises:
        ConfigError: the defect is unknown, or has no reproduction.
    """
    if number not in [x.number for x in DEFECTS]:
        raise ConfigError(f"--reproduce ({number}) is no defect; use D1 to {DEFECTS[-1].number}.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    # Figures are then the same on machines that have them.
    for name in ("transformer_engine", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for file in FILES:
        module = importlib.import_module(f"megatron_ext.inspect.audit.reproduce_{file}")
        if number in module.REPRODUCTIONS:
            found = module.REPRODUCTIONS[number]()
            return (
                f"{number} stock {found.stock:.6g} right {found.right:.6g} "
                f"ratio {found.ratio:.6g}: {found.what}"
            )
    raise ConfigError(f"--reproduce ({number}) has no reproduction.")


def main(argv: Sequence[str], description: str = "") -> int:
    """Carry out the tool; return 0 for clean, 1 for findings, 2 for errors."""
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    words = tuple(argv[len(own) + 1 :])
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", nargs="?", type=Path, help="launch script, or recipe in YAML")
    parser.add_argument("--core", metavar="VERSION", help="version of megatron-core (installed)")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--list", action="store_true", help="list all defects with their states")
    parser.add_argument("--reproduce", metavar="D2", help="run a defect on the installed core")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(own)
    try:
        return _carry_out(args, words)
    except MegatronExtError as error:
        print(error, file=sys.stderr)
        return 2


def _carry_out(args: argparse.Namespace, words: tuple[str, ...]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 140)
    if args.list:
        show_list(console)
        return 0
    if args.reproduce:
        print(reproduce(args.reproduce.upper()))
        return 0
    if (args.script is None) == (not words):
        raise ConfigError("Give either a launch script or flags after `--`.")
    wrong = [x for x in args.var if "=" not in x]
    if wrong:
        raise ConfigError(f"--var ({wrong[0]}) must be NAME=VALUE.")
    if args.script:
        script = read_script(args.script, dict(x.split("=", 1) for x in args.var))
    else:
        script = Script([Launch.of_flags(words)])
    result = audit(script, args.core)
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=1, ensure_ascii=False))
    else:
        show(console, result)
    return 1 if result.certain else 0
