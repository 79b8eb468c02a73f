"""One pipeline chunk of an MMDiT.

Every block of every stage needs ``vec``, the embedding of timestep and pooled text. It travels as
one more row of the hidden tensor, ``[s + 1, b, h]``: its gradient then flows back to the embedders
on the first stage by the pipeline's own messages, so that no embedder is held twice, nor its
gradient summed over the stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.video.config.mmdit import MMDiTSizes
from megatron_ext.video.model.chunk import Blocks, VideoChunk
from megatron_ext.video.model.mmdit.blocks import DoubleBlock, FinalLayer, SingleBlock
from megatron_ext.video.model.mmdit.inputs import Embedding, check_inputs
from megatron_ext.video.model.mmdit.options import MMDiTOptions, stage_blocks
from megatron_ext.video.model.rotary import rotary_table
from megatron_ext.video.model.tokens import LocalTokens, TokenRange


class MMDiT(VideoChunk):
    """One pipeline chunk of an MMDiT; the first holds the embedding, the last the final layer."""

    title = "MMDiT"

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        groups: ProcessGroupCollection,
        *,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        super().__init__(config, sizes, options, groups, stage=stage, num_stages=num_stages)
        self.embedding = Embedding(config, sizes, groups.tp) if self.pre_process else None
        first_single = sizes.num_double_blocks
        self.double_blocks, self.single_blocks = Blocks(), Blocks()
        for number in stage_blocks(sizes, num_stages, options.double_block_cost)[stage]:
            if number < first_single:
                self.double_blocks[str(number)] = DoubleBlock(config, sizes, options, groups)
            else:
                single = SingleBlock(config, sizes, options, groups)
                self.single_blocks[str(number - first_single)] = single
        self.final_layer = (
            FinalLayer(config, sizes, options, groups.tp) if self.post_process else None
        )

    def local_tokens(self, num_text: int, num_image: int) -> LocalTokens:
        """Return which tokens this rank works on.

        Raises:
            DataError: the sequence cannot be cut into equal parts.
        """
        whole = TokenRange.whole(num_text, num_image)
        cp_slice = whole.part(self.cp_group.rank(), self.cp_group.size())
        if not self.config.sequence_parallel:
            return LocalTokens(cp_slice, cp_slice)
        return LocalTokens(cp_slice, cp_slice.part(self.tp_group.rank(), self.tp_group.size()))

    def image_tokens(self, num_text: int, num_image: int) -> slice:
        """Return the image tokens to which the velocity on this rank belongs.

        Targets and masks are to be cut alike, and the sum over tokens divided by the number of
        tokens of all ranks, for ranks may hold unequal numbers of them, or none.
        """
        return self.local_tokens(num_text, num_image).cp_slice.image

    def boundary_shape(self, num_text: int, num_image: int, micro_batch_size: int) -> list[int]:
        """Return the shape of the tensor between stages on this rank, ``[s + 1, b, h]``."""
        held = self.local_tokens(num_text, num_image).part
        return [len(held) + 1, micro_batch_size, self.sizes.hidden_size]

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
        """Run this chunk on inputs that are whole, and the same, on all ranks of a replica.

        They are given by keyword, so that a wrapper for 16-bit precision leaves the timesteps
        alone. Stages after the first read the ids only.

        Args:
            img_ids: latent frame, row and column of each image token, ``[b, N, 3]``.
            txt_ids: ``[b, L, 3]``, zeros.
            img: noised latents, ``[b, N, C * p * p]``.
            txt: ``[b, L, text_width]``.
            timesteps: ``[b]`` float32; 1 is noise.
            y_vec: pooled text, ``[b, pooled_width]``.
            guidance: ``[b]``; with ``guidance_embed``, and only then.
            cond: ``[b, N, (C + 1) * p * p]``; with ``cond_embed``, and only then.

        Returns:
            On the last stage the velocity of the tokens ``image_tokens(L, N)``,
            ``[b, local N, C * p * p]``; before it hidden states and vec, ``[s + 1, b, h]``.
        """
        given = {
            "img_ids": img_ids,
            "txt_ids": txt_ids,
            "img": img,
            "txt": txt,
            "timesteps": timesteps,
            "y_vec": y_vec,
            "guidance": guidance,
            "cond": cond,
        }
        check_inputs(self.sizes, given, is_first_stage=self.pre_process)
        tokens = self.local_tokens(txt_ids.size(1), img_ids.size(1))
        hidden, vec = self._enter(given, tokens.part)
        ids = torch.cat((txt_ids, img_ids), dim=1)[:, tokens.cp_slice.start : tokens.cp_slice.end]
        sizes = self.sizes
        table = rotary_table(ids, sizes.axes_dim, sizes.head_dim, sizes.rope_theta)
        hidden = self._run_blocks(hidden, vec, table, tokens)
        if self.final_layer is None:
            return torch.cat((hidden, vec.unsqueeze(0)))
        return self._velocity(self.final_layer(hidden, vec), tokens.cp_slice)

    def _enter(self, given: Mapping[str, Tensor | None], held: TokenRange) -> tuple[Tensor, Tensor]:
        """Return ``[s, b, h]`` and vec ``[b, h]``: embedded, or as the stage before gives them."""
        if self.embedding is not None:
            return self.embedding(given, held)  # type: ignore[no-any-return]
        assert self.entering is not None
        return self.entering[:-1], self.entering[-1]

    def _run_blocks(
        self, hidden: Tensor, vec: Tensor, table: tuple[Tensor, Tensor], tokens: LocalTokens
    ) -> Tensor:
        for blocks, recomputed in (
            (self.double_blocks, self.options.recompute_double_blocks),
            (self.single_blocks, self.options.recompute_single_blocks),
        ):
            for number, block in blocks.items():
                if int(number) < recomputed and self.training and torch.is_grad_enabled():
                    hidden = _recomputed(block, hidden, vec, table, tokens)
                else:
                    hidden = block(hidden, vec, table, tokens)
        return hidden

    def _velocity(self, output: Tensor, cp_slice: TokenRange) -> Tensor:
        """Return the velocity of the slice's image tokens, on every tensor-parallel rank.

        Text rows went through the final layer too: equal parts are gathered at once, and the
        gradient of vec comes, as in the blocks, from the tokens that the rank holds.
        """
        if self.config.sequence_parallel:
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return output[cp_slice.local_text :].transpose(0, 1).contiguous()


def _recomputed(
    block: torch.nn.Module,
    hidden: Tensor,
    vec: Tensor,
    table: tuple[Tensor, Tensor],
    tokens: LocalTokens,
) -> Tensor:
    """Run a block that keeps its inputs only."""

    def run(hidden: Tensor, vec: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return block(hidden, vec, (cos, sin), tokens)  # type: ignore[no-any-return]

    output: Tensor = tensor_parallel.checkpoint(run, False, hidden, vec, *table)
    return output
