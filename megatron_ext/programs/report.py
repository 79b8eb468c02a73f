"""Writes report.html of a run from its save folder, or serves it: one page that opens from disk.

    python tools/report.py out/run                  # out/run/report.html
    python tools/report.py out/run --serve          # a page that follows the run
    python tools/report.py out/a out/b --html       # comparison.html: the curves of both runs

The run may still be running, may have been killed, or may be from an older version. The page shows
what ran and how it ended, with curves, samples, faults and restarts, checkpoints, the command line,
settings, and how the time was spent. Exit code 0: written, or the server was ended by Ctrl-C; 2:
bad flags, a folder without a run, or a port in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.extras import run_tool


def main(argv: Sequence[str]) -> int:
    """Write or serve the page; return the exit code."""
    return run_tool("report", "tool", argv, description=str(__doc__))
