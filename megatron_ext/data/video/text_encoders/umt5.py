"""UMT5, from which Wan's video DiTs take their text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.encoding import UMT5 as NAME
from megatron_ext.config.encoding import TextEncoderConfig
from megatron_ext.data.video.identity import public
from megatron_ext.data.video.text_encoders.loading import (
    load,
    read_settings,
    tokenized,
    transformers_for,
)


class UMT5:
    """UMT5's last hidden states of the tokens; rows of pad tokens are zero. Nothing is pooled.

    As `diffusers.WanPipeline` does it: the encoder masks pad tokens, the denoiser attends to their
    zero rows. Captions are cleaned as there without the package ftfy, which would mend text in a
    wrong encoding: character references such as ``&amp;`` are resolved, twice, and runs of white
    space become one space. So embeddings do not depend on what is installed.

    Args:
        config: with the folder of a UMT5EncoderModel. Its tokenizer lies beside the weights, or, as
            in the folder of a pipeline of diffusers, in ``../tokenizer``.
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
        """See `TextEncoder.identity`."""
        return {"text_encoder": NAME, "length": self.length, "umt5": self._settings}

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `TextEncoder.encode`; the pooled vectors are empty, ``[n, 0]``."""
        words = tokenized(self._tokenizer, [cleaned(c) for c in captions], self.length)
        mask = words["attention_mask"].to(self.device)
        output = self._model(input_ids=words["input_ids"].to(self.device), attention_mask=mask)
        rows = output.last_hidden_state.float()
        rows = rows.masked_fill(mask[..., None] == 0, 0.0)
        return rows, rows.new_zeros(len(captions), self.pooled_width)


def cleaned(caption: str) -> str:
    """A caption as UMT5 is given it; see `UMT5`."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def _tokenizer_folder(path: Path) -> str | None:
    """Where a pipeline of diffusers has the tokenizer; None where it lies beside the weights."""
    beside = path.resolve().parent / "tokenizer"
    if (path / "tokenizer_config.json").is_file() or not beside.is_dir():
        return None
    return str(beside)
