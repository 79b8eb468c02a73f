"""Builds text encoders: one hashes words, the others are models of the package transformers.

FLUX and Open-Sora use T5 and CLIP, Wan uses UMT5, HunyuanVideo uses Llama and CLIP.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import (
    FOLDERS,
    HASHED,
    LLAMA_CLIP,
    T5_CLIP,
    TextEncoderConfig,
    spelled,
)
from megatron_ext.video.config.encoding import UMT5 as UMT5_NAME
from megatron_ext.video.data.model_folders import (
    compared,
    loaded,
    public,
    read_settings,
    tokenizer_folder,
    variant_of,
)


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
) -> tuple[Any, Any]:
    """Load a model and its tokenizer with the package transformers; return both.

    The tokenizer is in the model's folder or, as in diffusers' pipelines, in one beside it.

    Args:
        text_encoder: the chosen text encoder, for messages.
        model_class: name of the model's class in transformers.
        name: the option that gives ``path``, for messages.
        path: local folder of the model.
        types: accepted values of ``model_type`` in the folder's config.json.

    Raises:
        ConfigError: transformers is missing, the model is of another type, weights are missing, or
            a folder cannot be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"`--text-encoder {text_encoder}` needs the package transformers, which is not "
            f"installed; run `pip install 'megatron-ext[video]'`, or choose {HASHED}."
        ) from None
    model_type = read_settings(name, path).get("model_type")
    if model_type not in types:
        raise ConfigError(
            f"`{name}` ({path}) holds a model of type {model_type}, but must hold one of type "
            f"{' or '.join(types)}; correct the path."
        )

    def load() -> tuple[Any, Any]:
        # If this is not given, transformers asks on the terminal whether to run remote code.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tokenizer_folder(path), local_files_only=True, trust_remote_code=False
        )
        model, info = getattr(transformers, model_class).from_pretrained(
            path, local_files_only=True, output_loading_info=True,
            variant=variant_of(path, ("model", "pytorch_model")),
        )  # fmt: skip
        return (model, tokenizer), info

    fault = "holds no model and tokenizer that can be loaded"
    model, tokenizer = loaded(name, path, load, fault)
    if model.dtype == torch.float16:
        # T5's activations exceed the range of half precision.
        model = model.float()
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


class _PooledClip:
    """CLIP's text model, of which the pooled vector ``[n, width]`` is taken.

    ``text_encoder`` is the chosen text encoder, for messages; ``path`` is the folder of CLIP.
    """

    def __init__(self, text_encoder: str, path: str, device: torch.device) -> None:
        types = ["clip", "clip_text_model"]
        model, self._tokenizer = load_model(
            text_encoder, "CLIPTextModel", "--clip-path", path, types
        )
        self._model = model.to(device)
        self._device = device
        self.width = int(model.config.hidden_size)
        self._length = int(model.config.max_position_embeddings)

    def encode(self, captions: Sequence[str]) -> Tensor:
        ids = tokenized(self._tokenizer, captions, self._length)["input_ids"]
        pooled: Tensor = self._model(input_ids=ids.to(self._device)).pooler_output
        return pooled.float()


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
        model, self._tokenizer = load_model(T5_CLIP, "T5EncoderModel", "--t5-path", t5, ["t5"])
        self._t5 = model.to(device)
        self.width = int(model.config.d_model)
        self._clip = _PooledClip(T5_CLIP, clip, device)
        self.pooled_width = self._clip.width
        self.identity = {
            "text_encoder": T5_CLIP,
            "length": self.length,
            "t5": public(read_settings("--t5-path", t5)),
            "clip": public(read_settings("--clip-path", clip)),
        }

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids = tokenized(self._tokenizer, captions, self.length)["input_ids"]
        rows = self._t5(input_ids=ids.to(self.device)).last_hidden_state
        return rows.float(), self._clip.encode(captions)

    def cuts(self, caption: str) -> bool:
        return is_cut(self._tokenizer, caption, self.length)


class UMT5:
    """A text encoder that gives UMT5's last hidden states, zero at pads, and no pooled vector.

    As in `diffusers.WanPipeline`, the encoder masks pad tokens, and the denoiser attends to their
    zero rows. Captions are cleaned as in that pipeline without the optional package ftfy: character
    references such as ``&amp;`` are resolved twice, and runs of white space become one space.
    Embeddings therefore do not depend on whether ftfy is installed.
    """

    pooled_width = 0

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        path = str(config.t5_path)
        self.length = config.text_length
        self.device = device
        model, self._tokenizer = load_model(
            UMT5_NAME, "UMT5EncoderModel", "--t5-path", path, ["umt5"]
        )
        self._model = model.to(device)
        self.width = int(model.config.d_model)
        settings = public(read_settings("--t5-path", path))
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


_INSTRUCTION = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following "
    "aspects: 1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the "
    "objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n"
)
"""The text that HunyuanVideo puts before a caption; its rows are cut off."""
_ENDING = "<|eot_id|>"


