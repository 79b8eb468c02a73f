"""From captions to embeddings: T5 and CLIP from local folders, or hashed words without weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.config.encoding import ENCODERS, HASHED, T5_CLIP, UMT5, TextEncoderConfig
from megatron_ext.data.video.identity import compared, public
from megatron_ext.errors import ConfigError, DataError

_WORD = re.compile(r"[^\W_]+")


class TextEncoder(Protocol):
    """What preprocessing, online encoding and sampling need of a text encoder."""

    length: int
    width: int
    pooled_width: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the embeddings; stored beside them and compared."""
        ...

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings ``[n, l, d]`` and pooled vectors ``[n, e]`` float32; "" is the null text."""
        ...


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
        """See `TextEncoder.identity`."""
        sizes = {"length": self.length, "width": self.width, "pooled_width": self.pooled_width}
        return {"text_encoder": HASHED, **sizes}

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `TextEncoder.encode`."""
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
    """Signs ``[width]`` of variance 1, from the word's hash, the same on every machine."""
    seed = int.from_bytes(
        hashlib.blake2b(f"{salt}\0{word}".encode(), digest_size=16).digest(), "big"
    )
    raw = np.random.PCG64(seed).random_raw(width)
    return torch.from_numpy((raw >> np.uint64(63)).astype(np.float32) * 2 - 1)


