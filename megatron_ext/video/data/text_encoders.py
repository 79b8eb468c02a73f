"""Builds text encoders: one hashes words, the others are models of the package transformers.

MMDiT networks use T5 and CLIP, Wan networks use UMT5.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import FOLDERS, HASHED, T5_CLIP, TextEncoderConfig
from megatron_ext.video.config.encoding import UMT5 as UMT5_NAME
from megatron_ext.video.data.codec import compared, public


class TextEncoder(Protocol):
    """The interface of a text encoder for preprocessing, online encoding and sampling.

    Attributes:
        length: number l of rows of an encoded caption: its tokens or words, then padding.
        width: number d of features of a row.
        pooled_width: number e of features of the pooled embedding; 0 if there is none.
        identity: settings that determine the embeddings; a dataset stores them for comparison.
    """

    length: int
    width: int
    pooled_width: int
    identity: dict[str, Any]

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the embeddings of n captions, ``[n, l, d]`` and pooled ``[n, e]``, in float32."""
        ...

    def cuts(self, caption: str) -> bool:
        """Tell whether `encode` truncates a caption, because it has more than `length` tokens."""
        ...


_WORD = re.compile(r"[^\W_]+")


class HashedWords:
    """A text encoder without weights: each word has a fixed random vector.

    Row i holds the vector of word i; rows after the last word are zero. The pooled vector is the
    sum of a second vector of each word, divided by the square root of the number of words. The
    empty caption is all zeros. Case and punctuation are ignored: "a cat." and "a Cat" are the same.
    """

    def __init__(self, config: TextEncoderConfig) -> None:
        self.length = config.text_length
        self.width = config.text_width
        self.pooled_width = config.pooled_width
        sizes = {"length": self.length, "width": self.width, "pooled_width": self.pooled_width}
        self.identity = {"text_encoder": HASHED, **sizes}

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

    def cuts(self, caption: str) -> bool:
        return len(_WORD.findall(caption.lower())) > self.length


@lru_cache(maxsize=1 << 16)
def _word_vector(salt: str, word: str, width: int) -> Tensor:
    """Return a vector ``[width]`` of 1 and -1 that depends only on the hash of a word.

    ``salt`` distinguishes several vectors of a word.
    """
    digest = hashlib.blake2b(f"{salt}\0{word}".encode(), digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(digest, "big")).random_raw(width)
    return torch.from_numpy((raw >> np.uint64(63)).astype(np.float32) * 2 - 1)


def load_model(
    text_encoder: str,
    model_class: str,
    name: str,
    path: str,
    types: Sequence[str],
    tokenizer_path: str,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer with the package transformers; return both.

    Args:
        text_encoder: the chosen text encoder, for messages.
        model_class: name of the model's class in transformers.
        name: the option that gives ``path``, for messages.
        path: local folder of the model.
        types: accepted values of ``model_type`` in the folder's config.json.
        tokenizer_path: local folder of the tokenizer.

    Raises:
        ConfigError: transformers is missing, the model is of another type, weights are missing, or
            a folder cannot be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"`text_encoder` {text_encoder} needs the package transformers, which is not "
            f"installed; run `pip install 'megatron-ext[video]'`, or choose {HASHED}."
        ) from None
    model_type = read_settings(name, path).get("model_type")
    if model_type not in types:
        raise ConfigError(
            f"`{name}` ({path}) holds a model of type {model_type}, but must hold one of type "
            f"{' or '.join(types)}; correct the path."
        )
    try:
        # If this is not given, transformers asks on the terminal whether to run remote code.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tokenizer_path, local_files_only=True, trust_remote_code=False
        )
        model, info = getattr(transformers, model_class).from_pretrained(
            path, local_files_only=True, output_loading_info=True
        )
    # Damaged files raise errors of safetensors, tokenizers, pickle or torch, of no common class.
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
    return model.eval().requires_grad_(False), tokenizer


