"""The add-on's tool, `tools/report.py`: writes the report of a run from its save folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext import limits
from megatron_ext.errors import ConfigError
from megatron_ext.extras.report.page import REPORT_FILE, write_report
from megatron_ext.extras.report.run_folder import read_run_folder


def main(argv: Sequence[str], description: str) -> int:
    """Write the report on a folder; return 0, or 2 after an error, which is printed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="save folder of the run")
    parser.add_argument(
        "--output", type=Path, help=f"file to write; default: {REPORT_FILE} in the folder"
    )
    args = parser.parse_args(argv)
    try:
        print(f"wrote {report(args.folder, args.output)}")
    except ConfigError as error:
        print("\n".join(f"error: {text}" for text in error.messages), file=sys.stderr)
        return 2
    return 0


def report(folder: Path, output: Path | None) -> Path:
    """Write the report of the run in ``folder``, and return the report's path.

    The path is ``output``; None puts the report into ``folder``.

    Raises:
        ConfigError: there is no such folder, or the report cannot be written.
    """
    if not folder.is_dir():
        raise ConfigError(f"`folder` ({folder}) must be the save folder of a run; give another.")
    path = output or folder / REPORT_FILE
    try:
        write_report(read_run_folder(folder), path)
    except OSError as error:
        raise ConfigError(
            f"`--output` ({path}) cannot be written ({limits.cause(error, path)}); give another "
            "path."
        ) from None
    return path
