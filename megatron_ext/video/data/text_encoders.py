"""Text encoders by configuration or by manifest, and the built-in one without weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import FOLDERS, HASHED, T5_CLIP, TextEncoderConfig
from megatron_ext.video.data.codec import compared
from megatron_ext.video.data.text_models import UMT5, T5AndClip, read_settings


class TextEncoder(Protocol):
    """The part of a text encoder that preprocessing, online encoding and sampling need.

    Attributes:
        length: l, rows of an encoded caption.
        width: d, features of a row.
        pooled_width: e, features of the pooled vector, 0 where there is none.
    """

    length: int
    width: int
    pooled_width: int

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the embeddings; it is stored beside them and compared."""
        ...

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[n, l, d]`` and pooled vectors ``[n, e]`` float32; "" is the null
        text.
        """
        ...


_WORD = re.compile(r"[^\W_]+")


class HashedWords:
    """Every word is a fixed random vector: no weights, no training, and no idea of meaning.

    Row i holds the vector of word i, rows after the last word are zero; the pooled vector is the
    sum over the words, in other vectors, divided by the root of their number. The empty caption is
    all zeros. Lower case; digits and letters only, so "a cat." and "a Cat" are the same.
    """

    def __init__(self, config: TextEncoderConfig) -> None:
        self.length = config.text_length
        self.width, self.pooled_width = config.text_width, config.pooled_width

    @property
    def identity(self) -> dict[str, Any]:
        sizes = {"length": self.length, "width": self.width, "pooled_width": self.pooled_width}
        return {"text_encoder": HASHED, **sizes}

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(captions), self.length, self.width)
        pooled = torch.zeros(len(captions), self.pooled_width)
        for i, caption in enumerate(captions):
            words = _WORD.findall(caption.lower())
            for j, word in enumerate(words[: self.length]):
                rows[i, j] = _word_vector("row", word, self.width)
            for word in words:
                pooled[i] += _word_vector("pooled", word, self.pooled_width)
            pooled[i] /= max(1, len(words)) ** 0.5
        return rows, pooled


@lru_cache(maxsize=1 << 16)
def _word_vector(salt: str, word: str, width: int) -> Tensor:
    """Return signs ``[width]`` of variance 1, from the word's hash, the same on every machine."""
    seed = int.from_bytes(
        hashlib.blake2b(f"{salt}\0{word}".encode(), digest_size=16).digest(), "big"
    )
    raw = np.random.PCG64(seed).random_raw(width)
    return torch.from_numpy((raw >> np.uint64(63)).astype(np.float32) * 2 - 1)


def build_text_encoder(
    config: TextEncoderConfig, device: torch.device | None = None
) -> TextEncoder:
    """Build the text encoder of a configuration.

    Raises:
        ConfigError: transformers is missing, or a folder is of no use.
    """
    if config.text_encoder == HASHED:
        return HashedWords(config)
    kind = T5AndClip if config.text_encoder == T5_CLIP else UMT5
    return kind(config, device or torch.device("cpu"))


def width_of(config: TextEncoderConfig) -> int:
    """Return the features of a row of the embeddings, without loading a model.

    Raises:
        ConfigError: the folder has no configuration of T5 or UMT5.
    """
    if config.text_encoder == HASHED:
        return config.text_width
    path = str(config.t5_path)
    width = read_settings("t5_path", path).get("d_model")
    if not isinstance(width, int) or width < 1:
        raise ConfigError(
            f"`t5_path` ({path}) has a config.json whose `d_model` is {width!r}, but must be the "
            "width of T5; correct the path."
        )
    return width


def text_encoder_from_manifest(
    manifest: Mapping[str, Any],
    t5_path: str | None = None,
    clip_path: str | None = None,
    device: torch.device | None = None,
) -> TextEncoder:
    """Build the text encoder that made the embeddings of a dataset, to encode new captions.

    Args:
        manifest: manifest of the dataset; see `shards.read_json`.
        t5_path, clip_path: folders of the models; hashed words come from the manifest alone.
        device: where models compute.

    Raises:
        ConfigError: a folder is missing, of no use, or given for hashed words.
        DataError: the manifest names no text encoder, or other models than the folders'.
    """
    config = check_text_encoder(manifest, t5_path, clip_path)
    encoder = build_text_encoder(config, device)
    differing = compared(manifest["text_encoder"], encoder.identity)
    if differing:
        models = " and ".join(f"`{x}` ({getattr(config, x)})" for x in FOLDERS[config.text_encoder])
        raise DataError(
            f"The captions were not encoded with the models of {models}: {differing}; give the "
            "folders that preprocessed them."
        )
    return encoder


def check_text_encoder(
    manifest: Mapping[str, Any], t5_path: str | None, clip_path: str | None
) -> TextEncoderConfig:
    """Return which text encoder made the embeddings of a dataset, without loading its models.

    Raises:
        ConfigError, DataError: see `text_encoder_from_manifest`; models are not compared.
    """
    identity = manifest.get("text_encoder")
    advice = "make the data again with tools/preprocess_video.py."
    if not isinstance(identity, Mapping) or identity.get("text_encoder") not in FOLDERS:
        raise DataError(
            f"The manifest must name its text encoder, but holds {identity!r}; {advice}"
        )
    name = identity["text_encoder"]
    try:
        sizes = [
            int(identity[size])
            for size in ("length", "width", "pooled_width")[: 3 if name == HASHED else 1]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The manifest's text encoder ({dict(identity)}) lacks a size ({error!r}); {advice}"
        ) from None
    config = TextEncoderConfig(name, t5_path, clip_path, *sizes)
    for folder in FOLDERS[name]:
        read_settings(folder, str(getattr(config, folder)))
    return config
