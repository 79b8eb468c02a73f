"""FlexAttention (arXiv:2412.05496), which skips blocks of keys that a mask or a window hides.

A block is 128 queries by 128 keys. Whether it is hidden follows from the smallest and largest
position and document index of its queries and keys, without looking at all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_ext.layers import masks
from megatron_ext.layers.compiled import Compiled, compiles
from megatron_ext.layers.masks import is_dense

Lengths = tuple[int, int]
TILE = 128
FILLS_UP_HEADS = torch.__version__ >= "2.13"
"""Whether FlexAttention accepts head sizes that are not powers of 2."""


@dataclass(frozen=True)
class Span:
    """The rule that allows or forbids attention by the positions of query and key.

    Attributes:
        first_query: position of the first query; the first key is at position 0.
        causal: whether keys after the query are forbidden.
        window: greatest distance to keys on the left and, unless causal, on the right; -1 or None
            allows any distance.
    """

    first_query: int
    causal: bool
    window: tuple[int, int] | None

    def distances(self) -> tuple[int | None, int | None]:
        """Return the least and greatest allowed ``query - key``; None for no limit."""
        left, right = self.window or (-1, -1)
        least = 0 if self.causal else -right if right >= 0 else None
        return least, left if left >= 0 else None


def flex_fits(query: Tensor, dropout: float) -> bool:
    """Return whether `attention_in_blocks` supports queries ``[b, n, q, d]`` with this dropout.

    It needs a GPU with a compiler, 16-bit queries, no dropout, and a head size of at least 16.
    Before torch 2.13 the head size must also be a power of 2. Newer versions pad other head sizes,
    such as the 192 channels of multi-latent attention; older versions may do so too, but were not
    tested.
    """
    d = query.size(-1)
    fits = d >= 16 and (d & (d - 1) == 0 or FILLS_UP_HEADS)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and fits and dropout == 0 and compiles(query)


def _attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    limit: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention ``[q, b, n, d]`` of queries ``[q, b, n, d]``, by FlexAttention.

    Keys and values are ``[k, b, g, d]``; the mask allows or forbids each pair.

    Args:
        limit: soft cap c as a tensor ``[]``: scores x become ``c tanh(x / c)``.
        sinks: logit of each head's sink, ``[n]``; it takes a share of each query's attention.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    given: dict[str, Any] = {
        "block_mask": mask, "scale": scale, "enable_gqa": q.size(1) != k.size(1),
    }  # fmt: skip
    if limit is not None:

        def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return limit * torch.tanh(score / limit)

        given["score_mod"] = capped
    if sinks is None:
        out: Tensor = flex_attention(q, k, v, **given)
    else:
        out, statistics = flex_attention(q, k, v, **given, **_WITH_LSE)
        out = beside_sinks(out, getattr(statistics, "lse", statistics), sinks)
    return out.permute(2, 0, 1, 3)


_WITH_LSE: dict[str, Any] = {"return_lse": True}
if hasattr(flex, "AuxRequest"):  # torch 2.9 and newer, where the other name is deprecated
    _WITH_LSE = {"return_aux": flex.AuxRequest(lse=True)}


FINDS_LARGEST = "max_scores" in getattr(getattr(flex, "AuxRequest", None), "_fields", ())
"""Whether FlexAttention returns the largest score of each query."""
LEAST_VALUES = 16
"""Smallest head size of values."""


def _largest_scores(query: Tensor, key: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Return the largest score of each query ``[q, b, n, d]``, as ``[b, n, q]`` in float32.

    Keys are ``[k, b, g, d]``. It is -inf for queries that the mask allows no key.
    """
    q, k = (x.permute(1, 2, 0, 3) for x in (query, key))
    asked: Any = flex.AuxRequest(max_scores=True)
    # Attention has values, too; a few channels of the keys cost least.
    _, statistics = flex_attention(
        q, k, k[..., :LEAST_VALUES],
        block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1), return_aux=asked,
    )  # fmt: skip
    largest: Tensor = statistics.max_scores
    return largest


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale attention without sinks by the share that the sinks leave to the keys.

    With the log-sum-exp L of a query's scores, the keys get exp(L) / (exp(L) + exp(sink)) of the
    attention, which is sigmoid(L - sink).

    Args:
        out: attention without sinks, ``[b, n, q, d]``.
        lse: log-sum-exp of the scores, ``[b, n, q]`` in float32.
        sinks: logit of each head's sink, ``[n]``.
    """
    kept = torch.sigmoid(lse - sinks.float().view(1, -1, 1))
    return (out * kept.unsqueeze(-1)).to(out.dtype)


@lru_cache(maxsize=16)
def limit_on(device: torch.device, softcap: float) -> Tensor:
    """Return the soft cap as a tensor ``[]``; as a float, each value would be compiled anew."""
    # As in `_position_mask`, the first call may come from evaluation.
    with torch.inference_mode(False):
        return torch.full((), softcap, device=device)


def _kind_of(arg: Any) -> Any:
    """Return the key of an argument of attention: each key is compiled once (`Compiled.kind_of`).

    For a block mask, the key describes its rule (`_rule`): the code, the numbers in it, and the
    dtype and number of axes of each tensor in it. It also says which axes of the mask have size 1.
    Any other argument is its own key.
    """
    if not isinstance(arg, BlockMask):
        return arg
    rule: Any = arg.mask_mod
    contents = [cell.cell_contents for cell in rule.__closure__ or ()]
    kinds = [(x.dtype, x.dim()) if isinstance(x, Tensor) else x for x in contents]
    return rule.__code__, tuple(kinds), tuple(size == 1 for size in arg.kv_indices.shape)


attention_in_blocks = Compiled(_attention_in_blocks, kind_of=_kind_of)
"""`_attention_in_blocks`, compiled to one kernel; uncompiled it would store all scores.