def tokenized(tokenizer: Any, captions: Sequence[str], length: int) -> Any:
    """Return ``input_ids`` and ``attention_mask`` of captions, ``[n, length]`` each."""
    return tokenizer(
        list(captions), max_length=length, padding="max_length", truncation=True,
        return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip


def is_cut(tokenizer: Any, caption: str, length: int) -> bool:
    """Tell whether `tokenized` would truncate a caption to ``length`` tokens."""
    # `verbose=False` avoids a warning about captions that are too long for the model.
    return len(tokenizer(caption, truncation=False, verbose=False)["input_ids"]) > length


def read_settings(name: str, path: str) -> dict[str, Any]:
    """Return the content of the config.json in the folder ``path``.

    If the file cannot be read, a ConfigError names ``name``, the option that gives the folder.
    """
    try:
        return read_json_object(Path(path) / "config.json", not_finite=True)
    except UnreadableFile as error:
        if error.missing:
            raise ConfigError(
                f"`{name}` ({path}) must be a local folder with a config.json; nothing is loaded "
                "from a hub, so correct the path."
            ) from None
        raise ConfigError(
            f"`{name}` ({path}) has a config.json that cannot be read ({error.reason}); copy it "
            "again."
        ) from None


class T5AndClip:
    """A text encoder that gives T5's last hidden states and CLIP's pooled text vector.

    As in Open-Sora 2.0, T5 gets no attention mask. So pad tokens take part in attention, in T5 and
    in the denoiser.
    """

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        self.length = config.text_length
        self.device = device
        t5 = str(config.t5_path)
        clip = str(config.clip_path)
        model, self._t5_tokenizer = load_model(T5_CLIP, "T5EncoderModel", "t5_path", t5, ["t5"], t5)
        self._t5 = model.to(device)
        self.width = int(model.config.d_model)
        model, self._clip_tokenizer = load_model(
            T5_CLIP, "CLIPTextModel", "clip_path", clip, ["clip", "clip_text_model"], clip
        )
        self._clip = model.to(device)
        self.pooled_width = int(model.config.hidden_size)
        self._clip_length = int(model.config.max_position_embeddings)
        self.identity = {
            "text_encoder": T5_CLIP,
            "length": self.length,
            "t5": public(read_settings("t5_path", t5)),
            "clip": public(read_settings("clip_path", clip)),
        }

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids = tokenized(self._t5_tokenizer, captions, self.length)["input_ids"]
        rows = self._t5(input_ids=ids.to(self.device)).last_hidden_state
        ids = tokenized(self._clip_tokenizer, captions, self._clip_length)["input_ids"]
        pooled = self._clip(input_ids=ids.to(self.device)).pooler_output
        return rows.float(), pooled.float()

    def cuts(self, caption: str) -> bool:
        return is_cut(self._t5_tokenizer, caption, self.length)


class UMT5:
    """A text encoder that gives UMT5's last hidden states, zero at pads, and no pooled vector.

    As in `diffusers.WanPipeline`, the encoder masks pad tokens, and the denoiser attends to their
    zero rows. Captions are cleaned as in that pipeline without the optional package ftfy: character
    references such as ``&amp;`` are resolved twice, and runs of white space become one space.
    Embeddings therefore do not depend on whether ftfy is installed. The tokenizer is in the model's
    folder or, as in diffusers' pipelines, in ``../tokenizer``.
    """

    pooled_width = 0

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        path = str(config.t5_path)
        self.length = config.text_length
        self.device = device
        sibling = Path(path).resolve().parent / "tokenizer"
        own = (Path(path) / "tokenizer_config.json").is_file() or not sibling.is_dir()
        model, self._tokenizer = load_model(
            UMT5_NAME, "UMT5EncoderModel", "t5_path", path, ["umt5"], path if own else str(sibling)
        )
        self._model = model.to(device)
        self.width = int(model.config.d_model)
        settings = public(read_settings("t5_path", path))
        self.identity = {"text_encoder": UMT5_NAME, "length": self.length, "umt5": settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        cleaned = [_cleaned(caption) for caption in captions]
        words = tokenized(self._tokenizer, cleaned, self.length)
        mask = words["attention_mask"].to(self.device)
        output = self._model(input_ids=words["input_ids"].to(self.device), attention_mask=mask)
        rows = output.last_hidden_state.float().masked_fill(mask[..., None] == 0, 0.0)
        return rows, rows.new_zeros(len(captions), self.pooled_width)

    def cuts(self, caption: str) -> bool:
        return is_cut(self._tokenizer, _cleaned(caption), self.length)


def _cleaned(caption: str) -> str:
    return " ".join(html.unescape(html.unescape(caption)).split())


def build_text_encoder(
    config: TextEncoderConfig, device: torch.device | None = None
) -> TextEncoder:
    """Build the text encoder of a configuration; raise ConfigError if a model cannot be loaded."""
    if config.text_encoder == HASHED:
        return HashedWords(config)
    kind = T5AndClip if config.text_encoder == T5_CLIP else UMT5
    return kind(config, device or torch.device("cpu"))


def encoder_checks(config: TextEncoderConfig) -> list[Callable[[], Any]]:
    """Return a check for each model folder of the text encoder.

    A check is a function that reads the folder's config.json and raises ConfigError if it cannot.
    """
    paths = {name: getattr(config, name) for name in FOLDERS[config.text_encoder]}
    return [partial(read_settings, name, path) for name, path in paths.items() if path is not None]


def width_of(config: TextEncoderConfig) -> int:
    """Return d, the number of features of a token embedding, without loading a model.

    ConfigError is raised if the folder of T5 or UMT5 has no config.json that gives d.
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
        manifest: the dataset's manifest, which names the encoder.
        t5_path: local folder of T5 or UMT5; None if the encoder needs none.
        clip_path: local folder of CLIP; None if the encoder needs none.

    Raises:
        ConfigError: a folder is missing, cannot be loaded, or is given although the encoder needs
            none.
        DataError: the manifest names no text encoder, or other models than those in the folders.
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
    """Return the configuration of the text encoder that a dataset's manifest names.

    Check its model folders ``t5_path`` and ``clip_path``, but load no model. ConfigError is raised
    for a folder that is missing, unreadable or not needed, and DataError for a manifest that lacks
    the text encoder or its sizes.
    """
    identity = manifest.get("text_encoder")
    advice = "make the data again with tools/preprocess_video.py."
    if not isinstance(identity, Mapping) or identity.get("text_encoder") not in FOLDERS:
        raise DataError(
            f"The manifest must name its text encoder, but holds {identity!r}; {advice}"
        )
    name = identity["text_encoder"]
    named = ("length", "width", "pooled_width") if name == HASHED else ("length",)
    try:
        sizes = [int(identity[size]) for size in named]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The manifest's text encoder ({dict(identity)}) lacks a size ({error!r}); {advice}"
        ) from None
    config = TextEncoderConfig(name, t5_path, clip_path, *sizes)
    for folder in FOLDERS[name]:
        read_settings(folder, str(getattr(config, folder)))
    return config
