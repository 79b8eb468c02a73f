#!/usr/bin/env python3
"""Turns clips with captions into shards of latents and text embeddings; see `--help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.video.data.cli import main

if __name__ == "__main__":
    run_program(main)
