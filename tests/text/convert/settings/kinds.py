"""The type of the entries of a config.json."""

from typing import Any

Settings = dict[str, Any]
