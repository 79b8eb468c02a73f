"""The add-on's tool, `tools/report.py`: writes or serves the report of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import ConfigError, exclusive, tell_errors

PORT = 8765
SHOWN = 5
"""The most runs that an error names."""
_DEFAULT = Path()
"""The value of --output without a file."""


def main(argv: Sequence[str], description: str) -> int:
    """Write or serve the report on folders; return 0, or 2 after an error, which is printed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="+", help="save folder of a run; several are compared"
    )
    parser.add_argument(
        "--output", "--html", type=Path, metavar="FILE", nargs="?", const=_DEFAULT,
        help="file to write; default: report.html in the folder, or for several folders "
        "comparison.html in the current one",
    )  # fmt: skip
    parser.add_argument(
        "--serve", action="store_true",
        help="serve the page to browsers, where it follows the run; Ctrl-C ends",
    )  # fmt: skip
    parser.add_argument("--port", type=int, help=f"port of --serve; 0: a free one; default: {PORT}")
    parser.add_argument(
        "--host",
        help="address of --serve; default: 127.0.0.1, which only this machine reaches; "
        "0.0.0.0: all machines of the network",
    )
    args = parser.parse_args(argv)
    try:
        if args.serve:
            if args.output is not None:
                raise ConfigError(exclusive("--serve", "--output"))
            _serve(args.folder, args.host or "127.0.0.1", PORT if args.port is None else args.port)
            return 0
        for flag, value in (("--port", args.port), ("--host", args.host)):
            if value is not None:
                raise ConfigError(
                    f"`{flag}` ({value}) has an effect only with `--serve`; give it, or leave "
                    f"`{flag}` out."
                )
        print(f"wrote {report(args.folder, args.output)}")
    except ConfigError as error:
        tell_errors(error.messages)
        return 2
    return 0


def _check(folders: Sequence[Path]) -> None:
    seen = set[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"`folder` ({folder}) must be the save folder of a run; give another."
            )
        if folder.resolve() in seen:
            raise ConfigError(f"`folder` ({folder}) is given twice; give each run once.")
        seen.add(folder.resolve())
        runs = [] if any(folder.glob("*.jsonl")) else sorted(folder.glob("*/metrics.jsonl"))
        if runs:
            more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
            names = ", ".join(str(path.parent) for path in runs[:SHOWN])
            raise ConfigError(
                f"`folder` ({folder}) must be the save folder of a run, but holds those of runs; "
                f"give some of them: {names}{more}."
            )


def _serve(folders: Sequence[Path], host: str, port: int) -> None:
    from megatron_ext.extras.report.serve import serve

    _check(folders)
    serve(folders, host, port)


def report(folders: Sequence[Path], output: Path | None) -> Path:
    """Write the report on the run in a folder, or the comparison of several; return its path.

    The path is ``output``; None puts a report into its folder, and a comparison into the current
    one.

    Raises:
        ConfigError: there is no such folder, it is given twice or holds no log of a run, or the
            report cannot be written.
    """
    # A page needs much more than the help of the tool.
    from megatron_ext import limits
    from megatron_ext.extras.report.comparison import COMPARISON_FILE, write_comparison
    from megatron_ext.extras.report.page import REPORT_FILE, write_report
    from megatron_ext.extras.report.run_folder import read_run_folder

    _check(folders)
    for folder in folders:
        if not any(folder.glob("*.jsonl")):
            raise ConfigError(
                f"`folder` ({folder}) must be the save folder of a run, but holds no log such as "
                "metrics.jsonl; give another."
            )
    path = output
    if path is None or path == _DEFAULT:
        path = folders[0] / REPORT_FILE if len(folders) == 1 else Path(COMPARISON_FILE)
    try:
        if len(folders) == 1:
            write_report(read_run_folder(folders[0]), path)
        else:
            write_comparison(folders, path)
    except OSError as error:
        raise ConfigError(
            f"`--output` ({path}) cannot be written ({limits.cause(error, path)}); give another "
            "path."
        ) from None
    return path
