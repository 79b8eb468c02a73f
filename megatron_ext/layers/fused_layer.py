"""The forward pass of a transformer layer with compiled kernels, for `transformer_layer`.

One kernel adds the output of attention or MLP to the residual stream and normalizes the sum, and
one is its backward pass. Norm and rotary embedding of queries and keys are one kernel, too. The
activation of an MLP is compiled together with the bias before it and, in experts, the factor of
each token.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

from megatron_ext.layers import pointwise
from megatron_ext.layers.norms import LayerNorm, RMSNorm, spec_of, weights_of


def projected(
    attention: Any, hidden: Tensor, rotary: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries ``[s, b, n, d]``, and keys and values ``[s, b, g, d]`` of g groups.

    ``attention`` is a `transformer_layer.SelfAttention`. ``rotary`` has the angles ``[s, 1, k,
    d]``; None rotates nothing.
    """
    linear = attention.linear_qkv
    interleaved = attention.config.rotary_interleaved
    # Without its bias, which `queries_keys_values` adds.
    before = linear.skip_bias_add
    linear.skip_bias_add = True
    try:
        wide, bias = linear(hidden)
    finally:
        linear.skip_bias_add = before
    table: tuple[Tensor | None, Tensor | None] = None, None
    if rotary is not None:
        own = attention.rotary
        table = pointwise.table_of(
            rotary, wide.dtype, interleaved=interleaved, index=own.index, magnitude=own.magnitude
        )
    norms: tuple[Any, ...] = (None,) * 5
    if isinstance(attention.q_layernorm, (LayerNorm, RMSNorm)):
        q_norm = weights_of(attention.q_layernorm)
        k_norm = weights_of(attention.k_layernorm)
        norms = *q_norm, *k_norm, spec_of(attention.q_layernorm)
    groups = attention.num_query_groups_per_partition
    head_dim = attention.hidden_size_per_attention_head
    return pointwise.queries_keys_values(wide, bias, groups, head_dim, *table, interleaved, *norms)


def mlp_forward(
    mlp: Any, hidden_states: Tensor, per_token_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the output of an MLP with a compiled activation, and a bias that is yet to be added.

    ``mlp`` is a `transformer_layer.MLP`, whose ``forward`` describes the other arguments.
    """
    wide, bias = mlp.linear_fc1(hidden_states)
    scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
    name = pointwise.NAMES[mlp.config.activation_func]
    gated = mlp.config.gated_linear_unit
    limits = pointwise.limits_of(mlp.config)
    plain = bias is None and scale is None and limits == pointwise.NO_LIMITS
    joining: Any = nullcontext(False)
    if plain and getattr(mlp.linear_fc2, "fp8", None) is not None:
        from megatron_ext.layers.fp8.activation import joined

        joining = joined(mlp.linear_fc1, mlp.linear_fc2, wide, name, gated)
    with joining as joins:
        narrow = wide if joins else pointwise.activated(wide, bias, scale, name, gated, *limits)
        output, output_bias = mlp.linear_fc2(narrow)
    if scale is not None and output_bias is not None:
        return output + output_bias * scale, None
    return output, output_bias


def forward(
    layer: Any, hidden_states: Tensor, kwargs: dict[str, Any], *, joins_norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output ``[s, b, h]`` and context of a `transformer_layer.TransformerLayer`.

    ``kwargs`` are megatron-core's further arguments. With ``joins_norm`` the layer adds the output
    of attention to the residual stream in the usual way, so that one kernel may add and normalize.
    """
    residual = hidden_states
    norm = layer.input_layernorm
    if norm.compiled:
        residual, normed = pointwise.norm_with_residual(residual, *weights_of(norm), spec_of(norm))
    else:
        normed = norm(residual)
    attended = layer.self_attention(
        normed, kwargs.get("attention_mask"), rotary_pos_emb=kwargs.get("rotary_pos_emb")
    )
    norm = layer.pre_mlp_layernorm
    training = bool(layer.training)
    if joins_norm and norm.compiled:
        hidden, normed = pointwise.bias_dropout_add_norm(
            *attended, residual, layer.hidden_dropout, training, *weights_of(norm), spec_of(norm)
        )
    else:
        hidden = layer.self_attn_bda(training, True)(attended, residual, layer.hidden_dropout)
        normed = norm(hidden)
    mlp = functools.partial(layer.mlp, padding_mask=kwargs.get("padding_mask"))
    output = tensor_parallel.checkpoint(mlp, False, normed) if layer.recompute_mlp else mlp(normed)
    return layer._forward_post_mlp(output, hidden), kwargs.get("context")
