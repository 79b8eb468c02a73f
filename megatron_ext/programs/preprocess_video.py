"""Turns clips with captions into shards of latents and text embeddings; see `--help`."""

from __future__ import annotations

from megatron_ext.video.data.cli import main

__all__ = ["main"]
