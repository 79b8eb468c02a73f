"""Text models inside multimodal ones: the text part is trained, the rest of the folder is kept.

The config.json of such a folder has the entries of the text model in ``text_config``, and the text
model's tensors have a prefix. An export writes the text model's entries and tensors back, and
copies all other tensors and files of the folder unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_ext.text.convert.config import HuggingFaceModel
    from megatron_ext.text.convert.weights import Weights

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
    """

    model_type: str
    architecture: str
    texts: tuple[str, ...]
    forms: tuple[Paths, ...] = LLAVA
    key: str = "text_config"

    def form(self, names: Collection[str]) -> Paths:
        """Return the form of which a folder with the tensors ``names`` has the most."""

        def count(form: Paths) -> int:
            return sum(name.startswith(roots_of(form)) for name in names)

        return max(self.forms, key=count)


def roots_of(form: Paths) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors of a text model."""
    return tuple(f"{path}." for path in form.values())


@dataclass(frozen=True)
class Wrapping:
    """The multimodal model around a text model.

    Attributes:
        kind: what kind of model it is.
        text: the text model, as if it stood alone.
        folder: the folder with its tensors; None if only its config.json is known.
    """

    kind: Multimodal
    text: HuggingFaceModel
    folder: Path | None

    def weights(self, weights: Weights, names: Collection[str]) -> Weights:
        """Return ``weights`` of a text model with the paths that they have in this folder."""
        return weights.but(renamed=self.kind.form(names))

    def content(
        self, raw: Mapping[str, Any], text: Mapping[str, Any], key_of_dtype: str
    ) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            raw: its content as it was read.
            text: the new content of the text model's own config.json.
            key_of_dtype: name of the entry with the dtype, which both have.
        """
        inner = dict(text)
        if "architectures" not in raw[self.kind.key]:
            del inner["architectures"]
        whole = {key: value for key, value in raw.items() if key not in NOT_KEPT}
        whole |= {self.kind.key: inner, key_of_dtype: text[key_of_dtype]}
        return whole | {"tie_word_embeddings": text["tie_word_embeddings"]}


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


class OtherTensors:
    """The tensors of a multimodal folder that do not belong to its text model.

    Attributes:
        described: all of them, by name, without values (on the meta device).
    """

    def __init__(self, model: HuggingFaceModel) -> None:
        from megatron_ext.text.convert.reading import WeightFolder

        self._source = WeightFolder(model)
        packed = self._source.others & self._source.quantized.keys()
        if packed:
            self._source.close()
            raise CheckpointError(
                f"{self._source.folder} holds `{min(packed)}`, which is not of the text model, "
                "with few bits, but weights are written plain; use the folder of the model before "
                "it was quantized."
            )
        self.described = {
            name: torch.empty_like(self._source.tensor(name), device="meta")
            for name in sorted(self._source.others)
        }

    def read(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def close(self) -> None:
        self._source.close()
