"""The command line of tools/doctor.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.doctor.examine import examine
from megatron_ext.doctor.report import report
from megatron_ext.doctor.surroundings import Surroundings, ThisMachine


def main(argv: Sequence[str], here: Surroundings | None = None) -> int:
    """Examine a machine and print what was found.

    Args:
        argv: the flags.
        here: the machine; None for this one.

    Returns:
        1 if no run could start, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description="Says what this machine has for training, what is missing, and what it costs.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, help="also write everything as JSON to this file")
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not measure the rates of the GPUs, nor try CUDA graphs and torch.compile",
    )
    args = parser.parse_args(argv)
    examination = examine(here or ThisMachine(), measure=not args.no_measure)
    found = json.dumps(examination.to_dict(), indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"{found}\n", encoding="utf-8")
    if args.json:
        print(found)
    else:
        print("\n".join(report(examination)))
    return int(examination.stops_runs)