class T5AndClip:
    """T5's last hidden states, padded and without attention mask, and CLIP's pooled text vector.

    As Open-Sora 2.0 uses them: pad tokens take part in attention, here and in the denoiser.

    Args:
        config: with both folders.
        device: where they compute.

    Raises:
        ConfigError: transformers is missing, or a folder holds no such model with all its weights
            and its tokenizer.
    """

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        transformers = _transformers()
        self.length, self.device = config.text_length, device
        kinds = {
            "t5_path": (transformers.T5EncoderModel, "t5"),
            "clip_path": (transformers.CLIPTextModel, "clip", "clip_text_model"),
        }
        loaded = {
            name: _load(transformers, kind, name, str(getattr(config, name)), types)
            for name, (kind, *types) in kinds.items()
        }
        (t5, self._t5_tokenizer), (clip, self._clip_tokenizer) = loaded.values()
        self._t5 = t5.to(device).eval().requires_grad_(False)
        self._clip = clip.to(device).eval().requires_grad_(False)
        self.width = int(t5.config.d_model)
        self.pooled_width = int(clip.config.hidden_size)
        self._clip_length = int(clip.config.max_position_embeddings)
        self._settings = {
            name.removesuffix("_path"): public(_read_settings(name, str(getattr(config, name))))
            for name in kinds
        }

    @property
    def identity(self) -> dict[str, Any]:
        """See `TextEncoder.identity`."""
        return {"text_encoder": T5_CLIP, "length": self.length, **self._settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `TextEncoder.encode`."""
        rows = self._t5(input_ids=self._ids(self._t5_tokenizer, captions, self.length))
        ids = self._ids(self._clip_tokenizer, captions, self._clip_length)
        pooled = self._clip(input_ids=ids).pooler_output
        return rows.last_hidden_state.float(), pooled.float()

    def _ids(self, tokenizer: Any, captions: Sequence[str], length: int) -> Tensor:
        padded = tokenizer(
            list(captions), max_length=length, padding="max_length", truncation=True,
            return_tensors="pt",
        )  # fmt: skip
        ids: Tensor = padded["input_ids"].to(self.device)
        return ids


class UmT5:
    """umT5's last hidden states, zero from the end of the caption on, and no pooled vector.

    As Wan 2.1 (arXiv:2503.20314) uses it: pad tokens take no part in the encoder, and in the
    denoiser they are zeros that are not masked. The pooled vector is a single zero.

    Args:
        config: with the folder.
        device: where it computes.

    Raises:
        ConfigError: transformers is missing, or the folder holds no such model with all its weights
            and its tokenizer.
    """

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        transformers = _transformers()
        self.length, self.device, path = config.text_length, device, str(config.t5_path)
        kind = transformers.UMT5EncoderModel
        model, self._tokenizer = _load(transformers, kind, "t5_path", path, [UMT5])
        self._model = model.to(device).eval().requires_grad_(False)
        self.width, self.pooled_width = int(model.config.d_model), 1
        self._settings = public(_read_settings("t5_path", path))

    @property
    def identity(self) -> dict[str, Any]:
        """See `TextEncoder.identity`."""
        return {"text_encoder": UMT5, "length": self.length, UMT5: self._settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `TextEncoder.encode`."""
        padded = self._tokenizer(
            list(captions), max_length=self.length, padding="max_length", truncation=True,
            return_tensors="pt",
        ).to(self.device)  # fmt: skip
        mask = padded["attention_mask"]
        rows = self._model(input_ids=padded["input_ids"], attention_mask=mask).last_hidden_state
        pooled = torch.zeros(len(captions), self.pooled_width, device=self.device)
        # Not a product: what the model makes of padding need not be finite.
        return torch.where(mask[..., None] != 0, rows.float(), 0.0), pooled


def build_text_encoder(
    config: TextEncoderConfig, device: torch.device | None = None
) -> TextEncoder:
    """The text encoder of a configuration.

    Raises:
        ConfigError: transformers is missing, or a folder is of no use.
    """
    if config.text_encoder == HASHED:
        return HashedWords(config)
    kind = UmT5 if config.text_encoder == UMT5 else T5AndClip
    return kind(config, device or torch.device("cpu"))


def width_of(config: TextEncoderConfig) -> int:
    """Features of a row of the embeddings, without loading a model.

    Raises:
        ConfigError: a folder without a configuration of T5.
    """
    if config.text_encoder == HASHED:
        return config.text_width
    path = str(config.t5_path)
    width = _read_settings("t5_path", path).get("d_model")
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
    """The text encoder that made the embeddings of a dataset, to encode new captions.

    Args:
        manifest: of the dataset; see `shards.read_json`.
        t5_path, clip_path: folders of the models; hashed words come from the manifest alone.
        device: where models compute.

    Raises:
        ConfigError: a folder is missing, of no use, or given for hashed words.
        DataError: the manifest names no text encoder, or other models than the folders'.
    """
    identity = manifest.get("text_encoder")
    advice = "make the data again with tools/preprocess_video.py."
    if not isinstance(identity, Mapping) or identity.get("text_encoder") not in ENCODERS:
        raise DataError(
            f"The manifest must name its text encoder, but holds {identity!r}; {advice}"
        )
    hashed = identity["text_encoder"] == HASHED
    try:
        sizes = [
            int(identity[name])
            for name in ("length", "width", "pooled_width")[: 3 if hashed else 1]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The manifest's text encoder ({dict(identity)}) lacks a size ({error!r}); {advice}"
        ) from None
    config = TextEncoderConfig(identity["text_encoder"], t5_path, clip_path, *sizes)
    encoder = build_text_encoder(config, device)
    differing = compared(identity, encoder.identity)
    if differing:
        raise DataError(
            f"The captions were not encoded with the models of `t5_path` ({t5_path}) and "
            f"`clip_path` ({clip_path}): {differing}; give the folders that preprocessed them."
        )
    return encoder


def _load(
    transformers: Any, kind: Any, name: str, path: str, types: Sequence[str]
) -> tuple[Any, Any]:
    """A model of one of some types with its tokenizer, nothing of it made up."""
    found = _read_settings(name, path).get("model_type")
    if found not in types:
        raise ConfigError(
            f"`{name}` ({path}) holds a model of type {found}, but must hold one of type "
            f"{' or '.join(types)}; correct the path."
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model, info = kind.from_pretrained(path, local_files_only=True, output_loading_info=True)
    # Broken files give errors of safetensors, tokenizers, pickle and torch, which share no class.
    except Exception as error:
        raise ConfigError(
            f"`{name}` ({path}) holds no model and tokenizer that can be loaded ({error}); copy "
            "the whole folder again."
        ) from error
    if info["missing_keys"]:
        raise ConfigError(
            f"`{name}` ({path}) lacks the weights {', '.join(sorted(info['missing_keys']))}; copy "
            "the whole folder again."
        )
    return model, tokenizer


def _read_settings(name: str, path: str) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(path) / "config.json").read_bytes()))
    except FileNotFoundError:
        raise ConfigError(
            f"`{name}` ({path}) must be a local folder with a config.json; nothing is loaded from "
            "a hub, so correct the path."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"`{name}` ({path}) has a config.json that cannot be read ({error}); copy it again."
        ) from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"`text_encoder` {T5_CLIP} and {UMT5} need the package transformers, which is not "
            f"installed; run `pip install 'megatron-ext[video]'`, or choose {HASHED}."
        ) from None
    return transformers
