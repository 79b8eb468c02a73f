"""One pipeline chunk of HunyuanVideo: a token refiner on the text, then double and single blocks.

Text and image have the same order here as in other networks of such blocks, [text; image]. The
published code has [image; text], which is the same for attention and changes no weight.

The captions of a batch differ in length. Rows behind a caption's tokens take part in nothing: no
token attends to them, and their own hidden states are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.layers import sdpa
from megatron_ext.video.config.sizes import EPSILON, TIMESTEP_WIDTH
from megatron_ext.video.model.chunk import Blueprint
from megatron_ext.video.model.joint_chunk import (
    JointChunk,
    JointEmbedding,
    check_inputs,
    timestep_sinusoid,
)
from megatron_ext.video.model.linear import VectorEmbedder, start_at_zero
from megatron_ext.video.model.tokens import TokenRange
from megatron_ext.video.networks.hunyuan.config import HunyuanSizes


class RefinerBlock(torch.nn.Module):
    """Attention of the text to itself, then an MLP; each output is gated and added."""

    def __init__(self, sizes: HunyuanSizes, *, zero: bool) -> None:
        super().__init__()
        h = sizes.hidden_size
        self.heads = sizes.num_heads, sizes.head_dim
        self.norm1 = torch.nn.LayerNorm(h, eps=EPSILON)
        self.linear_qkv = torch.nn.Linear(h, 3 * h)
        self.linear_proj = torch.nn.Linear(h, h)
        self.norm2 = torch.nn.LayerNorm(h, eps=EPSILON)
        self.linear_fc1 = torch.nn.Linear(h, sizes.refiner_mlp_size)
        self.linear_fc2 = torch.nn.Linear(sizes.refiner_mlp_size, h)
        self.modulation = torch.nn.Linear(h, 2 * h)
        if zero:
            start_at_zero(self.modulation)

    def forward(self, x: Tensor, vec: Tensor, mask: Tensor) -> Tensor:
        """Return the block's output for text ``[b, l, h]``.

        ``vec`` is the conditioning ``[b, h]``; ``mask``, ``[b, 1, 1, l]``, is True at tokens.
        """
        attention_gate, mlp_gate = self.modulation(F.silu(vec)).unsqueeze(1).chunk(2, dim=-1)
        qkv = torch.unflatten(self.linear_qkv(self.norm1(x)), -1, (3, *self.heads))
        query, key, value = qkv.transpose(1, 3).unbind(2)
        attended = sdpa.attend(query, key, value, mask=mask).transpose(1, 2).flatten(2)
        x = x + attention_gate * self.linear_proj(attended)
        inner = F.silu(self.linear_fc1(self.norm2(x)))
        return x + mlp_gate * self.linear_fc2(inner)  # type: ignore[no-any-return]


class TokenRefiner(torch.nn.Module):
    """Embeds the text: a linear layer, then blocks that the timestep and the mean text modulate.

    All ranks run it on the whole text, which is short beside the video.
    """

    def __init__(self, sizes: HunyuanSizes, *, zero: bool) -> None:
        super().__init__()
        h = sizes.hidden_size
        self.linear_in = torch.nn.Linear(sizes.text_width, h)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.mean_in = VectorEmbedder(sizes.text_width, h)
        self.blocks = torch.nn.ModuleList(
            RefinerBlock(sizes, zero=zero) for _ in range(sizes.num_refiner_blocks)
        )

    def forward(self, text: Tensor, sinusoid: Tensor, mask: Tensor) -> Tensor:
        """Return the embedded text ``[b, l, h]``.

        Args:
            text: outputs of the text encoder, ``[b, l, text_width]``.
            sinusoid: `timestep_sinusoid` of the timesteps.
            mask: True at tokens, ``[b, l]``; each text has at least one.
        """
        weights = mask.unsqueeze(2).float()
        mean = (text * weights).sum(dim=1) / weights.sum(dim=1)
        vec = self.time_in(sinusoid) + self.mean_in(mean)
        x: Tensor = self.linear_in(text)
        for block in self.blocks:
            x = block(x, vec, mask[:, None, None])
        return x


class Embedding(JointEmbedding):
    """The embedding of HunyuanVideo, whose text tokens a token refiner embeds."""

    cond_bias = False

    def text_layer(self, plan: Blueprint) -> torch.nn.Module:
        return TokenRefiner(plan.sizes, zero=plan.options.adaln_zero)

    def text(self, given: Mapping[str, Any], part: TokenRange) -> Tensor:
        text = given["txt"].to(self.img_in.weight.dtype)
        sinusoid = timestep_sinusoid(given["timesteps"])
        refined: Tensor = self.txt_in(text, sinusoid, given["txt_mask"])
        return refined[:, part.text]


class HunyuanVideo(JointChunk):
    """One pipeline chunk of HunyuanVideo; the first has the embedding, the last the final layer."""

    title = "HunyuanVideo"
    embedding_class = Embedding

    def forward(
        self,
        *,
        img_ids: Tensor,
        txt_ids: Tensor,
        txt_mask: Tensor,
        img: Tensor | None = None,
        txt: Tensor | None = None,
        timesteps: Tensor | None = None,
        y_vec: Tensor | None = None,
        guidance: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Run this chunk; all ranks of a replica pass the same, complete inputs.

        All arguments are keywords, because the wrapper for 16-bit precision casts only positional
        arguments, and timesteps must stay float32. Stages after the first use only the ids and the
        mask.

        Args:
            img_ids: latent frame, row and column of each of N image tokens, ``[b, N, 3]``.
            txt_ids: zeros for each of L text tokens, ``[b, L, 3]``.
            txt_mask: True at the tokens of each text, which precede its padding, ``[b, L]``. A text
                without tokens counts as one of its first row.
            img: noised latents of C channels in patches of p x p, ``[b, N, C * p * p]``.
            txt: text embeddings, ``[b, L, text_width]``.
            timesteps: ``[b]``, float32, from 0 (clean) to 1 (noise).
            y_vec: pooled text, ``[b, pooled_width]``.
            guidance: guidance strengths, ``[b]``; given exactly if ``guidance_embed`` is set.
            cond: reference frames and their mask, ``[b, N, (C + 1) * p * p]``; given exactly if
                ``cond_embed`` is set.

        Returns:
            As `run` says.

        Raises:
            ConfigError, DataError: an input is missing, or its shape or type does not fit.
        """
        given: dict[str, Tensor | None] = {
            "img_ids": img_ids, "txt_ids": txt_ids, "img": img, "txt": txt, "timesteps": timesteps,
            "y_vec": y_vec, "guidance": guidance, "cond": cond,
        }  # fmt: skip
        check_inputs(self.sizes, given, is_first_stage=self.pre_process)
        if cond is not None:
            # The published layer has the mask behind the latents.
            given["cond"] = cond.roll(-(self.sizes.patch_size**2), dims=2)
        batch, num_image = img_ids.shape[:2]
        num_text = txt_ids.size(1)
        if txt_mask.shape != (batch, num_text) or txt_mask.dtype != torch.bool:
            raise DataError(
                f"`txt_mask` has the shape {list(txt_mask.shape)} and the type {txt_mask.dtype}, "
                f"but must be [{batch}, {num_text}] of torch.bool, True at the tokens of each text."
            )
        masked = txt_mask.clone()
        masked[:, :1] = True
        keys = torch.cat((masked, masked.new_ones(batch, num_image)), dim=1)
        tokens = dataclasses.replace(self.local_tokens(num_text, num_image), keys=keys)
        return self.run({**given, "txt_mask": masked}, tokens)
