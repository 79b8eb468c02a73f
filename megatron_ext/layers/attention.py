"""Core attention through torch's scaled_dot_product_attention, with context parallelism."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_ext.errors import ConfigError
from megatron_ext.layers import masks, sdpa
from megatron_ext.layers.initialization import device_of
from megatron_ext.layers.masks import is_dense

if TYPE_CHECKING:
    from megatron_ext.layers.kv_cache import KeyValueCache, LayerCache

GATHER = ("p2p", "all_gather")
"""Values of ``--cp-comm-type`` with which the torch layers gather all keys and values at once."""

HALF = (torch.float16, torch.bfloat16)


class DotProductAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention over this rank's heads.

    Under context parallelism ``--cp-comm-type`` selects the method: ``all_gather`` and ``p2p``
    gather all keys and values; ``a2a`` gives each rank some heads of the whole sequence.

    Attention sinks (``--softmax-type``) and soft-capped scores are computed by FlexAttention where
    it can be used, else with the full matrix of probabilities.

    Attributes:
        cache: keys and values of earlier tokens, in generation; else None.

    Raises:
        ConfigError: under context parallelism ``--cp-comm-type`` has another value.
    """

    cache: LayerCache | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group = groups.cp
        self.cp_comm_type = cp_comm_type or "p2p"
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        # --apply-query-key-layer-scaling keeps half-precision scores small by dividing them by the
        # layer number and multiplying again in single precision. The fused kernels keep scores in
        # single precision anyway, so only the eager path does this.
        self.layer_scaling = max(1, layer_number) if config.apply_query_key_layer_scaling else 1
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.deterministic = bool(getattr(config, "deterministic_dropout", False))
        self.site = f"scores {layer_number}"
        self.tp_group = groups.tp
        self.tp_rank = groups.tp.rank()
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # The flag's value may be a list. Block masks are cached by this value, which must be
        # hashable.
        window = tuple(config.window_size) if windowed else None
        self.window_size: tuple[int, int] | None = window
        self.backend = AttnBackend(config.attention_backend)
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self.has_sinks = config.softmax_type != "vanilla"
        if config.softmax_type == "learnable":
            self._add_sinks(config)
        if self.cp_group.size() > 1 and self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`--cp-comm-type` ({self.cp_comm_type}) must be p2p, all_gather or a2a with the "
                "torch layers."
            )

    def _add_sinks(self, config: TransformerConfig) -> None:
        """Register the learned sinks ``[n]``: a logit per head that takes part in the softmax."""
        heads = config.num_attention_heads // self.tp_group.size()
        device = device_of(config)
        self.softmax_offset = torch.nn.Parameter(
            torch.empty(heads, dtype=config.params_dtype, device=device)
        )
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state: the sinks, split over the tensor-parallel ranks."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return state

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Return the sinks ``[n]`` of the heads in ``query``; None if the layer has no sinks.

        ``query`` is ``[q, b, n, d]``. If context-parallel ranks exchange heads (``--cp-comm-type
        a2a``), it holds only a part of this rank's heads.
        """
        if not self.has_sinks:
            return None
        heads = query.size(2)
        if self.config.softmax_type != "learnable":
            return query.new_zeros(heads)
        # If ranks exchange heads, each attends for a part of this rank's heads, in rank order.
        first = self.cp_group.rank() * heads if heads < len(self.softmax_offset) else 0
        return self.softmax_offset[first : first + heads]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the attention output ``[s/cp, b, n * d]`` for this rank's queries.

        Args:
            query: ``[s/cp, b, n, d]``.
            key, value: ``[s/cp, b, g, d]`` with g query groups; values may have another d.
            attention_mask: the document index of each position of the whole sequences, ``[b, s]``,
                or a dense mask ``[b, 1, s/cp, s]``, True where attention is forbidden. With None, a
                causal layer masks later positions itself.
            attn_mask_type: ignored; the layer's own type of mask applies.

        Raises:
            ConfigError: an attention bias or packed sequences are given.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise ConfigError(
                "Attention bias and packed sequences are not supported by the torch layers; use "
                "document masks (`--reset-attention-mask`)."
            )
        self.length = query.size(0) * self.cp_group.size()
        if self.cache is not None:
            context = self.cache.attend(query, key, value, self.attend_locally)
        elif self.cp_group.size() == 1:
            context = self.attend_locally(query, key, value, attention_mask, first_query=0)
        else:
            from megatron_ext.layers.context_attention import SharedSequence

            shared = SharedSequence(self.attend_locally, self.cp_group, self.causal)
            trades = self.cp_comm_type == "a2a"
            attend = shared.attend_with_traded_heads if trades else shared.attend_to_gathered
            context = attend(query, key, value, attention_mask)
        return context.flatten(2)

    def new_cache(self, cache: KeyValueCache) -> LayerCache:
        """Return an empty cache of this layer; ``cache`` is the state that all layers share."""
        from megatron_ext.layers.kv_cache import LayerCache

        return LayerCache(cache, self.window_size)

    def attend_locally(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        first_query: int | None,
    ) -> Tensor:
        """Attend without communication.

        Args:
            query: ``[q, b, n, d]``.
            key, value: ``[k, b, g, d]`` with g query groups.
            mask: the document index of each position ``[b, k]``, or a dense mask ``[b, 1, q, k]``,
                True where attention is forbidden.
            first_query: position of the first query in the sequence; the first key has position 0.
                None if positions differ between the sequences of the batch. The mask must then
                contain all rules, including causality and window.

        Returns:
            The attention output ``[q, b, n, d]``.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        follows_core = self._follows_core(query)
        own_scores = self.has_sinks or bool(self.softcap)
        window = None if first_query is None else self.window_size
        hides = mask is not None or window is not None
        auto = self.backend == AttnBackend.auto and not follows_core and first_query is not None
        by_document = mask is not None and not is_dense(mask)
        if (hides or own_scores) and auto:
            from megatron_ext.layers import flex_attention as flex

            if flex.flex_fits(q, dropout):
                # A dense mask already contains causality.
                causal = self.causal and (mask is None or window is not None)
                span = flex.Span(first_query or 0, causal or by_document, window)
                blocks = flex.block_mask(q, k, span, mask)
                limit = flex.limit_on(query.device, self.softcap) if self.softcap else None
                sinks = self._sinks(query) if own_scores else None
                return flex.attention_in_blocks(
                    query, key, value, blocks, self.softmax_scale, limit, sinks
                )
        position = first_query or 0
        if mask is not None and by_document:
            mask = masks.document_mask(mask, position, query.size(0))
        if window is not None:
            mask = self._with_window(mask, query, key, position)
        if follows_core or own_scores:
            return self._attend_eagerly(query, key, value, mask, position)
        bias: Any = None if mask is None else ~mask
        if bias is None and self.causal and q.size(2) != k.size(2):
            from megatron_ext.layers.causal_parts import attend_in_parts, prefers_parts

            if prefers_parts(q, k, v, dropout, self.backend):
                return attend_in_parts(q, k, v, self.softmax_scale).permute(2, 0, 1, 3)
            bias = causal_lower_right(q.size(2), k.size(2))
        with _random_state(self.config, dropout):
            causal = self.causal and bias is None
            context = sdpa.attend(
                q, k, v, mask=bias, causal=causal, dropout=dropout,
                scale=self.softmax_scale, backend=self.backend,
            )  # fmt: skip
        return context.permute(2, 0, 1, 3)

    def _with_window(
        self, mask: Tensor | None, query: Tensor, key: Tensor, first_query: int
    ) -> Tensor:
        """Return ``[b or 1, 1, q, k]``, True where mask, window or causality forbids attention."""
        assert self.window_size is not None
        left, right = self.window_size
        q = torch.arange(query.size(0), device=query.device)[:, None] + first_query
        k = torch.arange(key.size(0), device=query.device)[None, :]
        forbidden = torch.zeros(q.size(0), k.size(1), dtype=torch.bool, device=query.device)
        if left >= 0:
            forbidden |= k < q - left
        if self.causal:
            forbidden |= k > q
        elif right >= 0:
            forbidden |= k > q + right
        return forbidden[None, None] if mask is None else mask | forbidden

    def has_kernel(self, query: Tensor) -> bool:
        """Return whether `sdpa.attend` alone computes the attention of queries like this one.

        Only dtype and device of the query matter.
        """
        return not (self.has_sinks or self.softcap or self._follows_core(query))

    def _follows_core(self, query: Tensor) -> bool:
        """Return whether to attend by separate operations, like megatron-core's unfused attention.

        GPUs do so with ``--attention-backend local``, and with deterministic dropout. CPUs do so in
        16 bits, to round like Megatron-LM, and with dropout, to draw the same masks as Megatron-LM.
        """
        drops = self.dropout > 0 and self.training
        if query.device.type != "cpu":
            return (drops and self.deterministic) or self.backend == AttnBackend.local
        return query.dtype in HALF or drops

    def _attend_eagerly(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first_query: int
    ) -> Tensor:
        """Attend with the full matrix of probabilities.

        Arguments and result are those of `attend_locally`.
        """
        q_len, batch, heads, _ = query.shape
        repeats = heads // key.size(2)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        q, k, v = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))
        scores = torch.baddbmm(
            q.new_empty(q.size(0), q_len, k.size(1)),
            q,
            k.transpose(1, 2),
            beta=0.0,
            alpha=self.softmax_scale / self.layer_scaling,
        ).view(batch, heads, q_len, k.size(1))
        if self.config.attention_softmax_in_fp32 and scores.dtype in HALF:
            scores = scores.float()
        if self.layer_scaling != 1:
            scores = scores * self.layer_scaling
        if mask is None and self.causal:
            q_at = torch.arange(q_len, device=query.device)[:, None] + first_query
            mask = torch.arange(k.size(1), device=query.device)[None, :] > q_at
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.masked_fill(mask, -10000.0)
        sinks = self._sinks(query)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, q_len, 1)
            scores = torch.cat([scores, column], dim=-1)
        probabilities = torch.softmax(scores, dim=-1).to(query.dtype)
        if sinks is not None:
            probabilities = probabilities[..., :-1]
        if self.dropout > 0 and self.training:
            probabilities = self._drop(probabilities, first_query)
        context = torch.bmm(probabilities.flatten(0, 1), v)
        return context.view(batch, heads, q_len, -1).permute(2, 0, 1, 3)

    def _drop(self, probabilities: Tensor, first_query: int) -> Tensor:
        """Apply dropout to the attention probabilities ``[b, n, q, k]``.

        ``first_query`` is the position of the first query in the sequence;
        ``--deterministic-dropout`` needs it.
        """
        if not self.deterministic:
            with _random_state(self.config, self.dropout):
                return F.dropout(probabilities, self.dropout, training=True)
        from megatron_ext.layers.dropout import attention_dropout

        traded = self.cp_comm_type == "a2a" and self.cp_group.size() > 1
        heads = probabilities.size(1)
        per_tp_rank = heads * (self.cp_group.size() if traded else 1)
        return attention_dropout(
            probabilities,
            self.dropout,
            self.site,
            num_heads=self.config.num_attention_heads,
            length=self.length,
            first_head=self.tp_rank * per_tp_rank + (self.cp_group.rank() * heads if traded else 0),
            first_query=first_query,
        )


def _random_state(transformer_config: TransformerConfig, dropout: float) -> Any:
    """Return a context in which tensor-parallel ranks draw different dropout masks.

    The context changes nothing without dropout. Under sequence parallelism it changes nothing
    either, since megatron-core's blocks have already entered such a context.
    """
    if dropout > 0 and not transformer_config.sequence_parallel:
        return tensor_parallel.get_cuda_rng_tracker().fork()
    return contextlib.nullcontext()
