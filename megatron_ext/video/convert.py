"""Finds the conversion that reads, or writes, public weights of a video network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import read_model_settings
from megatron_ext.errors import CheckpointError
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.lookup import (
    conversion_of,
    conversions,
    named_by,
    network_named,
    streamed_conversion,
)
from megatron_ext.video.networks.network import Conversion

CLASS = "_class_name"
"""The entry that names the class in a video network's config.json; language models have none."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a video network; raise CheckpointError if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "transformer" / "config.json").is_file():
        raise CheckpointError(f"{folder} holds a whole pipeline; give {folder / 'transformer'}.")
    return read_model_settings(path, "give the folder of the model.")


def reader_of(source: Path) -> Conversion | None:
    """Return the conversion that reads a folder or file of public weights.

    Return None for a file that no conversion reads, and for a folder whose files do not show that
    it holds a public model: it has neither config.json nor model_index.json, or its config.json
    names no class.

    Raises:
        CheckpointError: no conversion reads the class that config.json names, config.json cannot be
            read, or the folder has a model_index.json but no config.json.
    """
    readers = conversions()
    if source.is_file():
        return next((reader for reader in readers if reader.reads_file(source)), None)
    path = source / "config.json"
    if not path.is_file() and not (source / "model_index.json").is_file():
        return None
    content = read_config(source)
    if CLASS not in content:
        return None
    for reader in readers:
        if content[CLASS] in reader.classes:
            return reader
    known = ", ".join(name for reader in readers for name in reader.classes)
    raise CheckpointError(
        f"{path} says `{CLASS}` {content[CLASS]!r}, which cannot be converted; use one of {known}."
    )


def writer_of(stored: Mapping[str, Any]) -> Conversion | None:
    """Return the conversion that writes the networks of a checkpoint as public weights.

    ``stored`` is the checkpoint's configuration. None stands for a language model's checkpoint.

    Raises:
        CheckpointError: the network has no public form.
    """
    if is_streaming(stored):
        return streamed_conversion()
    video = stored.get("video")
    if video is None:
        return None
    name = video["video_model"]
    conversion = conversion_of(name)
    if conversion is None:
        known = [each for each in NETWORKS if conversion_of(each) is not None]
        raise CheckpointError(
            f"The checkpoint is of {network_named(name).titles[name]}, whose weights have no "
            f"public form; only those of {named_by(known)} can be exported."
        )
    return conversion


def is_streaming(stored: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's configuration is that of a streaming run.

    The result is also True for a checkpoint made from public weights of a Wan network.
    """
    return (stored.get("video") or {}).get("task") == "streaming"