`torch.compile` gives up on a function after 8 compilations. So each kind of mask, window, head size
and so on has its own compiled copy of the function, which serves all lengths.
"""

largest_scores = Compiled(_largest_scores, kind_of=_kind_of)
"""`_largest_scores`, compiled like `attention_in_blocks`."""


def block_mask(query: Tensor, key: Tensor, span: Span, mask: Tensor | None) -> BlockMask:
    """Return the block mask for queries ``[b, n, q, d]`` and keys ``[b, g, k, d]``, cached.

    Attention is forbidden by ``span``, and also by ``mask`` unless it is None. ``mask`` is the
    document index of each position of the sequence ``[b or 1, s]``, or a dense mask ``[b or 1, 1,
    q, k]``, True where attention is forbidden.
    """
    lengths = query.size(2), key.size(2)
    if mask is None:
        return _of_positions(span, lengths, query.device)
    make = _dense_block_mask if is_dense(mask) else _document_block_mask
    return masks.newest.find(mask, (span, lengths), lambda: make(span, lengths, mask))


def _of_positions(span: Span, lengths: Lengths, device: torch.device) -> BlockMask:
    """Return the cached block mask of ``span`` alone, for ``lengths`` = (queries, keys)."""
    what = (span, lengths, device)
    if not masks.newest.keeps_apart(device):
        return _position_mask(*what)
    return masks.newest.recorded(what, lambda: _position_mask.__wrapped__(*what))


@lru_cache(maxsize=16)
def _position_mask(span: Span, lengths: Lengths, device: torch.device) -> BlockMask:
    # The cache is also used in training, where autograd cannot save tensors made in inference mode.
    with torch.inference_mode(False):
        some, whole = _blocks_in_reach(span, lengths, device)
        rule = _rule(span, device)
        return _in_order(some[None], whole[None], lengths, rule)


def _document_block_mask(span: Span, lengths: Lengths, documents: Tensor) -> BlockMask:
    queries = documents[:, span.first_query : span.first_query + lengths[0]]
    keys = documents[:, : lengths[1]]
    some, whole = _blocks_in_reach(span, lengths, documents.device)
    q_low, q_high = _ranges(queries)
    k_low, k_high = _ranges(keys)
    q_low = q_low[:, :, None]
    q_high = q_high[:, :, None]
    k_low = k_low[:, None, :]
    k_high = k_high[:, None, :]
    # Document indices grow along a sequence. If they did not, only some extra blocks would be
    # computed.
    some = some & (q_low <= k_high) & (k_low <= q_high)
    whole = whole & (q_low == k_high) & (k_low == q_high)
    if documents.size(0) == 1:
        queries = queries[0]
        keys = keys[0]
    rule = _rule(span, documents.device, query_documents=queries, key_documents=keys)
    return _in_order(some, whole, lengths, rule)


def _dense_block_mask(span: Span, lengths: Lengths, forbidden: Tensor) -> BlockMask:
    batch = forbidden.size(0)
    device = forbidden.device
    rule = _rule(span, device, forbidden=forbidden[0, 0] if batch == 1 else forbidden[:, 0])
    return create_block_mask(rule, batch, None, *lengths, device=str(device))


def _blocks_in_reach(span: Span, lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two booleans per block: whether ``span`` allows any of its pairs, and all of them.

    Both tensors are ``[q blocks, k blocks]``; ``lengths`` are the numbers of queries and keys. A
    block that extends beyond the last query or key never counts as one that allows all pairs.
    """

    def ends(length: int) -> tuple[Tensor, Tensor]:
        first = torch.arange(0, length, TILE, device=device)
        return first, first + (TILE - 1)

    q_first, q_last = ends(lengths[0])
    k_first, k_last = ends(lengths[1])
    whole = (q_last < lengths[0])[:, None] & (k_last < lengths[1])
    some = torch.ones_like(whole)
    q_last = q_last.clamp(max=lengths[0] - 1)
    k_last = k_last.clamp(max=lengths[1] - 1)
    nearest = q_first[:, None] - k_last + span.first_query
    farthest = q_last[:, None] - k_first + span.first_query
    least, greatest = span.distances()
    if least is not None:
        some = some & (farthest >= least)
        whole = whole & (nearest >= least)
    if greatest is not None:
        some = some & (nearest <= greatest)
        whole = whole & (farthest <= greatest)
    return some, whole


