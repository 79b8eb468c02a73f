#!/usr/bin/env python3
"""Names the known defects of megatron-core that a launch script of Megatron-LM hits.

    python tools/audit.py run.sh [--var NAME=value] [--core 0.16.1] [--json]
    python tools/audit.py -- <flags of a Megatron-LM script>
    python tools/audit.py --list
    python tools/audit.py --reproduce D2

The script is read, never run. Its defaults, arrays, functions and branches are followed; both ways
of a branch count where its condition is open. docs/numerics.md describes every defect.
Exit code 0: clean; 1: findings; 2: errors.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.inspect.audit.report import main

if __name__ == "__main__":
    run_program(partial(main, description=__doc__ or ""))
