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
from megatron_ext.video.networks.published import CLASS, Conversion, Form

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pt", ".pth", ".bin")
"""The endings of files of weights that can be read."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a video network; raise CheckpointError if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "transformer" / "config.json").is_file():
        raise CheckpointError(f"{folder} holds a whole pipeline; give {folder / 'transformer'}.")
    return read_model_settings(path, "give the folder of the model.")


def holds_video_weights(source: Path) -> bool:
    """Return whether a folder or file is to be read as public weights of a video network.

    A file is if it has a suffix of `SUFFIXES`. A folder is if its config.json names a class, or if
    it has a model_index.json.

    Raises:
        CheckpointError: config.json cannot be read, or the folder has a model_index.json but no
            config.json.
    """
    if source.is_file():
        return source.suffix in SUFFIXES
    if not (source / "config.json").is_file() and not (source / "model_index.json").is_file():
        return False
    return CLASS in read_config(source)


def form_of_folder(folder: Path) -> tuple[Conversion, Form]:
    """Return the conversion and the form for the class that a folder's config.json names.

    Raises:
        CheckpointError: no conversion reads this class.
    """
    content = read_config(folder)
    readers = conversions()
    for reader in readers:
        for form in reader.forms:
            if content.get(CLASS) in form.classes:
                return reader, form
    known = ", ".join(name for reader in readers for name in reader.classes)
    name = str(content.get(CLASS))
    said = f"{folder / 'config.json'} says `{CLASS}` {name!r}"
    for reader in readers:
        if name in reader.refused:
            raise CheckpointError(
                f"{said}, which is {reader.refused[name]}, and cannot be converted; give "
                f"{reader.title}."
            )
    raise CheckpointError(f"{said}, which cannot be converted; use one of {known}.")


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

    The result is also True for a checkpoint made from public weights of a network that streaming
    can train.
    """
    return (stored.get("video") or {}).get("task") == "streaming"
