"""The sizes of multi-latent attention (`layers.latent_attention`), for the cost of a GPT.

Queries are computed from one short latent vector per token, keys and values from another.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.products import Linear
from megatron_ext.text.config.attention import LatentAttentionConfig


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer with multi-latent attention; channels are counted per token.

    Attributes:
        h: channels of the hidden state.
        n: number of heads.
        query_rank: channels of the latent vector from which queries are computed; 0 if they are
            computed from the hidden state.
        rank: channels of the latent vector from which keys and values are computed.
        rotated: channels of the rotated part of a key, which all heads share.
        key: channels of one head's key; a head's query has as many.
        value: channels of one head's value.
        norms: whether the two latent vectors are normalized.
    """

    h: int
    n: int
    query_rank: int
    rank: int
    rotated: int
    key: int
    value: int
    norms: bool

    @classmethod
    def of(cls, config: RunConfig) -> LatentSizes | None:
        """Return the sizes in a resolved configuration; None without multi-latent attention."""
        latent = config.section(LatentAttentionConfig)
        model = config.model
        if not latent.multi_latent_attention:
            return None
        return cls(
            h=model.hidden_size or 0,
            n=model.num_attention_heads or 0,
            query_rank=latent.q_lora_rank or 0,
            rank=latent.kv_lora_rank,
            rotated=latent.qk_pos_emb_head_dim,
            key=latent.qk_head_dim + latent.qk_pos_emb_head_dim,
            value=latent.v_head_dim,
            norms=model.qk_layernorm,
        )

    @property
    def queries(self) -> int:
        """Return the channels of all heads' queries together."""
        return self.n * self.key

    @property
    def keys_and_values(self) -> int:
        """Return the channels of all heads' values and unrotated parts of keys, together."""
        return self.n * (self.key - self.rotated + self.value)

    @property
    def small(self) -> int:
        """Return the number of channels that tensor parallelism does not divide.

        They are the channels of the two latent vectors and of the rotated part of a key. Every rank
        computes them all.
        """
        return self.query_rank + self.rank + self.rotated

    @property
    def kept(self) -> int:
        """Return the elements per token that autograd keeps for latent vectors and their norms."""
        return self.small + (self.norms * (self.query_rank + self.rank))

    def matrices(self, tp: int) -> list[Linear]:
        """Return the projections to queries, keys and values, in the order of the attention module.

        Projections whose outputs are divided into heads are sharded over ``tp`` tensor-parallel
        ranks; the others are not.
        """
        rank = self.query_rank
        first = [Linear("linear_q_proj", self.queries, self.h, rows=tp, bias=False)]
        if rank:
            first = [
                Linear("linear_q_down_proj", rank, self.h, bias=False),
                Linear("linear_q_up_proj", self.queries, rank, rows=tp, bias=False),
            ]
        small = self.rank + self.rotated
        return [
            *first,
            Linear("linear_kv_down_proj", small, self.h, bias=False),
            Linear("linear_kv_up_proj", self.keys_and_values, self.rank, rows=tp, bias=False),
        ]
