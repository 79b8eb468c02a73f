"""D34: the layers of megatron-core that need no Transformer Engine refuse two kinds of layout."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention as CoreAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.pointwise import Norm
from megatron_ext.parallel.context import ParallelContext
from tests.layers.test_layers import check_block
from tests.ranks import ranks


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **changes)


@ranks(cp=2)
def test_d34_attention_under_context_parallelism(context: ParallelContext) -> None:
    transformer_config = config(context_parallel_size=2)
    words = (1, AttnMaskType.causal, "self")
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        CoreAttention(transformer_config, *words, pg_collection=context.pgs)
    DotProductAttention(transformer_config, *words, pg_collection=context.pgs)
    check_block(context)


@ranks(tp=2)
def test_d34_norms_under_sequence_parallelism(context: ParallelContext) -> None:
    transformer_config = config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        WrappedTorchNorm(transformer_config, 16)
    marks = [
        getattr(parameter, "sequence_parallel", False)
        for parameter in Norm(transformer_config, 16).parameters()
    ]
    assert marks == [True, True]
    check_block(context, sequence_parallel=True)
