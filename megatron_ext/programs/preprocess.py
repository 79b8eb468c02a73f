"""Turns jsonl into Megatron's .bin/.idx datasets, with Megatron-LM's flags; see `--help`."""

from __future__ import annotations

from megatron_ext.text.preprocess.cli import main

__all__ = ["main"]
