"""Text encoders with models of transformers from local folders; nothing comes from a hub.

MMDiTs take their text from T5 with CLIP beside it, Wan's networks from UMT5.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import HASHED, T5_CLIP, TextEncoderConfig
from megatron_ext.video.config.encoding import UMT5 as NAME
from megatron_ext.video.data.codec import public


def transformers_for(text_encoder: str) -> Any:
    """Return the package transformers, which a text encoder needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"`text_encoder` {text_encoder} needs the package transformers, which is not "
            f"installed; run `pip install 'megatron-ext[video]'`, or choose {HASHED}."
        ) from None
    return transformers


def load(
    transformers: Any,
    kind: Any,
    name: str,
    path: str,
    types: Sequence[str],
    tokenizer_path: str | None = None,
) -> tuple[Any, Any]:
    """Load a model of one of some types with its tokenizer, none of its weights made up.

    Args:
        transformers: the package.
        kind: class of the model.
        name: option that gives the path.
        types: one of them must be the ``model_type`` of the folder.
        tokenizer_path: folder of the tokenizer, None for the model's.

    Raises:
        ConfigError: the folder holds no such model with all its weights and its tokenizer.
    """
    found = read_settings(name, path).get("model_type")
    if found not in types:
        raise ConfigError(
            f"`{name}` ({path}) holds a model of type {found}, but must hold one of type "
            f"{' or '.join(types)}; correct the path."
        )
    words = tokenizer_path or path
    try:
        # False rather than nothing, for which transformers asks the terminal whether to run code.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            words, local_files_only=True, trust_remote_code=False
        )
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


def tokenized(tokenizer: Any, captions: Sequence[str], length: int) -> Any:
    """Return ``input_ids`` and ``attention_mask``, ``[n, length]`` each, cut and padded."""
    return tokenizer(
        list(captions), max_length=length, padding="max_length", truncation=True,
        return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip


def read_settings(name: str, path: str) -> dict[str, Any]:
    """Read a folder's config.json.

    Args:
        name: option that gives the path.

    Raises:
        ConfigError: there is none that can be read.
    """
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


class T5AndClip:
    """T5's last hidden states, padded and without attention mask, and CLIP's pooled text vector.

    As Open-Sora 2.0 uses them: pad tokens take part in attention, here and in the denoiser.

    Args:
        config: names both folders.
        device: where they compute.

    Raises:
        ConfigError: transformers is missing, or a folder holds no such model with all its weights
            and its tokenizer.
    """

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        transformers = transformers_for(T5_CLIP)
        self.length, self.device = config.text_length, device
        kinds = {
            "t5_path": (transformers.T5EncoderModel, "t5"),
            "clip_path": (transformers.CLIPTextModel, "clip", "clip_text_model"),
        }
        loaded = {
            name: load(transformers, kind, name, str(getattr(config, name)), types)
            for name, (kind, *types) in kinds.items()
        }
        (t5, self._t5_tokenizer), (clip, self._clip_tokenizer) = loaded.values()
        self._t5 = t5.to(device).eval().requires_grad_(False)
        self._clip = clip.to(device).eval().requires_grad_(False)
        self.width = int(t5.config.d_model)
        self.pooled_width = int(clip.config.hidden_size)
        self._clip_length = int(clip.config.max_position_embeddings)
        self._settings = {
            name.removesuffix("_path"): public(read_settings(name, str(getattr(config, name))))
            for name in kinds
        }

    @property
    def identity(self) -> dict[str, Any]:
        return {"text_encoder": T5_CLIP, "length": self.length, **self._settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = self._t5(input_ids=self._ids(self._t5_tokenizer, captions, self.length))
        ids = self._ids(self._clip_tokenizer, captions, self._clip_length)
        pooled = self._clip(input_ids=ids).pooler_output
        return rows.last_hidden_state.float(), pooled.float()

    def _ids(self, tokenizer: Any, captions: Sequence[str], length: int) -> Tensor:
        ids: Tensor = tokenized(tokenizer, captions, length)["input_ids"].to(self.device)
        return ids


class UMT5:
    """UMT5's last hidden states of the tokens; rows of pad tokens are zero. Nothing is pooled.

    As `diffusers.WanPipeline` does it: the encoder masks pad tokens, the denoiser attends to their
    zero rows. Captions are cleaned as there without the package ftfy, which would mend text in a
    wrong encoding: character references such as ``&amp;`` are resolved, twice, and runs of white
    space become one space. So embeddings do not depend on what is installed.

    Args:
        config: names the folder of a UMT5EncoderModel. Its tokenizer lies beside the weights, or,
            as in the folder of a pipeline of diffusers, in ``../tokenizer``.
        device: where it computes.

    Raises:
        ConfigError: transformers is missing, or the folder holds no such model with all its weights
            and its tokenizer.
    """

    pooled_width = 0

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        transformers, path = transformers_for(NAME), str(config.t5_path)
        self.length, self.device = config.text_length, device
        model, self._tokenizer = load(
            transformers, transformers.UMT5EncoderModel, "t5_path", path, ["umt5"],
            _tokenizer_folder(Path(path)),
        )  # fmt: skip
        self._model = model.to(device).eval().requires_grad_(False)
        self.width = int(model.config.d_model)
        self._settings = public(read_settings("t5_path", path))

    @property
    def identity(self) -> dict[str, Any]:
        return {"text_encoder": NAME, "length": self.length, "umt5": self._settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        words = tokenized(self._tokenizer, [cleaned(c) for c in captions], self.length)
        mask = words["attention_mask"].to(self.device)
        output = self._model(input_ids=words["input_ids"].to(self.device), attention_mask=mask)
        rows = output.last_hidden_state.float()
        rows = rows.masked_fill(mask[..., None] == 0, 0.0)
        return rows, rows.new_zeros(len(captions), self.pooled_width)


def cleaned(caption: str) -> str:
    """Return a caption as UMT5 is given it; see `UMT5`."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def _tokenizer_folder(path: Path) -> str | None:
    """Return where a pipeline of diffusers has the tokenizer; None beside the weights."""
    beside = path.resolve().parent / "tokenizer"
    if (path / "tokenizer_config.json").is_file() or not beside.is_dir():
        return None
    return str(beside)
