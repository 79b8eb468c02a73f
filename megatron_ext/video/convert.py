"""Which networks a stored checkpoint of a streaming run holds, for its conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NETWORKS = {"generator": "", "critic": "critic."}
"""Networks in a checkpoint of a streaming run, with the prefix of their parameters' names."""


def is_streaming(stored: Mapping[str, Any]) -> bool:
    """Return whether a configuration was stored by a streaming run or with imported weights."""
    return (stored.get("video") or {}).get("task") == "streaming"
