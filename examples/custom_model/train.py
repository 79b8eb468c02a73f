"""A model and a loss of your own: one file, nothing to register.

`Task` takes three functions. Here the datasets are GPT's; the model is GPT with a soft cap on its
logits, as Gemma 2 has it; and the loss stops growing at a ceiling, so that a few broken documents
cannot pull the weights. Every layout, checkpoint, log and flag of pretrain_gpt.py works with it.

    python examples/custom_model/train.py --nproc-per-node 4 ...   (the flags of pretrain_gpt.py)
    SMOKE=1 bash examples/custom_model/train.sh
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.data.gpt import build_gpt_datasets
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, pair
from megatron_ext.models.gpt import GPTModel
from megatron_ext.models.layers import layer_spec
from megatron_ext.training.pretrain import main
from megatron_ext.training.task import Task

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext

CAP = 30.0
CEILING = 12.0


class CappedGPT(GPTModel):
    """GPT whose logits stay between -CAP and CAP.

    Each tensor-parallel rank holds a slice of the vocabulary ``[s, b, v/tp]``; an element-wise
    cap needs no communication.
    """

    def _logits(self, hidden: Tensor) -> Tensor:
        return CAP * torch.tanh(super()._logits(hidden) / CAP)


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> CappedGPT:
    """The layers of one pipeline chunk; the first holds the embedding, the last the output."""
    model = config.model
    return CappedGPT(
        config=transformer_config,
        transformer_layer_spec=layer_spec(
            transformer_config, impl=model.transformer_impl, vp_stage=vp_stage
        ),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
        pg_collection=context.pgs,
    )


def ceiling_loss(losses: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Tensor, Report]:
    """``(sum, count, report)`` of one micro-batch; the step does all dividing.

    Args:
        losses: cross-entropy per token, ``[b, s]``.
        loss_mask: 1 where a token is a target, ``[b, s]``.
    """
    mask = loss_mask.float()
    total = (losses.float().clamp(max=CEILING) * mask).sum()
    count = mask.sum().to(torch.int)
    cross_entropy = (losses.float() * mask).sum()
    return total, count, {"lm loss": pair(cross_entropy, count), "trained loss": pair(total, count)}


def forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk on one micro-batch; the loss is called on the last pipeline stage only."""
    output: Any = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output, partial(ceiling_loss, loss_mask=batch.loss_mask)


TASK = Task(datasets=build_gpt_datasets, model_chunk=build_chunk, forward_step=forward_step)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:]))
