"""``--help``: flags grouped by concern, with default, unit and meaning."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import groupby

from megatron_ext.config.flags import Flag


def describe(flag: Flag) -> str:
    """One flag as two columns' worth of text: spelling and values, then meaning."""
    value = ""
    if flag.type is not bool:
        value = f" {{{','.join(map(str, flag.choices))}}}" if flag.choices else f" {_metavar(flag)}"
    return f"{flag.shown}{value}"


def _metavar(flag: Flag) -> str:
    name = (flag.unit or {int: "N", float: "X", str: "TEXT"}[flag.type]).upper()
    if isinstance(flag.nargs, int):
        return " ".join([name] * flag.nargs)
    return f"{name} ..." if flag.nargs == "+" else name


def _meaning(flag: Flag) -> str:
    default = ""
    if flag.type is not bool and flag.default is not None and flag.default != "":
        shown = (
            flag.default if not isinstance(flag.default, list) else " ".join(map(str, flag.default))
        )
        default = f" [{shown}]"
    if flag.type is bool and flag.default is True:
        return f"switch off: {flag.help}"
    return f"{flag.help}{default}"


def print_help(flags: Sequence[Flag]) -> None:
    """Print all flags to standard output."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print("Flags have Megatron-LM's names; defaults stand in brackets.\n")
    print("  --config FILE.yaml  the same names from a file; the command line wins")
    print("  --print-config      print the resolved configuration as YAML and stop\n")
    for section, members in groupby(flags, key=lambda flag: flag.section):
        print(f"{section}:")
        for flag in members:
            print(f"  {describe(flag)}")
            print(textwrap.fill(_meaning(flag), width, initial_indent=" " * 8,
                                subsequent_indent=" " * 8))  # fmt: skip
        print()
