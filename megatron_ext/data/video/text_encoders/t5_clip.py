"""T5 with CLIP beside it, as MMDiTs take their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.encoding import T5_CLIP, TextEncoderConfig
from megatron_ext.data.video.identity import public
from megatron_ext.data.video.text_encoders.loading import (
    load,
    read_settings,
    tokenized,
    transformers_for,
)


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
        ids: Tensor = tokenized(tokenizer, captions, length)["input_ids"].to(self.device)
        return ids
