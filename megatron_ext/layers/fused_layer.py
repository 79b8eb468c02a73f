"""The pointwise parts of a transformer layer, fused across its submodules.

megatron-core's layer adds a branch to the residual stream in one kernel and norms the sum in
another, and autograd adds the gradients of norm and residual connection in a third. Here the sum
and its norm are one, and so are the gradients.

megatron-core's self-attention, with norm and rotary embedding of queries and keys in one kernel.

Without Transformer Engine megatron-core rotates by ten kernels for queries and keys each, and makes
their cosines anew in every layer.

megatron-core's MLPs, whose activation is one kernel where it compiles.

megatron-core compiles SwiGLU and GELU with a bias, behind options that it refuses for other
activations and without biases. Here every activation is compiled, with its bias and the scale of an
expert's tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as core_bias_dropout_add
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
    added,
    bias_dropout_add,
    bias_dropout_add_norm,
    fusions_of,
    norm_with_residual,
    queries_keys_values,
    rotary_table,
    spec_of,
    weights_of,
)

WithBias = tuple[Tensor, Tensor | None]


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """megatron-core's function of the same name, with `bias_dropout_add` where it compiles.

    A residual stream in float32 stays so, where core rounds it to the 16 bits of ``x``.

    Args:
        training: drop elements.
        fused: ``--no-bias-dropout-fusion`` does without.
    """
    unfused: Callable[..., Tensor] = core_bias_dropout_add(training, fused=False)

    def function(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        if residual.dtype != x.dtype and not (fused and compiles(x)):
            return added(x, bias, residual, probability, training)
        if not (fused and compiles(x)):
            return unfused(x_with_bias, residual, probability)
        return bias_dropout_add(x, bias, residual, probability, training)

    return function


class FusedForward:
    """Mixin over megatron-core's TransformerLayer; see the module."""

    config: Any
    training: bool
    hidden_dropout: float
    input_layernorm: Any
    self_attention: Any
    self_attn_bda: Any
    pre_mlp_layernorm: Any
    mlp: Any
    recompute_input_layernorm: bool
    recompute_pre_mlp_layernorm: bool
    recompute_mlp: bool
    offload_attn_norm: bool
    offload_mlp_norm: bool
    _forward_post_mlp: Any

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """megatron-core's forward pass, or the same of fused parts.

        Args:
            hidden_states: ``[s, b, h]``.
            args: as megatron-core's.
            kwargs: as megatron-core's.
        """
        if args or not self._fuses(hidden_states, kwargs):
            given: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
                hidden_states, *args, **kwargs
            )
            return given
        residual, normed = self._norm_with_residual(self.input_layernorm, hidden_states)
        attended = self.self_attention(
            normed,
            kwargs.get("attention_mask"),
            rotary_pos_emb=kwargs.get("rotary_pos_emb"),
        )
        hidden, normed = self._added(attended, residual, self.pre_mlp_layernorm)
        mlp = functools.partial(self.mlp, padding_mask=kwargs.get("padding_mask"))
        if self.recompute_mlp:
            output = tensor_parallel.checkpoint(mlp, False, normed)
        else:
            output = mlp(normed)
        return self._forward_post_mlp(output, hidden), kwargs.get("context")

    def _fuses(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether nothing is asked for that only megatron-core's forward pass does."""
        known = ("attention_mask", "rotary_pos_emb", "padding_mask", "context_mask")
        asked = any(value is not None for name, value in kwargs.items() if name not in known)
        return (
            fusions_of(self.config).bias_dropout
            and not asked
            and isinstance(self.input_layernorm, (LayerNorm, RMSNorm))
            and not (self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm)
            and not (self.offload_attn_norm or self.offload_mlp_norm)
            and compiles(x)
        )

    def _norm_with_residual(self, norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` and its norm."""
        if not norm.compiled:
            return x, norm(x)
        residual, normed = norm_with_residual(x, *weights_of(norm), spec_of(norm))
        return residual, normed

    def _added(self, output: WithBias, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The residual stream after a branch, and its norm."""
        training = bool(self.training)
        bda = self.self_attn_bda
        if bda is not get_bias_dropout_add or not norm.compiled:
            hidden = bda(training, True)(output, residual, self.hidden_dropout)
            return hidden, norm(hidden)
        x, bias = output
        weights = weights_of(norm)
        return bias_dropout_add_norm(
            x, bias, residual, self.hidden_dropout, training, *weights, spec_of(norm)
        )


Table = tuple[Tensor, Tensor]

_tables: Any = WeakIdKeyDictionary()
"""Cosines and sines by the tensor of angles, which all layers are given, and all steps."""


def table_of(angles: Tensor, dtype: torch.dtype, *, interleaved: bool) -> Table:
    """Cosines and sines of rotary angles, made once for each tensor of angles.

    Args:
        angles: ``[s, 1, 1, d]``, see `rotary_table`.
        dtype: of queries and keys.
        interleaved: neighbouring features make a pair.
    """
    tables: dict[torch.dtype, Table] = _tables.setdefault(angles, {})
    if dtype not in tables:
        with torch.no_grad():
            tables[dtype] = rotary_table(angles, dtype, interleaved)
    return tables[dtype]


def without_bias(linear: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output of one of megatron-core's linear layers without its bias, and the bias."""
    before, linear.skip_bias_add = linear.skip_bias_add, True
    try:
        output: tuple[Tensor, Tensor | None] = linear(x)
    finally:
        linear.skip_bias_add = before
    return output


class SelfAttention(CoreSelfAttention):  # type: ignore[misc]
    """See the module."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` to the same, and the bias that is to be added.

        Args:
            hidden_states: ``[s, b, h]``.
            attention_mask: True where forbidden, ``[b, 1, s, s]``; None means causal.
            kwargs: as megatron-core's.
        """
        rotary = kwargs.pop("rotary_pos_emb", None)
        asked = any(value is not None for value in kwargs.values())
        if asked or isinstance(rotary, tuple) or not self._fuses(hidden_states):
            given: tuple[Tensor, Tensor | None] = super().forward(
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
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _fuses(self, x: Tensor) -> bool:
        """Whether queries and keys are made by `queries_keys_values`.

        Not where fewer groups than tensor-parallel ranks make megatron-core gather them.
        """
        config = self.config
        return (
            fusions_of(config).rotary
            and compiles(x)
            and config.num_query_groups >= self.world_size
            and not (config.attention_output_gate or config.test_mode)
        )

    def _projected(self, hidden: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[s, b, n, d]``, keys and values ``[s, b, g, d]``."""
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
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` to the same, and the bias that is to be added.

        Args:
            hidden_states: ``[s, b, h]``, or an expert's tokens ``[tokens, h]``.
            per_token_scale: ``[tokens]``, what the router gives the tokens of an expert.
            kwargs: as megatron-core's.
        """
        if fusions_of(self.config).activation and compiles(hidden_states):
            output, bias = self._fused(hidden_states, per_token_scale)
        else:
            output, bias = super().forward(hidden_states, per_token_scale, **kwargs)
        if self.adds_bias and bias is not None:
            return output + bias, None
        return output, bias

    def _fused(
        self, hidden_states: Tensor, per_token_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` with a compiled activation."""
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
    """Make megatron-core's MLPs within a module ours, which hold nothing more.

    megatron-core names their class itself, for experts, or gives its process groups to no other.
    """
    for part in module.modules():
        if type(part) in OWN:
            part.__class__ = OWN[type(part)]
