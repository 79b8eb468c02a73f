#!/usr/bin/env python3
"""Reports what this machine has for training; for what is missing, the effect and the remedy.

    python tools/doctor.py [--json] [--out doctor.json] [--no-measure]

Exit code 0: runs can start; 1: something that every run needs is missing; 2: bad flags.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.inspect.doctor.examine import main

if __name__ == "__main__":
    run_program(main)
