"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3).

Keys and values of all n heads are linear functions of one small vector per token; queries are
linear functions of another one. With the hidden state h, the norms N and the projections W of that
paper::

    c_q  = N(W_dq h)                       [q_lora_rank]; h itself without --q-lora-rank
    c_kv, k_r = W_dkv h                    [kv_lora_rank], [qk_pos_emb_head_dim]
    q, q_r = W_uq c_q                      n heads of [qk_head_dim] and [qk_pos_emb_head_dim]
    k, v = W_ukv N(c_kv)                   n heads of [qk_head_dim] and [v_head_dim]
    query, key = (q, rotated q_r), (k, rotated k_r)

Without positions (``--position-embedding-type none``, as in Kimi Linear) nothing is rotated. All
heads share k_r. Tensor parallelism splits the heads. The projections to c_q and to
c_kv are whole on every rank, which applies them to its own part of the sequence under sequence
parallelism. Parameters have megatron-core's names, and core attention gets queries, keys and values
of all heads as in any other attention.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.rules.model import RECOMPUTED_LATENT
from megatron_ext.layers.compiled import compiled, fusions_of
from megatron_ext.layers.linear import enter, unbiased
from megatron_ext.layers.pointwise import rotated, table_of
from megatron_ext.layers.transformer_layer import WithBias

if TYPE_CHECKING:
    from megatron_ext.layers.kv_cache import KeyValueCache
    from megatron_ext.layers.latent_cache import LatentCache


NORM_NAMES = {
    f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
    for x in ("q", "kv")
}
"""Prefixes of the norms' parameters in a layer, and their prefixes in sharded checkpoints."""


