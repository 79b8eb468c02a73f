"""Proves on this machine that a training run survives faults.

Trains with the given flags without any fault, then again while ranks are killed, stopped or slowed
down, disks fill up and bits flip. Prints a table with a row for each fault: where it was injected,
what the run reported, the time until the fault was detected, the time until the next new step was
finished, the number of lost steps, and whether the final weights equal those of the undisturbed run
bit for bit.

    python tools/chaos.py --kills 20 -- <flags of pretrain_gpt.py>
    python tools/chaos.py --faults all --layouts tp2,pp2,cp2,dp2 --seeds 5 -- <flags>
    python tools/chaos.py --minutes 15 --per-minute 4 --plot goodput.png -- <flags>

Layouts are named as in tools/parity.py; without --layouts the flags give the layout. All faults of
a layout and a seed are injected into the same run, one after another, unless --apart is given.

A fault that cannot happen with the given flags is refused at once.

Exit code 0: the run survived all faults; 1: it did not; 2: bad flags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_ext.extras import run_tool


def main(argv: Sequence[str]) -> int:
    """Train with and without faults; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_tool("chaos", "tool", argv, description=str(__doc__))
