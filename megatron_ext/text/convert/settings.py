"""Reads the config.json of a Hugging Face folder without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import read_model_settings
from megatron_ext.errors import CheckpointError

SETTINGS = "config.json"
"""The file of a Hugging Face folder that describes its model."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of `SETTINGS` in a folder; raise a CheckpointError if it is unreadable."""
    if not folder.exists() and len(folder.parts) == 2 and not folder.is_absolute():
        raise CheckpointError(
            f"There is no folder {folder} here; if it is a model of the Hugging Face hub, of which "
            f"nothing is fetched, run `hf download {folder} --local-dir models/{folder.name}` and "
            "give that folder."
        )
    return read_model_settings(folder / SETTINGS, "give a folder of a Hugging Face model.")
