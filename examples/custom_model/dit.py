"""A video model of your own: a plain DiT in place of the MMDiT of pretrain_video.py.

The task needs only one function: `build_chunk` returns the blocks of one pipeline stage. Data,
loss, schedules, checkpoints, averages, logs and flags are those of pretrain_video.py. Flags that
concern the MMDiT's own blocks are refused. Every rank holds whole matrices and sequences here, so
tensor and context parallelism are refused too.

    python examples/custom_model/dit.py --nproc-per-node 4 --pipeline-model-parallel-size 2 ...
    SMOKE=1 bash examples/custom_model/dit.sh
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import GELU, Linear, Module, ModuleDict, Sequential, SiLU

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.config.flags import changed
from megatron_ext.errors import ConfigError
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.main import main
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.data.setup import video_step_stats
from megatron_ext.video.model.attention import rotary_table, rotate
from megatron_ext.video.model.joint_blocks import stage_blocks
from megatron_ext.video.model.joint_chunk import timestep_sinusoid
from megatron_ext.video.model.linear import modulated, start_at_zero
from megatron_ext.video.networks.mmdit.config import sizes_of
from megatron_ext.video.task import FLOW

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.train.run import Run


OTHER_MODELS = {
    "joint": "mlp_ratio guidance_embed guidance adaln_zero recompute_double_blocks "
    "recompute_single_blocks double_block_cost",
    "fp8": "fp8_format",
    "video": "task video_model",
}
"""Flags, by section, that have no effect on this model and are refused."""


class Block(Module):
    """Attention, then an MLP; vec shifts and scales the norm before each (arXiv:2212.09748)."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation, self.qkv, self.proj = Linear(h, 6 * h), Linear(h, 3 * h), Linear(h, h)
        self.mlp = Sequential(Linear(h, 4 * h), GELU("tanh"), Linear(4 * h, h))
        start_at_zero(self.modulation)

    def forward(self, x: Tensor, vec: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``; vec is ``[b, h]``."""
        parts = self.modulation(F.silu(vec)).chunk(6, dim=-1)
        shift, scale, gate, shift_of_mlp, scale_of_mlp, gate_of_mlp = parts
        x = x + gate * self.attend(modulated(x, shift, scale), table)
        return x + gate_of_mlp * self.mlp(modulated(x, shift_of_mlp, scale_of_mlp))

    def attend(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Apply bidirectional self-attention to ``[s, b, h]``, with rotary positions ``table``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (rotate(q, table), rotate(k, table), v))
        attended = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)
        return self.proj(attended.flatten(-2))


class DiT(MegatronModule):
    """The blocks of one stage; the first stage embeds inputs, the last predicts the velocity."""

    share_embeddings_and_output_weights = False

    def __init__(
        self, config: TransformerConfig, sizes: JointSizes, blocks: range, first: bool, last: bool
    ) -> None:
        super().__init__(config=config)
        h = sizes.hidden_size
        self.sizes, self.first, self.last = sizes, first, last
        self.entering: Tensor | None = None
        if first:
            self.img_in, self.txt_in = Linear(sizes.token_width, h), Linear(sizes.text_width, h)
            self.time_in = Sequential(Linear(TIMESTEP_WIDTH, h), SiLU(), Linear(h, h))
            self.pooled_in = Linear(sizes.pooled_width, h)
            self.cond_in = Linear(sizes.cond_width, h) if sizes.cond_embed else None
        # Name blocks by their number in the whole model, so that checkpoints fit any layout.
        self.blocks = ModuleDict({str(i): Block(h, sizes.num_heads) for i in blocks})
        if last:
            self.modulation, self.out = Linear(h, 2 * h), Linear(h, sizes.token_width)
            start_at_zero(self.out)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take the output of the previous stage; megatron-core's schedules call this."""
        self.entering = tensors[0]

    def boundary_shape(self, num_text: int, num_image: int, micro_batch_size: int) -> list[int]:
        """Return the shape of the tensor between stages: a row for each token, and one for vec."""
        return [num_text + num_image + 1, micro_batch_size, self.sizes.hidden_size]

    def embed(self, img: Tensor, txt: Tensor, t: Tensor, y: Tensor, cond: Tensor | None) -> Tensor:
        """Return text, image and vec as rows ``[L + N + 1, b, h]``."""
        dtype = self.img_in.weight.dtype
        image = self.img_in(img.to(dtype))
        if self.cond_in is not None and cond is not None:
            image = image + self.cond_in(cond.to(dtype))
        vec = self.time_in(timestep_sinusoid(t).to(dtype)) + self.pooled_in(y.to(dtype))
        rows = torch.cat((self.txt_in(txt.to(dtype)), image, vec.unsqueeze(1)), dim=1)
        return rows.transpose(0, 1)

    def forward(
        self,
        *,
        img_ids: Tensor,
        txt_ids: Tensor,
        img: Tensor | None = None,
        txt: Tensor | None = None,
        timesteps: Tensor | None = None,
        y_vec: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Run the stage; stages after the first get only the ids, as in `MMDiT.forward`."""
        rows = self.entering
        if self.first:
            assert img is not None and txt is not None
            assert timesteps is not None and y_vec is not None
            rows = self.embed(img, txt, timesteps, y_vec, cond)
        assert rows is not None
        x, vec, sizes = rows[:-1], rows[-1], self.sizes
        ids = torch.cat((txt_ids, img_ids), dim=1)
        table = rotary_table(ids, sizes.axes_dim, sizes.head_dim, sizes.rope_theta)
        for block in self.blocks.values():
            x = block(x, vec, table)
        if not self.last:
            return torch.cat((x, vec.unsqueeze(0)))
        shift, scale = self.modulation(F.silu(vec)).chunk(2, dim=-1)
        image = modulated(x[txt_ids.size(1) :], shift, scale)
        return self.out(image).transpose(0, 1)


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> DiT:
    """Build one pipeline chunk; the first holds the embedding, the last the output."""
    placement = context.placement
    sizes = sizes_of(config)
    dealt = stage_blocks(sizes, placement.num_stages, double_block_cost=1.0)
    blocks = dealt[placement.stage_of(context.pp_rank, vp_stage or 0)]
    return DiT(transformer_config, sizes, blocks, pre_process, post_process)


def prepare(config: RunConfig) -> tuple[RunConfig, None]:
    """Refuse flags that this model does not support, before any rank starts; then read the clips.

    Raises:
        ConfigError: such flags are given; it has a sentence for each.
    """
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    errors = [
        f"`{flag}` is there for the models of pretrain_video.py, not for this DiT; leave it out."
        for section, names in OTHER_MODELS.items()
        for flag in changed(config, [section], names.split())
    ]
    if shared > 1:
        errors.append(
            "`--tensor-model-parallel-size` x `--context-parallel-size` "
            f"({shared}) must be 1 for this DiT, whose ranks hold whole matrices and sequences; "
            "use pipeline stages and replicas."
        )
    if errors:
        raise ConfigError(errors)
    return FLOW.preflight(config)


def step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return the statistics of a step, with the floating-point operations of this model.

    Each weight takes 6 operations per token, and a block has 12 h^2 weights. The attention scores
    of n tokens, and their product with the values, take 2 n^2 h multiplications.
    """
    source, sizes = run.train_source, sizes_of(run.config)
    lengths = [x.num_tokens for x in source.video_plan.sequences(source.coming)]
    h = sizes.hidden_size
    flops = sum(6.0 * sizes.num_blocks * n * (12 * h + 2 * n) * h for n in lengths)
    return dataclasses.replace(video_step_stats(run, num_microbatches), flops=flops)


TASK = dataclasses.replace(FLOW, model_chunk=build_chunk, step_stats=step_stats, preflight=prepare)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:]))
