"""Builds megatron-core's unmodified GPTModel, with layers that need no Transformer Engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.core import moe_submodules, mtp_on_this_chunk
from megatron_ext.extras.audit.reproduce_router import router_class
from megatron_ext.parallel.context import ParallelContext

HIDDEN, LENGTH, VOCABULARY = 32, 32, 96


def stock_config(context: ParallelContext, **options: Any) -> TransformerConfig:
    """Return a small TransformerConfig for the pipeline size of ``context``.

    ``options`` are further fields, or replace those set here.
    """
    base = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": context.pgs.pp.size(),
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**base, **options})


def stock_gpt(
    context: ParallelContext,
    *,
    tied: bool = False,
    positions: str = "rope",
    attention: Callable[..., Any] | None = None,
    **options: Any,
) -> GPTModel:
    """Return megatron-core's GPTModel of this rank's pipeline stage, in training mode.

    Args:
        tied: whether the output layer shares the weight of the embedding.
        positions: ``position_embedding_type`` of the model.
        attention: class to use as core attention; None for megatron-core's, which refuses packed
            samples.
        options: fields of the TransformerConfig.
    """
    config = stock_config(context, **options)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        experts = moe_submodules(layer.submodules.mlp)
        if experts is not None:
            experts.router = router_class()
        if attention is not None:
            layer.submodules.self_attention.submodules.core_attention = attention
    depths = None
    if config.mtp_num_layers and mtp_on_this_chunk(config, None):
        # A stage with only MTP has no decoder layer whose spec could be copied.
        layer = spec if spec.layer_specs else get_gpt_layer_local_spec()
        depths = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=context.is_first_stage,
        post_process=context.is_last_stage,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
        mtp_block_spec=depths,
        pg_collection=context.pgs,
    )


@functools.cache
def sequences(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions ``[count, LENGTH]`` of random sequences."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(count, -1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions.contiguous()
