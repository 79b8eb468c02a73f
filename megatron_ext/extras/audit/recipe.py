"""Reads the flags of a recipe of Megatron-LM's functional tests."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import DataError


def read_recipe(path: Path) -> list[str]:
    """Return, as words, the flags of a recipe: the ``MODEL_ARGS`` of a YAML file.

    Raises:
        DataError: the file cannot be read, or has no mapping ``MODEL_ARGS``.
    """
    try:
        recipe = read_yaml(path)
    except UnreadableFile as error:
        raise DataError(f"The recipe {path} cannot be read: {error.reason}.") from error
    flags = recipe.get("MODEL_ARGS") if isinstance(recipe, dict) else None
    if not isinstance(flags, dict):
        raise DataError(f"The recipe {path} has no `MODEL_ARGS`, a mapping of flags to values.")
    words: list[str] = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(str(name))
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words += str(value).split()
    return words