class LlamaAndClip:
    """A text encoder that gives hidden states of Llama, zero at pads, and CLIP's pooled vector.

    As in HunyuanVideo (arXiv:2412.03603), a caption stands in a template that asks for a
    description of a video, whose rows are cut off. The hidden states are those two layers before
    the last one.
    """

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        path = str(config.llama_path)
        clip = str(config.clip_path)
        self.length = config.text_length
        self.device = device
        types = ["llama", "llava"]
        model, self._tokenizer = load_model(LLAMA_CLIP, "AutoModel", "--llama-path", path, types)
        # The whole model of the original repository also sees pictures.
        self._llama = getattr(model, "language_model", model).to(device)
        # Rows are cut off at the left; tokenizers of chat models may pad there.
        self._tokenizer.padding_side = "right"
        self._skipped = len(self._tokenizer(_INSTRUCTION)["input_ids"])
        self.width = int(self._llama.config.hidden_size)
        self._clip = _PooledClip(LLAMA_CLIP, clip, device)
        self.pooled_width = self._clip.width
        self.identity = {
            "text_encoder": LLAMA_CLIP,
            "length": self.length,
            "llama": public(read_settings("--llama-path", path)),
            "clip": public(read_settings("--clip-path", clip)),
        }

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        whole = [_in_template(caption) for caption in captions]
        words = tokenized(self._tokenizer, whole, self._skipped + self.length)
        mask = words["attention_mask"].to(self.device)
        output = self._llama(
            input_ids=words["input_ids"].to(self.device), attention_mask=mask,
            output_hidden_states=True,
        )  # fmt: skip
        rows = output.hidden_states[-3].float().masked_fill(mask[..., None] == 0, 0.0)
        return rows[:, self._skipped :], self._clip.encode(captions)

    def cuts(self, caption: str) -> bool:
        return is_cut(self._tokenizer, _in_template(caption), self._skipped + self.length)


def _in_template(caption: str) -> str:
    return f"{_INSTRUCTION}{caption}{_ENDING}"


def _cleaned(caption: str) -> str:
    return " ".join(html.unescape(html.unescape(caption)).split())


def build_text_encoder(
    config: TextEncoderConfig, device: torch.device | None = None
) -> TextEncoder:
    """Build the text encoder of a configuration; raise ConfigError if a model cannot be loaded."""
    if config.text_encoder == HASHED:
        return HashedWords(config)
    kinds: dict[str, Callable[[TextEncoderConfig, torch.device], TextEncoder]]
    kinds = {T5_CLIP: T5AndClip, UMT5_NAME: UMT5, LLAMA_CLIP: LlamaAndClip}
    return kinds[config.text_encoder](config, device or torch.device("cpu"))


def encoder_checks(config: TextEncoderConfig) -> list[Callable[[], Any]]:
    """Return a check for each model folder of the text encoder.

    A check is a function that reads the folder's config.json and raises ConfigError if it cannot.
    """
    paths = {name: getattr(config, name) for name in FOLDERS[config.text_encoder]}
    return [
        partial(read_settings, spelled(name), path)
        for name, path in paths.items()
        if path is not None
    ]


def widths_of(config: TextEncoderConfig) -> tuple[int, int]:
    """Return the features of a token embedding and of the pooled vector, without loading a model.

    ConfigError is raised if a folder of the encoder has no config.json that gives its width.
    """
    if config.text_encoder == HASHED:
        return config.text_width, config.pooled_width
    widths = {_POOLED: 0}
    for name in FOLDERS[config.text_encoder]:
        path = str(getattr(config, name))
        settings = read_settings(spelled(name), path)
        # The whole model of HunyuanVideo's original repository has Llama's settings in an entry, as
        # CLIP with both of its models has.
        settings = settings.get("text_config", settings)
        entry = "d_model" if name == "t5_path" else "hidden_size"
        width = settings.get(entry)
        if not isinstance(width, int) or width < 1:
            raise ConfigError(
                f"`{spelled(name)}` ({path}) has a config.json whose `{entry}` is {width!r}, but "
                "must be the width of the model; correct the path."
            )
        widths[name] = width
    pooled = widths.pop(_POOLED)
    (width,) = widths.values()
    return width, pooled


_POOLED = "clip_path"
"""The field of the model that gives pooled vectors; the other one gives rows of tokens."""


def text_encoder_from_manifest(
    manifest: Mapping[str, Any],
    t5_path: str | None = None,
    clip_path: str | None = None,
    *,
    llama_path: str | None = None,
    device: torch.device | None = None,
) -> TextEncoder:
    """Build the text encoder that made the embeddings of a dataset, to encode new captions.

    Args:
        manifest: the dataset's manifest, which names the encoder.
        t5_path, clip_path, llama_path: local folders of T5 or UMT5, of CLIP and of Llama; None
            where the encoder needs none.

    Raises:
        ConfigError: a folder is missing, cannot be loaded, or is given although the encoder needs
            none.
        DataError: the manifest names no text encoder, or other models than those in the folders.
    """
    config = check_text_encoder(manifest, t5_path, clip_path, llama_path)
    encoder = build_text_encoder(config, device)
    differing = compared(manifest["text_encoder"], encoder.identity)
    if differing:
        folders = FOLDERS[config.text_encoder]
        models = " and ".join(f"`{spelled(x)}` ({getattr(config, x)})" for x in folders)
        raise DataError(
            f"The captions were not encoded with the models of {models}: {differing}; give the "
            "folders that preprocessed them."
        )
    return encoder


def check_text_encoder(
    manifest: Mapping[str, Any],
    t5_path: str | None,
    clip_path: str | None,
    llama_path: str | None = None,
) -> TextEncoderConfig:
    """Return the configuration of the text encoder that a dataset's manifest names.

    Check its model folders, such as ``t5_path``, but load no model. ConfigError is raised
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
    flags = ("text_length", "text_width", "pooled_width")
    given: dict[str, Any] = dict(zip(flags, sizes, strict=False))
    config = TextEncoderConfig(name, t5_path, clip_path, llama_path=llama_path, **given)
    for folder in FOLDERS[name]:
        read_settings(spelled(folder), str(getattr(config, folder)))
    return config
