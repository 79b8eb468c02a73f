"""Self-attention that some families compute otherwise: where it normalizes, and a gate after it.

With ``--attention-output-gate`` (Qwen3-Next; "Gated Attention for Large Language Models",
arXiv:2505.06708) the projection of queries also computes a gate for each channel of each head. The
output of the heads is multiplied by the sigmoid of their gates before the output projection.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_ext.layers.compiled import compiled, fusions_of
from megatron_ext.layers.heads_norm import HeadsNorm, exact
from megatron_ext.layers.norms import Norm
from megatron_ext.layers.transformer_layer import SelfAttention, WithBias


def norm_in_core(transformer_config: TransformerConfig, usual: Any) -> Any:
    """Return the class of the norms of queries and keys in megatron-core's places.

    This is ``usual``, or IdentityOp if `VariantSelfAttention` normalizes in places of its own.
    """
    names = ("qk_layernorm_all_heads", "qk_layernorm_after_rope")
    moved = any(getattr(transformer_config, name, False) for name in names)
    return IdentityOp if moved else usual


def times_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Return the output ``[s, b, n * d]`` of n heads times the sigmoid of ``gate``.

    ``gate`` is ``[s, b, n, d]``. The sigmoid is computed in at least float32.
    """
    factors = torch.sigmoid(gate.to(exact(gate))).flatten(2)
    return (attended * factors).to(attended.dtype)


compiled_times_gate = compiled(times_gate)


class VariantSelfAttention(SelfAttention):
    """Self-attention with norms of queries and keys in other places, or with gates of its heads.

    Its spec has no norm of queries and keys in megatron-core's places if these are over all heads
    or after rotation.

    Attributes:
        scale_table: index, in ``[s, 1, k, d]`` of the rotary embedding, of the factors of queries
            that grow with their position; None for none.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        scales = getattr(config, "llama_4_scaling_beta", None) is not None
        self.scale_table = -1 if scales else None
        self.q_norm: HeadsNorm | None = None
        self.k_norm: HeadsNorm | None = None
        self.rotated_q_layernorm: Any = None
        self.rotated_k_layernorm: Any = None
        if not config.qk_layernorm:
            return
        if getattr(config, "qk_layernorm_all_heads", False):
            tp_group = self.pg_collection.tp
            self.q_norm = HeadsNorm(config, config.num_attention_heads, tp_group)
            groups = config.num_query_groups or config.num_attention_heads
            self.k_norm = HeadsNorm(config, groups, tp_group)
        elif getattr(config, "qk_layernorm_after_rope", False):
            # megatron-core sums the gradients of weights with `q_layernorm` in their names over
            # the tensor-parallel ranks, each of which normalizes its own heads.
            size = self.hidden_size_per_attention_head
            eps = config.layernorm_epsilon
            self.rotated_q_layernorm = Norm(config, size, eps)
            self.rotated_k_layernorm = Norm(config, size, eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> WithBias:
        """Return what the base class does, with the gates of ``--attention-output-gate`` applied.

        megatron-core's own method, which calls with other arguments reach, applies them itself.
        """
        rotary = kwargs.get("rotary_pos_emb")
        has_others = any(x is not None for name, x in kwargs.items() if name != "rotary_pos_emb")
        if not self.config.attention_output_gate or has_others or isinstance(rotary, tuple):
            return super().forward(hidden_states, attention_mask, **kwargs)
        query, key, value, gate = self.get_query_key_value_tensors(
            hidden_states, None, output_gate=True
        )
        rotary = None if self.rotary.index is None else rotary
        if rotary is not None:
            query, key = self._turned(query, key, rotary)
        query, key = self._changed(query, key, rotary)
        checkpoints = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if checkpoints else self.core_attention
        attended = attend(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
        multiply = compiled_times_gate if fusions_of(self.config).rotary else times_gate
        output: WithBias = self.linear_proj(multiply(attended, gate))
        return output

    def _fuses(self, x: Tensor) -> bool:
        """Return False: `fused_layer.projected` knows only megatron-core's norms."""
        return False

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return what megatron-core's method does, with a norm over all heads applied."""
        projected = super().get_query_key_value_tensors(*args, **kwargs)
        if self.q_norm is None or self.k_norm is None:
            return projected
        query, key, *rest = projected
        return (self.q_norm(query), self.k_norm(key), *rest)

    def _projected_by_core(
        self, hidden: Tensor, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the base class does, with norms after the rotation and factors applied."""
        query, key, value = super()._projected_by_core(hidden, rotary)
        return *self._changed(query, key, rotary), value

    def _changed(self, query: Tensor, key: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply norms after the rotation, and factors of positions, to queries and keys.

        They are ``[s, b, n, d]`` and ``[s, b, g, d]``. ``rotary`` is ``[s, 1, k, d]``, or None if
        nothing was rotated, and then there are no factors.
        """
        if self.rotated_q_layernorm is not None:
            query = self.rotated_q_layernorm(query)
            key = self.rotated_k_layernorm(key)
        if self.scale_table is not None and rotary is not None:
            query = query * rotary[:, :, self.scale_table, :1].unsqueeze(2).to(query.dtype)
        return query, key
