"""Text models inside multimodal ones: the text part is trained, the rest of the folder is kept.

The config.json of such a folder has the entries of the text model in ``text_config``, and the text
model's tensors have a prefix. An export writes the text model's entries and tensors back, and
copies all other tensors and files of the folder unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError

Paths = Mapping[str, str]
"""Path of a text model's tensors in its own files -> their path in a multimodal folder."""
LLAVA: tuple[Paths, ...] = (
    {"model": "language_model.model", "lm_head": "language_model.lm_head"},
    {"model": "model.language_model", "lm_head": "lm_head"},
)
"""The paths that transformers writes for models made like LLaVA, and those within its classes."""


@dataclass(frozen=True)
class Multimodal:
    """A kind of multimodal model whose text part is a model of one of the families.

    Attributes:
        model_type: the entry `model_type` of its config.json.
        architecture: the name of its class in transformers.
        texts: the `model_type` of its text part, or several; the first is that of a config.json
            which does not say it.
        forms: the paths of the text model's tensors; the form whose names a folder has is taken.
        key: name of the entry of config.json with the text model's entries.
        also_named: names that the class has in published folders with code of their own.
    """

    model_type: str
    architecture: str
    texts: tuple[str, ...]
    forms: tuple[Paths, ...] = LLAVA
    key: str = "text_config"
    also_named: tuple[str, ...] = ()

    def form(self, names: Collection[str]) -> Paths:
        """Return the form of which a folder with the tensors ``names`` has the most."""

        def count(form: Paths) -> int:
            return sum(name.startswith(roots_of(form)) for name in names)

        return max(self.forms, key=count)

    def content(self, raw: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with a changed text model.

        Args:
            raw: its content as it was read.
            text: the new content of the text model's own config.json.
        """
        inner = dict(text)
        if "architectures" not in raw[self.key]:
            del inner["architectures"]
        whole = {key: value for key, value in raw.items() if key not in NOT_KEPT}
        shared = {name: text[name] for name in ("torch_dtype", "tie_word_embeddings")}
        return {**whole, self.key: inner, **shared}


def roots_of(form: Paths) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors of a text model."""
    return tuple(f"{path}." for path in form.values())


NOT_KEPT = ("dtype", "quantization_config")
"""Entries of config.json that an export replaces: weights are written in one plain dtype."""


def text_config(kind: Multimodal, raw: Mapping[str, Any], whole: Any, path: Path) -> dict[str, Any]:
    """Return the content of config.json that the text part of a model would have alone.

    Args:
        raw: the content of the multimodal model's config.json, which stands at ``path``.
        whole: transformers' configuration object for ``raw``.

    Raises:
        CheckpointError: the entry with the text model's entries is missing or of another family.
    """
    given = raw.get(kind.key)
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"{path} has no `{kind.key}` with the entries of the text model, as a "
            f"{kind.model_type} model needs; copy it again."
        )
    # transformers decides by the entry of the whole model whether its embeddings are tied.
    inner = {
        "model_type": kind.texts[0],
        **given,
        "tie_word_embeddings": bool(whole.tie_word_embeddings),
    }
    if inner["model_type"] not in kind.texts:
        raise CheckpointError(
            f"{path} says that the text part is a {inner['model_type']!r} model, but that of "
            f"{kind.model_type} can be converted only as {' or '.join(kind.texts)}; use such a "
            "model."
        )
    inner.pop("architectures", None)
    if "quantization_config" in raw:
        inner["quantization_config"] = raw["quantization_config"]
    return inner


_OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def other_files(folder: Path) -> list[Path]:
    """Return the files of a multimodal folder that hold neither weights nor the configuration."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name != "config.json"
        and not any(path.match(pattern) for pattern in _OF_WEIGHTS)
    )
