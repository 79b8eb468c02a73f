"""One pipeline chunk of an MMDiT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.video.model.chunk import Blueprint
from megatron_ext.video.model.joint_chunk import JointChunk, JointEmbedding, check_inputs
from megatron_ext.video.model.tokens import TokenRange


class Embedding(JointEmbedding):
    """The embedding of an MMDiT; one linear layer embeds the text tokens."""

    def text_layer(self, plan: Blueprint) -> torch.nn.Module:
        return torch.nn.Linear(plan.sizes.text_width, plan.sizes.hidden_size)

    def text(self, given: Mapping[str, Any], part: TokenRange) -> Tensor:
        text: Tensor = self.txt_in(given["txt"][:, part.text].to(self.img_in.weight.dtype))
        return text


class MMDiT(JointChunk):
    """One pipeline chunk of an MMDiT; the first holds the embedding, the last the final layer."""

    title = "MMDiT"
    embedding_class = Embedding

    def forward(
        self,
        *,
        img_ids: Tensor,
        txt_ids: Tensor,
        img: Tensor | None = None,
        txt: Tensor | None = None,
        timesteps: Tensor | None = None,
        y_vec: Tensor | None = None,
        guidance: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Run this chunk; all ranks of a replica pass the same, complete inputs.

        All arguments are keywords, because the wrapper for 16-bit precision casts only positional
        arguments, and timesteps must stay float32. Stages after the first use only the ids.

        Args:
            img_ids: latent frame, row and column of each of N image tokens, ``[b, N, 3]``.
            txt_ids: zeros for each of L text tokens, ``[b, L, 3]``.
            img: noised latents of C channels in patches of p x p, ``[b, N, C * p * p]``.
            txt: text embeddings, ``[b, L, text_width]``.
            timesteps: ``[b]``, float32, from 0 (clean) to 1 (noise).
            y_vec: pooled text, ``[b, pooled_width]``.
            guidance: guidance strengths, ``[b]``; given exactly if ``guidance_embed`` is set.
            cond: reference frames and their mask, ``[b, N, (C + 1) * p * p]``; given exactly if
                ``cond_embed`` is set.

        Returns:
            As `run` says.
        """
        given = {
            "img_ids": img_ids, "txt_ids": txt_ids, "img": img, "txt": txt, "timesteps": timesteps,
            "y_vec": y_vec, "guidance": guidance, "cond": cond,
        }  # fmt: skip
        check_inputs(self.sizes, given, is_first_stage=self.pre_process)
        return self.run(given, self.local_tokens(txt_ids.size(1), img_ids.size(1)))
