"""Models and tokenizers of transformers from local folders; nothing comes from a hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.config.encoding import HASHED
from megatron_ext.errors import ConfigError


def transformers_for(text_encoder: str) -> Any:
    """The package transformers.

    Args:
        text_encoder: that needs it.

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
    """A model of one of some types with its tokenizer, nothing of it made up.

    Args:
        transformers: the package.
        kind: class of the model.
        name: of the option that gives the path.
        path: of the folder.
        types: of which one must be the ``model_type`` of the folder.
        tokenizer_path: folder of the tokenizer, None for the same.

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
    """``input_ids`` and ``attention_mask``, ``[n, length]`` each, cut and padded."""
    return tokenizer(
        list(captions), max_length=length, padding="max_length", truncation=True,
        return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip


def read_settings(name: str, path: str) -> dict[str, Any]:
    """What a folder's config.json says.

    Args:
        name: of the option that gives the path.
        path: of the folder.

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
