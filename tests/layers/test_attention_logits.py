"""The largest logits of attention, in blocks and in every layout, against all logits in float64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from megatron_ext.layers import attention_logits
from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.attention_logits import LogitMaxima, largest_logits
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.mixers import test_sparse_attention as sparse
from tests.layers.test_attention import ENDS, B, N, S, build, config, random_qkv
from tests.ranks import on_ranks, ranks

CPU = torch.device("cpu")


def largest(query: Tensor, key: Tensor, forbidden: Tensor) -> Tensor:
    """Return the largest logit of each head, with all logits in double precision."""
    key = key.repeat_interleave(query.size(2) // key.size(2), dim=2).double()
    logits = torch.einsum("qbnd,kbnd->bnqk", query.double(), key) / math.sqrt(query.size(3))
    return logits.masked_fill(forbidden[:, None], -math.inf).amax(dim=(0, 2, 3))


def forbidden(kind: str) -> Tensor:
    """Return ``[b, s, s]``, True where this kind of mask forbids attention."""
    if kind == "window":
        distance = torch.arange(S)[:, None] - torch.arange(S)
        return plain.causal(S, B) | (distance > 3)
    return plain.causal(S, B) if kind == "causal" else plain.documents(S, ENDS)


def plain_flex(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
    """Return what FlexAttention does; on a CPU it refuses to return the largest scores itself."""
    if "return_aux" not in given:
        return flex_attention(query, key, value, **given)
    assert given["return_aux"].max_scores
    assert given["enable_gqa"] == (query.size(1) != key.size(1))
    assert value.size(3) <= flex.LEAST_VALUES
    repeated = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
    sizes = query.size(0), 1, query.size(2), key.size(2)
    allowed = create_mask(given["block_mask"].mask_mod, *sizes, device="cpu")
    scores = (query @ repeated.mT * given["scale"]).masked_fill(~allowed, -math.inf)
    return None, SimpleNamespace(max_scores=scores.amax(dim=-1))


def _same_maxima(
    context: ParallelContext, *, kind: str, comm: str, groups: int, kernel: bool = False
) -> None:
    if kernel:
        given: Any = flex
        given.flex_fits = lambda query, dropout: True
        given.flex_attention = plain_flex
    attention_logits.BLOCK["cpu"], attention_logits.LEAST_QUERIES = 40, 3
    cp, rank = context.pgs.cp.size(), context.cp_rank
    windows = {"window_size": (3, 0)} if kind == "window" else {}
    transformer_config = config(context_parallel_size=cp, **windows)
    module = build(DotProductAttention, transformer_config, context, cp_comm_type=comm)
    maxima = LogitMaxima(module, N, CPU)
    hides = forbidden(kind)
    mask = None
    if kind == "documents":
        mask = plain.document_indices(S, ENDS)
    elif kind == "dense":
        mask = plain.zigzag(hides, rank, cp, dim=1)[:, None]
    passes = [random_qkv(groups), [2 * x for x in random_qkv(groups)]]
    for index, qkv in enumerate(passes):
        # Micro-batches with other heads at their largest.
        query, key, value = (x.detach().roll(index, dims=2) for x in qkv)
        module(*(plain.zigzag(x, rank, cp) for x in (query, key, value)), mask)
    torch.distributed.all_reduce(
        maxima.values, op=torch.distributed.ReduceOp.MAX, group=context.pgs.cp
    )
    rolled = [[x.detach().roll(i, dims=2) for x in qkv] for i, qkv in enumerate(passes)]
    want = torch.stack([largest(query, key, hides) for query, key, _ in rolled]).amax(dim=0)
    torch.testing.assert_close(maxima.values.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "comm", "groups", "cp"),
    [
        ("causal", "p2p", 2, 2),
        ("documents", "a2a", 1, 2),
        ("window", "all_gather", 4, 2),
        ("dense", "p2p", 2, 2),
        pytest.param("documents", "p2p", 2, 2, marks=pytest.mark.slow),
        pytest.param("dense", "a2a", 4, 2, marks=pytest.mark.slow),
        pytest.param("window", "a2a", 2, 2, marks=pytest.mark.slow),
        ("causal", "p2p", 4, 1),
        ("window", "p2p", 1, 1),
    ],
)
def test_heads_have_their_largest_logits_in_every_layout(
    kind: str, comm: str, groups: int, cp: int
) -> None:
    arguments = {"kind": kind, "comm": comm, "groups": groups}
    on_ranks(_same_maxima, {"cp": cp}, **arguments)


@pytest.mark.parametrize(
    ("kind", "comm", "groups", "cp"),
    [("causal", "p2p", 2, 1), ("documents", "a2a", 2, 2), ("window", "p2p", 1, 2)],
)
def test_a_kernel_finds_the_same_logits(kind: str, comm: str, groups: int, cp: int) -> None:
    arguments = {"kind": kind, "comm": comm, "groups": groups, "kernel": True}
    on_ranks(_same_maxima, {"cp": cp}, **arguments)


@ranks()
def test_only_forward_passes_of_training_count(context: ParallelContext) -> None:
    module = build(DotProductAttention, config(), context)
    maxima = LogitMaxima(module, N, CPU)
    query, key, value = random_qkv(N)
    module.eval()
    module(query, key, value, None)
    assert maxima.values.tolist() == [-math.inf] * N
    module.train()
    out = torch.utils.checkpoint.checkpoint(module, query, key, value, None, use_reentrant=True)
    assert torch.isfinite(maxima.values).all()
    maxima.restart()
    out.sum().backward()
    assert query.grad is not None
    assert maxima.values.tolist() == [-math.inf] * N


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("soft cap", {"attn_logit_softcapping": 0.5}),
        ("scaled by layer", {"apply_query_key_layer_scaling": True}),
        ("16 bits", {}),
    ],
)
@ranks()
def test_logits_are_scaled_products_before_a_cap(
    context: ParallelContext, kind: str, changes: dict[str, Any]
) -> None:
    transformer_config = config()
    for name, value in changes.items():
        setattr(transformer_config, name, value)
    module = build(DotProductAttention, transformer_config, context, layer_number=3)
    query, key, _ = random_qkv(2, torch.bfloat16 if kind == "16 bits" else torch.float32)
    with torch.no_grad():
        found = largest_logits(module, query, key, None, first_query=0)
    torch.testing.assert_close(
        found.double(), largest(query, key, plain.causal(S, B)), rtol=1e-5, atol=1e-6
    )
    assert found.dtype == torch.float32


@ranks()
def test_a_logit_that_is_no_number_is_seen(context: ParallelContext) -> None:
    module = build(DotProductAttention, config(), context)
    query, key, _ = (x.detach() for x in random_qkv(N))
    query[3, 1, 2, 0] = math.nan
    found = largest_logits(module, query, key, None, first_query=0)
    assert found.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(("topk", "words"), [(6, ""), (6, "--bf16"), (64, "")])
@ranks()
def test_sparse_attention_has_logits_of_chosen_keys(
    context: ParallelContext, topk: int, words: str
) -> None:
    transformer_config = sparse.configured(context, *words.split(), dsa_indexer_topk=topk)
    module = sparse.built(context, transformer_config).to(transformer_config.params_dtype)
    core = module.core_attention
    maxima = LogitMaxima(core, sparse.HEADS, CPU)
    hides = plain.causal(sparse.S, sparse.B).clone()
    given: list[Tensor] = []
    core.register_forward_pre_hook(lambda _module, inputs: given.extend(inputs[:2]))
    choose = core._choose

    def watched(query: Tensor, key: Tensor, block: Any, *others: Any) -> Tensor:
        chosen: Tensor = choose(query, key, block, *others)
        hides[:, block.rows, : chosen.size(-1)] |= ~chosen
        return chosen

    core._choose = watched
    hidden = torch.randn(sparse.S, sparse.B, sparse.H, dtype=transformer_config.params_dtype)
    module(hidden.requires_grad_(), None)
    query, key = (x.detach() for x in given)
    want = largest(query, key, hides) * core.softmax_scale * math.sqrt(query.size(3))
    torch.testing.assert_close(maxima.values.double(), want, rtol=1e-5, atol=1e-6)
