"""Reads the folders of published encoders: their settings, their tokenizer, and wrong folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json that describe the model itself.

    Entries whose names begin with ``_``, the version of transformers and the dtype are left out.
    """
    incidental = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in settings.items() if k[:1] != "_" and k not in incidental}


def compared(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe the first difference between two mappings of settings; return "" if they agree.

    The result is a clause for an error message, such as "`channels` was 4, but is 8".
    """
    for name in sorted({*earlier, *current}):
        before = earlier.get(name)
        now = current.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            return compared(before, now)
        return f"`{name}` was {before!r}, but is {now!r}"
    return ""


def read_settings(name: str, path: str, file: str = "config.json") -> dict[str, Any]:
    """Return the content of the config.json, or of another ``file``, in the folder ``path``.

    If the file cannot be read, a ConfigError names ``name``, the option that gives the folder.
    """
    if Path(path).is_file():
        raise ConfigError(
            f"`{name}` ({path}) is a single file, but must be a local folder with a {file} and "
            "weights, as transformers and diffusers save it; give such a folder."
        )
    try:
        return read_json_object(Path(path) / file, not_finite=True)
    except UnreadableFile as error:
        if error.missing:
            raise ConfigError(
                f"`{name}` ({path}) must be a local folder with a {file}; nothing is loaded from a "
                f"hub, so {advice_for(path) or 'correct the path'}."
            ) from None
        raise ConfigError(
            f"`{name}` ({path}) has a {file} that cannot be read ({error.reason}); copy it again."
        ) from None


def loaded(name: str, path: str, load: Callable[[], tuple[Any, Any]], fault: str) -> Any:
    """Return a model from the folder ``path``, all of whose weights the folder has.

    Args:
        name: the option that gives the folder, for messages.
        load: returns the model and what the library says of its loading.
        fault: clause that says what the folder has if ``load`` fails.

    Raises:
        ConfigError: the model cannot be loaded, or lacks weights.
    """
    try:
        model, info = load()
    # Damaged files raise errors of safetensors, tokenizers, pickle or torch, of no common class.
    except Exception as error:
        raise ConfigError(
            f"`{name}` ({path}) {fault} ({error}); copy the whole folder again."
        ) from error
    if info["missing_keys"]:
        raise ConfigError(
            f"`{name}` ({path}) lacks the weights {', '.join(sorted(info['missing_keys']))}; copy "
            "the whole folder again."
        )
    return model


def advice_for(path: str) -> str:
    """Return advice for a path that holds no single model but a pipeline of diffusers, else ""."""
    folder = Path(path)
    models = sorted(x.parent.name for x in folder.glob("*/config.json"))
    if not models or (folder / "config.json").is_file():
        return ""
    return f"give one of the folders in it ({', '.join(models)})"


def tokenizer_folder(path: str) -> str:
    """Return the folder of a text encoder's tokenizer: its own or, if it has none, one beside it.

    In diffusers' pipelines, the tokenizer of ``text_encoder_2`` is in ``tokenizer_2``.
    """
    folder = Path(path).resolve()
    own_name = folder.name.replace("text_encoder", "tokenizer")
    siblings = (folder.with_name(own_name), folder.with_name("tokenizer"))
    if (Path(path) / "tokenizer_config.json").is_file():
        return path
    return next((str(x) for x in siblings if x != folder and x.is_dir()), path)


def variant_of(path: str, stems: Sequence[str]) -> str | None:
    """Return the variant of a model's weights, such as "fp16" for ``model.fp16.safetensors``.

    ``stems`` are the names of whole files of weights without suffixes. Return None if the folder
    also has weights without a variant, or none at all.
    """
    variants = []
    for file in sorted(Path(path).glob("*")):
        for stem in stems:
            match = re.fullmatch(_WEIGHTS.format(re.escape(stem)), file.name)
            if match:
                variants.append(next((x for x in match.groups() if x), None))
    return variants[0] if variants and None not in variants else None


_WEIGHTS = (
    r"{}(?:\.(\w+))?(?:-\d+-of-\d+)?(?:\.(\w+))?"
    r"(?:\.safetensors|\.bin|\.safetensors\.index(?:\.(\w+))?\.json|\.bin\.index(?:\.(\w+))?\.json)"
)
"""A pattern of the names of files of weights and of their indices, with the name of a variant."""