def _ranges(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest document index in each block of positions, ``[b, blocks]``.

    ``documents`` is the document index of each position, ``[b, s]``. An incomplete last block is
    filled with the document index of the last position.
    """
    lacking = -documents.size(1) % TILE
    filled = torch.cat([documents, documents[:, -1:].expand(-1, lacking)], dim=1)
    low, high = filled.view(documents.size(0), -1, TILE).aminmax(dim=2)
    return low, high


def _in_order(
    some: Tensor, whole: Tensor, lengths: Lengths, rule: Callable[..., Tensor]
) -> BlockMask:
    """Return the block mask that attends in the blocks of ``some``, and skips all others.

    ``some`` is True for blocks that allow any pair of query and key, and ``whole`` for those that
    allow all pairs; both are ``[b or 1, q blocks, k blocks]``. In a block that allows only some,
    ``rule`` (from `_rule`) decides for each pair. ``lengths`` are the numbers of queries and keys.
    """

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of True columns in each row, and the columns' indices, True ones first.

        The input is ``[b, rows, columns]``; the results are ``[b, 1, rows]`` and ``[b, 1, rows,
        columns]``, int32.
        """
        blocks = blocks[:, None].int()
        columns = torch.argsort(blocks, dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), columns.int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=lengths
    )


def _rule(
    span: Span,
    device: torch.device,
    *,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function of (b, h, q, k) that is True where query q attends to key k.

    Args:
        query_documents, key_documents: document index of each query ``[b, q]`` and key ``[b, k]``,
            or without the axis b if it is the same for all samples.
        forbidden: True where attention is forbidden, ``[b, q, k]``, or ``[q, k]`` for all samples.
    """
    least, greatest = span.distances()
    # Each plain number in a mask's function would need its own compilation.
    first_query = torch.full((), span.first_query, device=device)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Compare key positions directly: differences would be computed for all pairs, in int64.
        position = q + first_query
        seen = k >= 0 if least is None else k <= position - least
        if greatest is not None:
            seen = seen & (k >= position - greatest)
        # All indices are tensors. torch would copy a plain number to the device, and the host would
        # wait.
        if query_documents is not None and key_documents is not None:
            if query_documents.dim() == 2:
                seen = seen & (query_documents[b, q] == key_documents[b, k])
            else:
                seen = seen & (query_documents[q] == key_documents[k])
        if forbidden is not None:
            seen = seen & ~(forbidden[b, q, k] if forbidden.dim() == 3 else forbidden[q, k])
        return seen

    return allowed
