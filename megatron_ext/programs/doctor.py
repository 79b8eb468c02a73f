"""Reports what this machine has for training; for what is missing, the effect and the remedy.

    python tools/doctor.py [--json] [--out doctor.json] [--no-measure]

Exit code 0: runs can start; 1: something that every run needs is missing; 2: bad flags.
"""

from __future__ import annotations

from megatron_ext.inspect.doctor.examine import main

__all__ = ["main"]
