"""megatron-core's self-attention and MLPs, with compiled pointwise parts.

Without Transformer Engine megatron-core rotates by ten kernels for queries and keys each, and makes
their cosines anew in every layer; here norm and rotary embedding of queries and keys are one
kernel, and the cosines are made once. megatron-core compiles SwiGLU and GELU with a bias, behind
options that it refuses for other activations and without biases; here every activation is compiled,
with its bias and the scale of an expert's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import mlp as core
from megatron.core.transformer.attention import SelfAttention as CoreSelfAttention
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP as CoreSharedExpertMLP
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.pointwise import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    activated,
    fusions_of,
    queries_keys_values,
    rotary_table,
    spec_of,
    weights_of,
)

WithBias = tuple[Tensor, Tensor | None]

Table = tuple[Tensor, Tensor]

_tables: Any = WeakIdKeyDictionary()
"""Cosines and sines by the tensor of angles, which all layers and all steps are given."""


def table_of(angles: Tensor, dtype: torch.dtype, *, interleaved: bool) -> Table:
    """Return cosines and sines of rotary angles, made once for each tensor of angles.

    Args:
        angles: ``[s, 1, 1, d]``, see `rotary_table`.
        interleaved: neighbouring features make a pair.
    """
    tables: dict[torch.dtype, Table] = _tables.setdefault(angles, {})
    if dtype not in tables:
        with torch.no_grad():
            tables[dtype] = rotary_table(angles, dtype, interleaved)
    return tables[dtype]


def without_bias(linear: Any, x: Tensor) -> WithBias:
    """Return the output of one of megatron-core's linear layers without its bias, and the bias."""
    before, linear.skip_bias_add = linear.skip_bias_add, True
    try:
        output: WithBias = linear(x)
    finally:
        linear.skip_bias_add = before
    return output


class SelfAttention(CoreSelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention; see the module."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> WithBias:
        """Return the output ``[s, b, h]`` and the bias that is to be added.

        Args:
            attention_mask: True where forbidden, ``[b, 1, s, s]``; None means causal.
        """
        rotary = kwargs.pop("rotary_pos_emb", None)
        asked = any(value is not None for value in kwargs.values())
        if asked or isinstance(rotary, tuple) or not self._fuses(hidden_states):
            given: WithBias = super().forward(
                hidden_states, attention_mask, rotary_pos_emb=rotary, **kwargs
            )
            return given
        query, key, value = self._projected(hidden_states, rotary)
        if self.checkpoint_core_attention and self.training:
            attended = self._checkpointed_attention_forward(
                query, key, value, attention_mask, attn_mask_type=self.attn_mask_type
            )
        else:
            attended = self.core_attention(
                query, key, value, attention_mask, attn_mask_type=self.attn_mask_type
            )
        output: WithBias = self.linear_proj(attended)
        return output

    def _fuses(self, x: Tensor) -> bool:
        """Return whether queries and keys are made by `queries_keys_values`.

        They are not where there are fewer groups than tensor-parallel ranks, since megatron-core
        gathers them then.
        """
        config = self.config
        return (
            fusions_of(config).rotary
            and compiles(x)
            and config.num_query_groups >= self.world_size
            and not (config.attention_output_gate or config.test_mode)
        )

    def _projected(self, hidden: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[s, b, n, d]``, keys and values ``[s, b, g, d]``."""
        projected, bias = without_bias(self.linear_qkv, hidden)
        interleaved = self.config.rotary_interleaved
        cos, sin = None, None
        if rotary is not None:
            cos, sin = table_of(rotary, projected.dtype, interleaved=interleaved)
        q, k = self.q_layernorm, self.k_layernorm
        normed = isinstance(q, (LayerNorm, RMSNorm))
        nothing = None, None
        of_query, of_key = (weights_of(q), weights_of(k)) if normed else (nothing, nothing)
        return queries_keys_values(
            projected,
            bias,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
            cos,
            sin,
            interleaved,
            *of_query,
            *of_key,
            spec_of(q) if normed else None,
        )


NAMES = {function: name for name, function in ACTIVATIONS.items()}


class MLP(core.MLP):  # type: ignore[misc]
    """Two matrices and an activation; see the module.

    Attributes:
        adds_bias: the second bias is added here instead of being left to the caller. Recomputation
            needs that: a parameter that it returned would become its result, and the backward pass
            of the parameter would recompute for ever.
    """

    adds_bias: bool = False

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> WithBias:
        """Return the output, shaped like the input, and the bias that is to be added.

        Args:
            hidden_states: ``[s, b, h]``, or an expert's tokens ``[tokens, h]``.
            per_token_scale: ``[tokens]``, what the router gives the tokens of an expert.
        """
        if fusions_of(self.config).activation and compiles(hidden_states):
            output, bias = self._fused(hidden_states, per_token_scale)
        else:
            output, bias = super().forward(hidden_states, per_token_scale, **kwargs)
        if self.adds_bias and bias is not None:
            return output + bias, None
        return output, bias

    def _fused(self, hidden_states: Tensor, per_token_scale: Tensor | None) -> WithBias:
        """Do what `forward` does, with a compiled activation."""
        wide, bias = self.linear_fc1(hidden_states)
        scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
        name = NAMES[self.config.activation_func]
        narrow = activated(wide, bias, scale, name, self.config.gated_linear_unit)
        output, output_bias = self.linear_fc2(narrow)
        if scale is not None and output_bias is not None:
            return output + output_bias * scale, None
        return output, output_bias


class SharedExpertMLP(CoreSharedExpertMLP, MLP):  # type: ignore[misc]
    """The expert of all tokens; overlapped with the dispatcher it stays megatron-core's."""


OWN = {core.MLP: MLP, CoreSharedExpertMLP: SharedExpertMLP}


def use_own_mlps(module: torch.nn.Module) -> None:
    """Turn megatron-core's MLPs within a module into ours, which hold nothing more.

    megatron-core names their class itself for experts, and gives its process groups to no other
    class.
    """
    for part in module.modules():
        if type(part) in OWN:
            part.__class__ = OWN[type(part)]
