"""Sparse attention of DeepSeek-V3.2 (section 2.1 of its report) on multi-latent attention.

Each query of `layers.latent_attention` attends to the k keys (``--dsa-indexer-topk``) that the
`LightningIndexer` scores best among those of its own document up to its own position. With k of at
least the sequence length, it attends to all of them, exactly as `LatentAttention` does.

The indexer is trained by its own loss alone (``--dsa-indexer-loss-coeff``), and the rest of the
model by the other losses alone. The report has two stages. In the warm-up attention is dense (k is
at least the sequence length), the loss compares probabilities over all keys, and only the indexer
is trained (``--freeze-all-but indexer``). Then everything is trained, k is small, and the loss
compares probabilities over the chosen keys (``--dsa-indexer-use-sparse-loss``).

Queries are handled in blocks, so that scores and probabilities never exist for all of a long
sequence. Under context parallelism the small vectors and index keys of all ranks are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor

from megatron_ext import core
from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.auxiliary_loss import (
    INDEXER_LOSS,
    INDEXER_LOSS_COUNT,
    attach_microbatch_loss,
)
from megatron_ext.layers.context_parallel import gather_sequence, slices_of, to_sequence_order
from megatron_ext.layers.latent_attention import NORM_NAMES, LatentAttention
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear
from megatron_ext.layers.masks import is_dense
from megatron_ext.layers.mixers.lightning_indexer import (
    IndexerLoss,
    IndexerSubmodules,
    IndexVectors,
    LightningIndexer,
    attention_target,
    chosen_keys,
    gathered_rows,
    index_scores,
    share_of,
)
from megatron_ext.layers.norms import Norm
from megatron_ext.layers.transformer_layer import WithBias

if TYPE_CHECKING:
    from megatron_ext.layers.kv_cache import KeyValueCache
    from megatron_ext.layers.mixers.sparse_cache import SparseLatentCache

CHECKPOINT_NAMES = NORM_NAMES
"""Prefixes of parameters whose names in sharded checkpoints differ, see `mixers.specs`."""

BLOCK_NUMBERS = {"cpu": 2**24, "cuda": 2**27}
"""Largest number of scores of all heads that a device computes at a time."""


class Block(NamedTuple):
    """Queries that are handled together.

    Attributes:
        rows: where they are among this rank's queries.
        first: position of the first query in the sequence.
        end: number of keys up to the position of the last query.
    """

    rows: slice
    first: int
    end: int


def query_blocks(length: int, rank: int, size: int, rows: int) -> Iterator[Block]:
    """Yield the blocks of a context-parallel rank's queries, of at most ``rows`` each.

    ``length`` is the number of the rank's queries, in the order of `context_parallel`; ``size`` is
    the number of ranks.
    """
    parts = [0] if size == 1 else slices_of(rank, size)
    length //= len(parts)
    for number, index in enumerate(parts):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            own = slice(number * length + start, number * length + stop)
            yield Block(own, index * length + start, index * length + stop)


class SparseDotProductAttention(DotProductAttention):
    """Attention of each query to the keys that its indexer chooses.

    Raises:
        ConfigError: context-parallel ranks are to exchange heads, so that none would have the
            probabilities of all heads; or attention has a window, sinks or a soft cap.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        submodules: IndexerSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, pg_collection=groups, **kwargs
        )
        if self.cp_group.size() > 1 and self.cp_comm_type == "a2a":
            raise ConfigError(
                "`--cp-comm-type` (a2a) does not go with sparse attention, whose indexer needs "
                "the probabilities of all heads; use all_gather."
            )
        changes = {
            "--window-size": self.window_size,
            "--softmax-type": config.softmax_type if self.has_sinks else None,
            "--attn-logit-softcapping": self.softcap,
        }
        for name, value in changes.items():
            if value is not None:
                raise ConfigError(
                    f"`{name}` ({value}) does not go with sparse attention, whose indexer learns "
                    "the plain softmax over all keys; leave it out."
                )
        self.layer_number = layer_number
        self.topk: int = config.dsa_indexer_topk
        self.indexer = LightningIndexer(config, submodules, groups)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state of the indexer, and of the sinks if there are any."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: entry for name, entry in state.items() if "indexer." not in name}
        own |= self.indexer.sharded_state_dict(f"{prefix}indexer.", sharded_offsets, metadata)
        return own

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        *,
        index: IndexVectors | None = None,
    ) -> Tensor:
        """Return what the base class does, for attention to the chosen keys.

        In training the indexer's loss is attached to it.

        Args:
            query: ``[s/cp, b, n, d]``.
            key, value: ``[s, b, n, d]``, in sequence order, where keys are chosen; ``[s/cp, b, n,
                d]`` where each query attends to all, because ``index`` is None or k is at least s.
            index: index vectors of this context-parallel rank's s/cp tokens; None attends to all
                keys.
        """
        length = query.size(0) * self.cp_group.size()
        dense = index is None or length <= self.topk
        attended = None
        if dense:
            attended = super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        if index is None:
            assert attended is not None
            return attended
        learns = self.training and torch.is_grad_enabled() and index.query.requires_grad
        if dense and not learns:
            assert attended is not None
            return attended
        if self.cp_group.size() > 1:
            index = index._replace(key=gather_sequence(index.key, self.cp_group))
            if dense:  # the base class has gathered them for itself alone
                key = gather_sequence(key.detach(), self.cp_group)
        loss = IndexerLoss(index, self.tp_group) if learns else None
        self.length = length
        outputs = []
        cp = self.cp_group
        channels = value.size(-1)
        if not dense:
            query, key, value = self._of_one_size(query, key, value)
        rows = self._rows_of_block(query, index, learns=learns)
        for block in query_blocks(query.size(0), cp.rank(), cp.size(), rows):
            chosen = self._choose(query, key, block, index, attention_mask, loss)
            if not dense:
                outputs.append(self._attend(query, key, value, block, chosen))
        if attended is None:
            attended = torch.cat(outputs)[..., :channels].flatten(2)
        return attended if loss is None else self._with_loss(attended, loss, length)

    def attend_after(
        self, query: Tensor, key: Tensor, value: Tensor, index: IndexVectors, first: int
    ) -> Tensor:
        """Return the attention ``[q, b, n, dv]`` of q queries to chosen keys, without a loss.

        The queries are the last q positions of the k positions of the keys.

        Args:
            query: ``[q, b, n, dk]``.
            key, value: ``[k, b, n, dk]`` and ``[k, b, n, dv]``.
            index: index vectors of q queries and k keys.
            first: position of the first query, k - q.
        """
        if key.size(0) <= self.topk:
            return self.attend_locally(query, key, value, None, first_query=first)
        outputs = []
        channels = value.size(-1)
        query, key, value = self._of_one_size(query, key, value)
        rows = self._rows_of_block(query, index, learns=False)
        for start in range(0, len(query), rows):
            stop = min(start + rows, len(query))
            block = Block(slice(start, stop), first + start, first + stop)
            chosen = self._choose(query, key, block, index, None, None)
            outputs.append(self._attend(query, key, value, block, chosen))
        return torch.cat(outputs)[..., :channels]

    def _of_one_size(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return heads with channels of zeros, so that all have one size if a kernel needs it.

        A CPU's kernel would copy the keys and values of each block of queries otherwise.
        """
        size = max(key.size(-1), value.size(-1))
        if query.is_cuda or self._computes_scores(query) or key.size(-1) == value.size(-1):
            return query, key, value
        padded = (F.pad(x, (0, size - x.size(-1))) for x in (query, key, value))
        query, key, value = padded
        return query, key, value

    def _rows_of_block(self, query: Tensor, index: IndexVectors, *, learns: bool) -> int:
        """Return how many queries of ``[q, b, n, d]`` are handled together."""
        heads: int = self.indexer.heads
        if learns or self._computes_scores(query):
            heads = max(heads, query.size(2))
        per_row = query.size(1) * heads * index.key.size(0)
        return max(1, BLOCK_NUMBERS[query.device.type] // per_row)

    def _choose(
        self,
        query: Tensor,
        key: Tensor,
        block: Block,
        index: IndexVectors,
        mask: Tensor | None,
        loss: IndexerLoss | None,
    ) -> Tensor:
        """Return ``[b or 1, q, e]``, True at the chosen keys of a block's queries.

        Add the block's losses to ``loss``, if there is one. ``key`` and ``index.key`` cover the
        whole sequence.
        """
        rows, first, end = block
        if loss is None and end <= self.topk:
            return _allowed(mask, block, query.device)
        count = rows.stop - rows.start
        share = share_of(count, self.tp_group)
        own = slice(rows.start + share.start, rows.start + share.stop)
        allowed = _allowed(mask, Block(own, first + share.start, end), query.device)
        if loss is None:
            scores = index_scores(index.query[own], index.key[:end], index.weights[own])
            chosen = chosen_keys(scores, allowed, self.topk)
            return gathered_rows(chosen, count, self.tp_group)
        products, scores = loss.products(own, end)
        own_chosen = chosen_keys(scores, allowed, self.topk)
        chosen = gathered_rows(own_chosen, count, self.tp_group)
        counted = allowed
        within = _allowed(mask, block, query.device)
        if self.config.dsa_indexer_use_sparse_loss:
            counted = own_chosen
            within = chosen
        with torch.no_grad():
            target = attention_target(
                query[rows], key[:end], within, self.softmax_scale, self.tp_group
            )
        loss.add(own, products, scores, target, counted)
        return chosen

    def _computes_scores(self, query: Tensor) -> bool:
        """Return whether attention keeps the scores of all heads, because no kernel computes it."""
        return not self.has_kernel(query)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block: Block, chosen: Tensor
    ) -> Tensor:
        """Return the attention ``[q, b, n, dv]`` of a block's queries to their chosen keys."""
        rows, first, end = block
        forbidden = ~chosen.unsqueeze(1)
        # The mask has all rules; only masks of dropout, without a kernel, need a position.
        position = first if self._computes_scores(query) else None
        return self.attend_locally(
            query[rows], key[:end], value[:end], forbidden, first_query=position
        )

    def _with_loss(self, attended: Tensor, loss: IndexerLoss, length: int) -> Tensor:
        """Return ``attended`` with the mean loss of a micro-batch's tokens attached, and log it.

        Context-parallel ranks have parts of the mean, which add up.
        """
        tokens = attended.size(1) * length
        mean = loss.total() / tokens
        core.log_auxiliary_loss(self, INDEXER_LOSS, mean.detach())
        share = torch.full_like(mean, 1 / self.cp_group.size())
        core.log_auxiliary_loss(self, INDEXER_LOSS_COUNT, share)
        return attach_microbatch_loss(
            attended, mean * self.config.dsa_indexer_loss_coeff, self.config
        )


def _allowed(mask: Tensor | None, block: Block, device: torch.device) -> Tensor:
    """Return ``[b or 1, q, e]``, True at keys of a query's own document up to its position.

    ``mask`` is documents or a dense mask of this rank's queries, see `layers.masks`; None means one
    document.
    """
    rows, first, end = block
    count = rows.stop - rows.start
    position = torch.arange(end, device=device)
    past = (position[None, :] <= position[first : first + count, None]).unsqueeze(0)
    if mask is None:
        return past
    if is_dense(mask):
        return past & ~mask[:, 0, rows, :end]
    own = mask[:, first : first + count, None] == mask[:, None, :end]
    return past & own


class SparseLatentAttention(LatentAttention):
    """Multi-latent self-attention whose queries attend to the keys that an indexer chooses."""

    cache: SparseLatentCache | None = None

    def new_cache(self, cache: KeyValueCache) -> SparseLatentCache:
        """Return an empty cache of this layer; ``cache`` is the state that all layers share."""
        from megatron_ext.layers.mixers.sparse_cache import SparseLatentCache

        return SparseLatentCache(cache, self)

    def heads(
        self, query_input: Tensor, latent: Tensor, shared: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the base class does; with keys to choose, those and values of all ranks.

        Of other context-parallel ranks a rank gets the small vectors, from which it computes the
        keys and values ``[s, b, n, d]`` of the whole sequence itself.
        """
        cp = self.pg_collection.cp
        length = len(shared) * cp.size()
        if cp.size() == 1 or length <= self.core_attention.topk:
            return super().heads(query_input, latent, shared)
        query = self.queries(query_input, length)
        turned = gather_sequence(self.rotated_shared(shared, length), cp).unsqueeze(2)
        projected, _ = self.linear_kv_up_proj(
            gather_from_sequence_parallel_region(latent.contiguous(), group=cp)
        )
        if self.config.sequence_parallel:
            # The layer has gathered, for each tensor-parallel rank, the parts of all others.
            parts = projected.view(self.tp_group.size(), cp.size(), -1, *projected.shape[1:])
            projected = parts.transpose(0, 1).flatten(0, 2)
        projected = to_sequence_order(projected, cp.size())
        per_head = torch.unflatten(projected, -1, (query.size(2), -1))
        width = self.config.qk_head_dim
        turned = turned.expand(-1, -1, query.size(2), -1)
        key = torch.cat((per_head[..., :width], turned), dim=-1)
        return query, key, per_head[..., width:].contiguous()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_unused: Any
    ) -> WithBias:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add.

        Arguments are those of the base class.
        """
        small = self.small_vectors(hidden_states)
        query_input, _, shared = small
        length = shared.size(0) * self.pg_collection.cp.size()
        index = self.core_attention.indexer(
            hidden_states, query_input, self._table(length, shared.dtype)
        )
        if self.cache is not None:
            in_generation: WithBias = self.linear_proj(self.cache.attend(*small, index))
            return in_generation
        again = None
        recomputes = self.recomputes_heads and self.training and torch.is_grad_enabled()
        if recomputes and any(vector.requires_grad for vector in small):
            again = CheckpointWithoutOutput()
            again.fp8 = False  # whatever it is given, it would use Transformer Engine
            query, key, value = again.checkpoint(self.heads, *small)
        else:
            query, key, value = self.heads(*small)

        def attend(query: Tensor, key: Tensor, value: Tensor, *vectors: Tensor) -> Tensor:
            attended: Tensor = self.core_attention(
                query, key, value, attention_mask, index=IndexVectors(*vectors)
            )
            return attended

        if self.checkpoint_core_attention and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value, *index)
        else:
            attended = attend(query, key, value, *index)
        if again is not None:
            again.discard_output_and_register_recompute(attended)
        output: WithBias = self.linear_proj(attended)
        return output


def spec(transformer_config: TransformerConfig) -> ModuleSpec:
    """Return the spec of `SparseLatentAttention` with our torch linear layers."""
    qk_norm: Any = Norm if transformer_config.qk_layernorm else IdentityOp
    indexer = IndexerSubmodules(
        linear_wq_b=WholeLinear,
        linear_wk=WholeLinear,
        k_norm=Norm,
        linear_weights_proj=WholeLinear,
    )
    modules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=WholeLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=WholeLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=partial(SparseDotProductAttention, submodules=indexer),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        kv_layernorm=qk_norm,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=SparseLatentAttention, params=causal, submodules=modules)
