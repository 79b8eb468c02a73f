#!/usr/bin/env python3
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

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.extras import run_tool

main = partial(run_tool, "report", "tool", description=str(__doc__))

if __name__ == "__main__":
    run_program(main)
