#!/usr/bin/env python3
"""Starts the program in megatron_ext/programs/plan.py; see `--help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.programs import run

if __name__ == "__main__":
    run("plan")
