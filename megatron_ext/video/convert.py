"""Public weights of video networks: which conversion reads them, and writes a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.video.networks.lookup import conversions
from megatron_ext.video.networks.network import Conversion

STORED_ROLES = {"generator": "", "critic": "critic."}
"""Networks in a checkpoint of a streaming run, with the prefix of their parameters' names."""


def reader_of(source: Path) -> Conversion | None:
    """Return the conversion that reads a folder or file; None if it is of no video network."""
    return next((x for x in conversions() if x.reads(source)), None)


def is_streaming(stored: Mapping[str, Any]) -> bool:
    """Return whether a configuration was stored by a streaming run or with imported weights."""
    return (stored.get("video") or {}).get("task") == "streaming"
