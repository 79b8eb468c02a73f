"""From a run's configuration to megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_ext.models.moe import AuxiliaryScale, ScaledTransformerConfig

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ACTIVATIONS = {
    "gelu": F.gelu,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}


def params_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of the parameters that the forward pass uses."""
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Translate a run's configuration for megatron-core.

    Point-to-point messages follow two rules that keep megatron-core's interleaved schedule
    exact: virtual chunks never use batched messages (with two stages both neighbours are the same
    peer, and batched messages swap), and overlapped messages never go with the deallocation of
    stage outputs (a buffer would be freed while it is being sent).
    """
    fields: dict[str, Any] = dict(config.transformer_fields())
    dtype = params_dtype(config)
    fields["params_dtype"] = dtype
    fields["pipeline_dtype"] = dtype
    fields["activation_func"] = ACTIVATIONS[str(fields.get("activation_func", "gelu"))]
    fields["attention_backend"] = AttnBackend[str(fields["attention_backend"])]
    interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
    fields["overlap_p2p_comm"] = interleaved
    fields["batch_p2p_comm"] = not interleaved
    fields["deallocate_pipeline_outputs"] = not interleaved
    if config.model.init_method_xavier_uniform:
        fields["init_method"] = torch.nn.init.xavier_uniform_
        fields["output_layer_init_method"] = torch.nn.init.xavier_uniform_
    scaled = config.moe.num_experts is not None and config.training.calculate_per_token_loss
    fields["auxiliary_scale"] = AuxiliaryScale() if scaled else None
    return ScaledTransformerConfig(**fields)
