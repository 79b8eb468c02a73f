"""Reads the folder of a published pipeline, as diffusers has it: which model lies where in it.

Nothing here imports torch, so that a mistake in flags is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import FOLDERS

INDEX = "model_index.json"
_NETWORK = "transformer"
_LOW_NOISE = "transformer_2"
_TEXT_MODELS = {
    "umt5": "t5_path",
    "t5": "t5_path",
    "clip_text_model": "clip_path",
    "clip": "clip_path",
    "llama": "llama_path",
    "llava": "llama_path",
}
"""The flag that names the folder of a text model, by ``model_type`` in its config.json."""


def read_part(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a pipeline; raise ConfigError if it cannot be read."""
    try:
        return read_json_object(path, not_finite=True)
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be used ({error.reason}); copy it again.") from None


@dataclass(frozen=True)
class Pipeline:
    """The folder of a pipeline.

    Attributes:
        root: the folder.
        index: content of its model_index.json.
    """

    root: Path
    index: Mapping[str, Any]

    @classmethod
    def at(cls, root: Path) -> Pipeline | None:
        """Return the pipeline in a folder; None if the folder has no model_index.json.

        Raises:
            ConfigError: model_index.json cannot be read, or names no network.
        """
        path = root / INDEX
        if not path.is_file():
            return None
        pipeline = cls(root, read_part(path))
        if pipeline.folder(_NETWORK) is None:
            raise ConfigError.about(
                "--load-weights",
                str(root),
                f"holds a pipeline of the class {pipeline.index.get('_class_name')} without a "
                f"folder `{_NETWORK}`",
                "give one of a video network",
            )
        return pipeline

    def folder(self, name: str) -> Path | None:
        """Return the folder of a part; None if the pipeline has no such part.

        Raises:
            ConfigError: model_index.json names the part, but its folder is missing.
        """
        entry = self.index.get(name)
        if not isinstance(entry, list) or not entry or entry[0] is None:
            return None
        path = self.root / name
        if not path.is_dir():
            raise ConfigError(
                f"{self.root / INDEX} names the part `{name}`, but {path} is not there; copy the "
                "whole folder again."
            )
        return path

    @property
    def network(self) -> Path:
        """Return the folder of the network; of two, that for high noise."""
        path = self.folder(_NETWORK)
        assert path is not None
        return path

    def defaults(self) -> dict[str, Any]:
        """Return the flags of sampling, by field, that the folder gives.

        Raises:
            ConfigError: a part is missing or cannot be read, or nothing can sample with it.
        """
        values: dict[str, Any] = {**self._text_encoder(), **self._experts()}
        parts = {
            "codec": "vae",
            "sample_scheduler_folder": "scheduler",
            "image_encoder": "image_encoder",
        }
        for field, name in parts.items():
            path = self.folder(name)
            if path is not None:
                values[field] = str(path)
        return values

    def _text_encoder(self) -> dict[str, Any]:
        """Return the text encoder of the folder's text models, and their folders."""
        folders = dict[str, str]()
        kind = None
        for name in ("text_encoder", "text_encoder_2"):
            path = self.folder(name)
            if path is None:
                continue
            kind = read_part(path / "config.json").get("model_type")
            field = _TEXT_MODELS.get(str(kind))
            if field is None:
                raise ConfigError(
                    f"{path} holds a text model of type {kind}, which cannot encode captions here; "
                    f"use one of {', '.join(_TEXT_MODELS)}."
                )
            folders[field] = str(path)
        if not folders:
            return {}
        for encoder, fields in FOLDERS.items():
            if set(fields) == set(folders) and (encoder == "umt5") == (kind == "umt5"):
                return {"text_encoder": encoder, **folders}
        raise ConfigError(
            f"{self.root} has the text models {', '.join(folders.values())}, which no text encoder "
            f"({', '.join(FOLDERS)}) joins; give `--text-encoder` and its folders."
        )

    def _experts(self) -> dict[str, Any]:
        """Return the flags of a second network, and when it takes over; {} if there is none.

        Raises:
            ConfigError: the pipeline names the time, but has one network only, or the reverse.
        """
        path = self.folder(_LOW_NOISE)
        boundary = self.index.get("boundary_ratio")
        if path is None and boundary is None:
            return {}
        if path is None or not isinstance(boundary, int | float) or not 0 < boundary <= 1:
            raise ConfigError(
                f"{self.root / INDEX} has `boundary_ratio` {boundary!r} and `{_LOW_NOISE}` "
                f"{self.index.get(_LOW_NOISE)}, but two networks need a time between 0 and 1 for "
                "the second one to take over; copy the whole folder again."
            )
        return {"sample_low_noise_expert": str(path), "sample_boundary": float(boundary)}
