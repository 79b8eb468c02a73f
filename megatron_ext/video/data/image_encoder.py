"""Encodes frames by CLIP's vision model, as Wan's image-to-video networks are given them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import ImageEncoderConfig
from megatron_ext.video.data.model_folders import (
    compared,
    loaded,
    public,
    read_settings,
    variant_of,
)

_PREPROCESSOR = "preprocessor_config.json"
_TYPES = ("clip", "clip_vision_model")


class ImageEncoder:
    """CLIP's vision model, which gives the hidden states before its last layer.

    Frames are resized, cropped and normalized as ``preprocessor_config.json`` says. It is in the
    model's folder or, as in diffusers' pipelines, in ``../image_processor``.

    Attributes:
        tokens: number of rows of an embedding: one for the image, then one for each patch.
        width: number of features of a row.
        identity: settings that determine the embeddings; a dataset stores them for comparison.

    Raises:
        ConfigError: the folder holds no vision model of CLIP, or the package transformers is
            missing.
    """

    def __init__(self, path: str, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        settings = check_image_encoder(path)
        processor = _preprocessor_folder(path)
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                f"`--image-encoder` ({path}) needs the package transformers, which is not "
                "installed; run `pip install 'megatron-ext[video]'`."
            ) from None

        def load() -> tuple[Any, Any]:
            images = transformers.CLIPImageProcessor.from_pretrained(
                processor, local_files_only=True
            )
            model, info = transformers.CLIPVisionModel.from_pretrained(
                path, local_files_only=True, output_loading_info=True,
                variant=variant_of(path, ("model", "pytorch_model")),
            )  # fmt: skip
            return (images, model), info

        fault = "holds no model that can be loaded"
        self._processor, model = loaded("--image-encoder", path, load, fault)
        self._model = model.eval().requires_grad_(False).to(self.device)
        sizes = model.config
        self.width = int(sizes.hidden_size)
        self.tokens = (sizes.image_size // sizes.patch_size) ** 2 + 1
        self.identity = {
            "clip": public(settings),
            "preprocessor": public(read_settings("--image-encoder", processor, _PREPROCESSOR)),
        }

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Return the embeddings ``[n, tokens, width]`` of frames ``[n, 3, H, W]`` in [-1, 1].

        The frames are rounded to 8 bits, so that a frame gives the same embedding as the picture
        of it that a user stores.
        """
        pixels = ((frames.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
        inputs = self._processor(images=list(pixels), return_tensors="pt")
        values = inputs["pixel_values"].to(self.device, self._model.dtype)
        states: Tensor = self._model(pixel_values=values, output_hidden_states=True).hidden_states
        return states[-2].float()


def _preprocessor_folder(path: str) -> str:
    """Return the folder with the ``preprocessor_config.json`` of an image encoder."""
    sibling = Path(path).resolve().parent / "image_processor"
    for folder in (Path(path), sibling):
        if (folder / _PREPROCESSOR).is_file():
            return str(folder)
    raise ConfigError(
        f"`--image-encoder` ({path}) must have a {_PREPROCESSOR}, in it or in {sibling}, which "
        "says how pictures are resized; copy it too."
    )


def check_image_encoder(path: str) -> dict[str, Any]:
    """Return the config.json of an image encoder; raise ConfigError if it is none of CLIP."""
    settings = read_settings("--image-encoder", path)
    model_type = settings.get("model_type")
    if model_type not in _TYPES:
        raise ConfigError(
            f"`--image-encoder` ({path}) holds a model of type {model_type}, but must hold one of "
            f"type {' or '.join(_TYPES)}; correct the path."
        )
    _preprocessor_folder(path)
    return settings


def build_image_encoder(
    config: ImageEncoderConfig, device: torch.device | None = None
) -> ImageEncoder | None:
    """Build the image encoder of a configuration; return None if it names none."""
    path = config.image_encoder
    return None if path is None else ImageEncoder(path, device)


def image_encoder_from_manifest(
    manifest: Mapping[str, Any], path: str | None, device: torch.device | None = None
) -> ImageEncoder | None:
    """Build the image encoder that made the embeddings of a dataset, to encode new frames.

    Return None if the dataset has no image embeddings.

    Raises:
        ConfigError: the folder ``path`` is missing, cannot be loaded, or is given although the
            dataset has no image embeddings.
        DataError: the folder holds another model than the one that encoded the dataset.
    """
    identity = manifest.get("image_encoder")
    if identity is None:
        if path is not None:
            raise ConfigError.about(
                "--image-encoder",
                path,
                "has no effect: the clips were encoded without image embeddings",
                "leave it out",
            )
        return None
    if path is None:
        raise ConfigError(
            "The clips were encoded with an image encoder, so sampling needs its local folder; "
            "give it as `--image-encoder`."
        )
    encoder = ImageEncoder(path, device)
    if differing := compared(identity, encoder.identity):
        raise DataError(
            f"The frames were not encoded with the model of `--image-encoder` ({path}): "
            f"{differing}; give the folder that preprocessed them."
        )
    return encoder