def split_latent_heads(
    query: Tensor,
    projected: Tensor,
    shared: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projections of multi-latent attention into n heads, and apply rotary embedding.

    A head's query and key have dk channels, of which the last dr are rotated; its value has dv.

    Args:
        query: ``[s, b, n * dk]``.
        projected: ``[s, b, n * (dk - dr + dv)]``: for each head, the first channels of its key, and
            its value.
        shared: ``[s, b, dr]``, the last channels of all heads' keys, not yet rotated.
        cos, sin: ``[s, 1, 1, d / 2]`` from `pointwise.rotary_table`; if d < dr, the rest of the dr
            channels is not rotated. None rotates nothing.
        heads, value_dim: n and dv.

    Returns:
        queries ``[s, b, n, dk]``, keys ``[s, b, n, dk]`` and values ``[s, b, n, dv]``, copied.
    """
    query = torch.unflatten(query, -1, (heads, -1))
    per_head = torch.unflatten(projected, -1, (heads, -1))
    key = per_head[..., :-value_dim]
    value = per_head[..., -value_dim:]
    width = key.size(-1)
    turned = shared.unsqueeze(2)
    if cos is not None and sin is not None:
        rest = rotated(query[..., width:], cos, sin, True)
        query = torch.cat((query[..., :width], rest), -1)
        turned = rotated(turned, cos, sin, True)
    key = torch.cat((key, turned.expand(-1, -1, heads, -1)), -1)
    return query, key, value.contiguous()


latent_heads = compiled(split_latent_heads)


class LatentAttention(Attention):  # type: ignore[misc]
    """Multi-latent self-attention (arXiv:2405.04434).

    Its config must be a `StepTransformerConfig` that also has the fields of megatron-core's
    MLATransformerConfig, with ``kv_channels`` equal to ``v_head_dim`` and ``softmax_scale`` set.

    Attributes:
        rotary_pos_emb: gives the angles by which a part of each head is rotated; None for none.
        recomputes_heads: whether to free queries, keys and values after attention, and recompute
            them in the backward pass (``--recompute-modules mla_up_proj``).
        cache: the small vectors of earlier tokens, in generation; else None.
    """

    cache: LatentCache | None = None

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self",
            pg_collection=groups, **kwargs,
        )  # fmt: skip
        modules = config.recompute_modules or ()
        selective = config.recompute_granularity == "selective"
        self.recomputes_heads = selective and RECOMPUTED_LATENT in modules
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if getattr(config, "rotates_latent_heads", True):
            self.rotary_pos_emb = rotary_embedding(config, groups.cp)
        heads = config.num_attention_heads
        rotated = config.qk_pos_emb_head_dim
        self.key_hidden_size = config.qk_head_dim + rotated
        hidden = config.hidden_size
        query_outputs = heads * self.key_hidden_size
        kv_outputs = heads * (config.qk_head_dim + config.v_head_dim)
        if config.q_lora_rank is None:
            self.linear_q_proj = self._linear(submodules.linear_q_proj, hidden, query_outputs)
        else:
            rank = config.q_lora_rank
            self.linear_q_down_proj = self._linear(submodules.linear_q_down_proj, hidden, rank)
            self.linear_q_up_proj = self._linear(submodules.linear_q_up_proj, rank, query_outputs)
        rank = config.kv_lora_rank
        self.linear_kv_down_proj = self._linear(
            submodules.linear_kv_down_proj, hidden, rank + rotated
        )
        self.linear_kv_up_proj = self._linear(submodules.linear_kv_up_proj, rank, kv_outputs)
        if config.q_lora_rank is not None:
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
            if not config.sequence_parallel and self.world_size > 1:
                # megatron-core sums gradients of weights with this name over tensor-parallel ranks,
                # because each rank's norm sees only its own heads. But here each rank has the whole
                # gradient of this norm.
                for parameter in self.q_layernorm.parameters():
                    parameter.register_hook(functools.partial(_shared_out, count=self.world_size))
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)

    def _linear(self, kind: Any, inputs: int, outputs: int) -> Any:
        return unbiased(kind, inputs, outputs, self.config, self.tp_group)

    def _norm(self, kind: Any, size: int) -> Any:
        own = getattr(self.config, "latent_norm_epsilon", None)
        eps = self.config.layernorm_epsilon if own is None else own
        return kind(config=self.config, hidden_size=size, eps=eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        **_unused: Any,
    ) -> WithBias:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add.

        Under sequence parallelism input and output are ``[s/tp, b, h]``.

        Args:
            attention_mask: documents or a dense mask, see `layers.masks`; None means causal.
        """
        small = self.small_vectors(hidden_states)
        if self.cache is not None:
            in_generation: WithBias = self.linear_proj(self.cache.attend(*small))
            return in_generation
        again = None
        if self.recomputes_heads and self.training and torch.is_grad_enabled():
            again = CheckpointWithoutOutput()
            again.fp8 = False  # whatever it is given, it would use Transformer Engine
            query, key, value = again.checkpoint(self.heads, *small)
        else:
            query, key, value = self.heads(*small)
        checkpoints = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if checkpoints else self.core_attention
        attended = attend(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
        if again is not None:
            again.discard_output_and_register_recompute(attended)
        output: WithBias = self.linear_proj(attended)
        return output

    def new_cache(self, cache: KeyValueCache) -> LatentCache:
        """Return an empty cache of this layer; ``cache`` is the state that all layers share."""
        from megatron_ext.layers.latent_cache import LatentCache

        return LatentCache(cache, self, self.core_attention.window_size)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys ``[s, b, n, dk]`` and values ``[s, b, n, dv]`` of n heads.

        dk is ``qk_head_dim + qk_pos_emb_head_dim``, and dv is ``v_head_dim``.
        """
        return self.heads(*self.small_vectors(hidden_states))

    def small_vectors(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors from which heads are computed: c_q, N(c_kv) and k_r.

        See the equations of this module. Under sequence parallelism, the first two cover this
        rank's part of the sequence, ``[s/tp, b, ...]``. The third, k_r before rotation, covers the
        sequence of all tensor-parallel ranks.
        """
        config = self.config
        query_input = hidden
        if config.q_lora_rank is not None:
            compressed, _ = self.linear_q_down_proj(hidden)
            query_input = self.q_layernorm(compressed)
        mixed, _ = self.linear_kv_down_proj(hidden)
        latent, shared = mixed.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1)
        # Each rank's heads contribute to the shared key's gradient.
        shared = enter(shared, self.tp_group, config.sequence_parallel)
        return query_input, self.kv_layernorm(latent), shared

    def heads(
        self, query_input: Tensor, latent: Tensor, shared: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads: queries and keys ``[s, b, n, dk]``, values ``[s, b, n, dv]``.

        The arguments are the results of `small_vectors`.
        """
        config = self.config
        query = self._projected_query(query_input)
        keys_and_values, _ = self.linear_kv_up_proj(latent)
        length = shared.size(0) * self.pg_collection.cp.size()
        fuses = fusions_of(config).rotary
        function = latent_heads if fuses else split_latent_heads
        query, key, value = function(
            query,
            keys_and_values,
            shared,
            *self._table(length, query.dtype),
            self.num_attention_heads_per_partition,
            config.v_head_dim,
        )
        return self._grown(query, length), key, value

    def _projected_query(self, query_input: Tensor) -> Tensor:
        """Return this rank's queries ``[s, b, n * dk]``, not yet rotated."""
        direct = self.config.q_lora_rank is None
        projection = self.linear_q_proj if direct else self.linear_q_up_proj
        query: Tensor = projection(query_input)[0]
        return query

    def queries(self, query_input: Tensor, length: int) -> Tensor:
        """Return the queries ``[s, b, n, dk]`` that `heads` returns, for s = ``length`` tokens."""
        query = self._projected_query(query_input)
        query = torch.unflatten(query, -1, (self.num_attention_heads_per_partition, -1))
        cos, sin = self._table(length, query.dtype)
        if cos is None or sin is None:
            return query
        width = self.config.qk_head_dim
        turned = rotated(query[..., width:], cos, sin, True)
        return self._grown(torch.cat((query[..., :width], turned), dim=-1), length)

    def _grown(self, query: Tensor, length: int) -> Tensor:
        """Return the queries ``[s, b, n, dk]`` times the factors of their positions, if any.

        ``length`` is the number of tokens of all context-parallel ranks.
        """
        growth = getattr(self.config, "llama_4_scaling_beta", None)
        if growth is None or self.rotary_pos_emb is None:
            return query
        tables, _ = self.rotary_pos_emb(length)
        factors: Tensor = tables[:, :, 1:, :1]
        return query * factors.to(query.dtype)

    def rotated_shared(self, shared: Tensor, length: int) -> Tensor:
        """Return the rotated k_r ``[s, b, dr]``, which all heads share.

        ``length`` is the number of tokens of all context-parallel ranks.
        """
        cos, sin = self._table(length, shared.dtype)
        if cos is None or sin is None:
            return shared
        return rotated(shared.unsqueeze(2), cos, sin, True).squeeze(2)

    def _table(self, length: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return cosines and sines ``[s, 1, 1, d/2]`` for this context-parallel rank's tokens.

        ``length`` is the number of tokens of all these ranks. The results are None if nothing is
        rotated.
        """
        if self.rotary_pos_emb is None:
            return None, None
        rotary = self.rotary_pos_emb(length)
        tables, factor = rotary if isinstance(rotary, tuple) else (rotary, 1.0)
        angles = tables[:, :, :1]
        if factor == 1.0:
            return table_of(angles, dtype, interleaved=False)
        cos, sin = table_of(angles, torch.float32, interleaved=False)
        return (cos * factor).to(dtype), (sin * factor).to(dtype)


class GrowingYarn(YarnRotaryEmbedding):  # type: ignore[misc]
    """megatron-core's YaRN, whose angles are followed by factors that grow with the position.

    The factor of position p is ``1 + growth * ln(1 + floor(p / l))``, where l is the length for
    which the model was trained before (Llama 4, and Mistral 4).
    """

    def __init__(self, channels: int, growth: float, **settings: Any) -> None:
        # The base class computes angles while it is built.
        self.growth = growth
        super().__init__(channels, **settings)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, float]:
        """Return angles and factors ``[s, 1, 2, d]``, and the factor of cosines and sines."""
        angles, magnitude = super().get_emb(max_seq_len, offset)
        positions = torch.arange(offset, offset + max_seq_len, device=angles.device)
        turns = torch.floor(positions / self.original_max_position_embeddings)
        factors = 1 + self.growth * torch.log(1 + turns)
        return torch.cat((angles, factors.view(-1, 1, 1, 1).expand_as(angles)), dim=2), magnitude


def rotary_embedding(config: MLATransformerConfig, cp_group: ProcessGroup) -> RotaryEmbedding:
    """Return the rotary embedding of a config; called with s, it returns angles ``[s, 1, 1, d]``.

    All layers share one module and its cached angles. With YaRN (arXiv:2309.00071) the module
    returns a tuple: the angles, and a number by which to multiply cosines and sines. The angles are
    followed by the factors of queries, ``[s, 1, 2, d]``, if these grow with their position.
    """
    settings: dict[str, Any] = {"rotary_base": config.rotary_base}
    if config.rope_type == "yarn":
        settings |= {
            "scaling_factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
        growth = getattr(config, "llama_4_scaling_beta", None)
        if growth is not None:
            settings["growth"] = growth
    else:
        settings["rotary_percent"] = config.rotary_percent
    return _rotary(config.qk_pos_emb_head_dim, cp_group, **settings)


def _shared_out(gradient: Tensor, count: int) -> Tensor:
    """Return ``gradient / count``, for a gradient that ``count`` ranks hold and will sum."""
    return gradient / count


@functools.lru_cache(maxsize=8)
def _rotary(channels: int, cp_group: ProcessGroup, **settings: Any) -> RotaryEmbedding:
    kind: Any = YarnRotaryEmbedding if "scaling_factor" in settings else RotaryEmbedding
    if "growth" in settings:
        kind = GrowingYarn
    # megatron-core moves the frequencies to the device only when they are first needed.
    made: RotaryEmbedding = kind(
        channels, cp_group=cp_group, use_cpu_initialization=True, **settings
    )
    return made
