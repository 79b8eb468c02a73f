"""Attention: plain arithmetic in every layout, and megatron-core's own module for its roundings."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention as CoreAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_ext.core import slice_batch
from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention, _random_state
from megatron_ext.layers.dropout import microbatch_masks, uniform
from megatron_ext.layers.specs import torch_layer_spec
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext, seed_everything
from tests.layers import plain
from tests.ranks import on_ranks, ranks

S, B, N, D = 16, 2, 4, 8
ENDS = [[5, 6, 11], [8]]


def config(**changes: Any) -> TransformerConfig:
    base: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=N * D,
        num_attention_heads=N,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        add_bias_linear=False,
    )
    return TransformerConfig(**{**base, **changes})


def build(
    kind: type, transformer_config: TransformerConfig, context: ParallelContext, **kwargs: Any
) -> Any:
    return kind(
        config=transformer_config,
        layer_number=kwargs.pop("layer_number", 1),
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=context.pgs,
        **kwargs,
    )


def random_qkv(groups: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    heads = (N, groups, groups)
    return [torch.randn(S, B, n, D, generator=generator).to(dtype).requires_grad_() for n in heads]


def outcome(module: Any, qkv: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    own = [x.detach().clone().requires_grad_() for x in qkv]
    torch.manual_seed(3)
    out = module(*own, mask)
    generator = torch.Generator().manual_seed(9)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), *(x.grad for x in own if x.grad is not None)]


def expected(qkv: list[Tensor], forbidden: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return the same in double precision by plain arithmetic."""
    doubled = [x.detach().double() for x in qkv]
    return outcome(lambda q, k, v, _: plain.attention(q, k, v, forbidden, scale), doubled, None)


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(want) == 4
    for ours, truth in zip(got, want, strict=True):
        error = (ours.double() - truth.double()).abs().max() / truth.abs().max()
        assert error <= tolerance, f"{error:.2e} > {tolerance}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@ranks()
def test_equals_plain_arithmetic(context: ParallelContext, groups: int, masked: bool) -> None:
    """The scale of the softmax is the default one, then a given one."""
    forbidden = plain.documents(S, ENDS) if masked else plain.causal(S, B)
    qkv = random_qkv(groups)
    # The size of a head need not be the hidden size divided by the number of heads.
    sizes = config(num_query_groups=groups, hidden_size=3 * N * D, kv_channels=D)
    ours = build(DotProductAttention, sizes, context)
    mask = forbidden[:, None] if masked else None
    assert_near(outcome(ours, qkv, mask), expected(qkv, forbidden), 1e-6)
    given = build(DotProductAttention, sizes, context, softmax_scale=0.7)
    assert_near(outcome(given, qkv, mask), expected(qkv, forbidden, 0.7), 1e-6)


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks()
def test_documents_give_a_cpu_the_bits_of_their_dense_mask(
    context: ParallelContext, dtype: torch.dtype, window: tuple[int, int] | None
) -> None:
    transformer_config = config(bf16=dtype == torch.bfloat16, window_size=window)
    module = build(DotProductAttention, transformer_config, context)
    qkv = random_qkv(N, dtype)
    dense = outcome(module, qkv, plain.documents(S, ENDS)[:, None])
    assert all(map(torch.equal, outcome(module, qkv, plain.document_indices(S, ENDS)), dense))


def forbidden_by(mask: str, window: int = 3) -> Tensor:
    forbidden = plain.documents(S, ENDS) if "documents" in mask else plain.causal(S, B)
    if "window" in mask:
        distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
        forbidden = forbidden | (distance > window)
    return forbidden


@ranks()
def test_a_sliding_window_hides_far_keys_and_joins_a_mask(context: ParallelContext) -> None:
    qkv = random_qkv(N)
    transformer_config = config(window_size=(3, 0), window_attn_skip_freq=2)
    for layer, mask in ((1, "window"), (2, "causal")):
        forbidden = forbidden_by(mask)
        ours = build(DotProductAttention, transformer_config, context, layer_number=layer)
        assert_near(outcome(ours, qkv, None), expected(qkv, forbidden), 1e-6)
        theirs = build(CoreAttention, transformer_config, context, layer_number=layer)
        assert_near(outcome(ours, qkv, None), outcome(theirs, qkv, None), 1e-6)
    as_flags_have_it: Any = [2, 0]
    ours = build(DotProductAttention, config(window_size=as_flags_have_it), context)
    assert hash(ours.window_size) == hash((2, 0)), "block masks are kept by their window"
    want = expected(qkv, forbidden_by("documents and window", 2))
    assert_near(outcome(ours, qkv, plain.documents(S, ENDS)[:, None]), want, 1e-6)


HALF = [
    (torch.bfloat16, {"bf16": True}),
    (torch.bfloat16, {"bf16": True, "attention_softmax_in_fp32": False}),
    (torch.float16, {"fp16": True}),
    (torch.float16, {"fp16": True, "apply_query_key_layer_scaling": True}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "options"), HALF)
@ranks()
def test_half_precision_rounds_as_megatron_core(
    context: ParallelContext, dtype: torch.dtype, options: dict[str, Any], masked: bool
) -> None:
    """Bit for bit on a CPU: a recorded bf16 curve must be met to its last digits."""
    transformer_config = config(num_query_groups=2, **options)
    qkv = random_qkv(2, dtype)
    mask = plain.documents(S, ENDS)[:, None] if masked else None
    both = (
        outcome(build(kind, transformer_config, context, layer_number=3), qkv, mask)
        for kind in (DotProductAttention, CoreAttention)
    )
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks()
def test_dropout_draws_as_megatron_core(context: ParallelContext, dtype: torch.dtype) -> None:
    transformer_config = config(attention_dropout=0.3, bf16=dtype == torch.bfloat16)
    qkv = random_qkv(N, dtype)
    results = []
    for kind in (DotProductAttention, CoreAttention):
        seed_everything(context, 11)
        module = build(kind, transformer_config, context)
        results.append([outcome(module, qkv, None), outcome(module, qkv, None)])
    for ours, theirs in zip(*results, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(results[0][0][0], results[0][1][0]), "the random state moved on"
    evaluating = build(DotProductAttention, transformer_config, context).eval()
    plainly = build(DotProductAttention, config(bf16=transformer_config.bf16), context)
    assert torch.equal(evaluating(*qkv, None), plainly(*qkv, None))


@ranks()
def test_recomputing_attention_leaves_gradients_alone(context: ParallelContext) -> None:
    """The second forward pass draws the dropout that the first drew."""
    gradients = []
    for recompute in ("selective", None):
        transformer_config = config(
            attention_dropout=0.3,
            recompute_granularity=recompute,
            recompute_modules=["core_attn"] if recompute else None,
        )
        seed_everything(context, 5)
        spec = torch_layer_spec(transformer_config, "*-").submodules.self_attention
        module: SelfAttention = build_module(
            spec, config=transformer_config, layer_number=1, pg_collection=context.pgs
        )
        hidden = torch.randn(S, B, N * D, generator=torch.Generator().manual_seed(1))
        module(hidden.requires_grad_(), None)[0].square().sum().backward()
        gradients.append([hidden.grad, *(p.grad for p in module.parameters())])
        assert module.checkpoint_core_attention is bool(recompute)
    assert all(map(torch.equal, *gradients))


@ranks()
def test_what_it_cannot_do_it_says(context: ParallelContext) -> None:
    qkv = random_qkv(N)
    ours = build(DotProductAttention, config(), context)
    with pytest.raises(ConfigError, match="Attention bias and packed sequences are not supported"):
        ours(*qkv, None, attention_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="Attention bias and packed sequences are not supported"):
        ours(*qkv, None, packed_seq_params=object())


@pytest.mark.parametrize("window", [(3, 2), (3, 0), (0, 4), (-1, 2), (3, -1)])
@ranks()
def test_a_window_of_two_sides(context: ParallelContext, window: tuple[int, int]) -> None:
    """A window gives the farthest keys that a query sees; -1 sees all of a side."""
    module = build(DotProductAttention, config(window_size=window), context)
    module.causal = False
    left, right = (S if side < 0 else side for side in window)
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    forbidden = ((distance > left) | (-distance > right)).expand(B, -1, -1)
    qkv = random_qkv(N)
    assert_near(outcome(module, qkv, None), expected(qkv, forbidden), 1e-6)


@ranks()
def test_a_given_dropout_replaces_the_configurations(context: ParallelContext) -> None:
    transformer_config = config(attention_dropout=0.3)
    for given, want in ((None, 0.3), (0.0, 0.0), (0.1, 0.1)):
        module = build(DotProductAttention, transformer_config, context, attention_dropout=given)
        assert module.dropout == want


@ranks()
def test_masks_are_drawn_apart_unless_the_block_draws_apart_already(
    context: ParallelContext,
) -> None:
    def drawn(sequence_parallel: bool, dropout: float) -> Tensor:
        seed_everything(context, 11)
        transformer_config: Any = SimpleNamespace(sequence_parallel=sequence_parallel)
        with _random_state(transformer_config, dropout):
            return torch.rand(8)

    seed_everything(context, 11)
    common = torch.rand(8)
    assert not torch.equal(drawn(False, 0.1), common)
    assert torch.equal(drawn(True, 0.1), common) and torch.equal(drawn(False, 0.0), common)


CP_HEADS, CP_WIDTH = 8, 4
CP_KINDS = ["p2p", "all_gather", "a2a"]
MASKS = ["causal", "documents", "dense documents", "window", "documents and window"]


def full_qkv(groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(S, B, n, CP_WIDTH) for n in (CP_HEADS, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def check_part(
    context: ParallelContext, kind: str, mask: str, groups: int, dtype: torch.dtype
) -> None:
    """Check output and gradients of this rank's heads and part of the sequence."""
    tp, cp = context.pgs.tp, context.pgs.cp
    full = [x.requires_grad_() for x in full_qkv(groups, dtype)]
    truth = plain.attention(*(x.double() for x in full), forbidden_by(mask))
    cotangent = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = [truth, *torch.autograd.grad(truth, full, cotangent)]

    def own(tensor: Tensor) -> Tensor:
        """Return this rank's heads and positions of ``[s, b, heads(, d)]``."""
        return plain.zigzag(tensor.chunk(tp.size(), dim=2)[tp.rank()], cp.rank(), cp.size())

    transformer_config = config(
        hidden_size=CP_HEADS * CP_WIDTH,
        num_attention_heads=CP_HEADS,
        num_query_groups=groups,
        context_parallel_size=cp.size(),
        tensor_model_parallel_size=tp.size(),
        window_size=(3, 0) if "window" in mask else None,
    )
    module = build(DotProductAttention, transformer_config, context, cp_comm_type=kind)
    local = [own(x.detach()).requires_grad_() for x in full]
    given = plain.document_indices(S, ENDS) if "documents" in mask else None
    if "dense" in mask:
        given = slice_batch({"attention_mask": forbidden_by(mask)[:, None]}, cp)["attention_mask"]
    out = module(*local, given)
    out.backward(own(cotangent).to(dtype))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for got, want in zip([out, *(x.grad for x in local)], wanted, strict=True):
        error = (got.double() - own(want).double()).abs().max() / want.abs().max()
        assert error <= tolerance, f"{kind} {mask} {groups} {dtype}: {error:.2e}"


def check_parts(context: ParallelContext, kind: str, group_sizes: list[int]) -> None:
    for case in product(MASKS, group_sizes, (torch.float32, torch.float64)):
        check_part(context, kind, *case)


@pytest.mark.parametrize("kind", CP_KINDS)
@pytest.mark.parametrize(
    ("layout", "group_sizes"),
    [
        # One group makes a2a repeat the keys, as they cannot be dealt out.
        ({"cp": 2}, [8, 2, 1]),
        ({"cp": 4}, [8, 4, 2]),
        ({"tp": 2, "cp": 2}, [8, 4, 2]),
    ],
)
def test_parts_of_the_sequence_equal_plain_arithmetic(
    layout: dict[str, int], group_sizes: list[int], kind: str
) -> None:
    on_ranks(check_parts, layout, kind=kind, group_sizes=group_sizes)


@ranks(cp=2)
def test_the_slices_are_megatron_cores(context: ParallelContext) -> None:
    cp = context.pgs.cp
    tokens = torch.arange(2 * S).view(2, S)
    theirs = slice_batch({"tokens": tokens}, cp)["tokens"]
    assert torch.equal(theirs, plain.zigzag(tokens, cp.rank(), 2, dim=1))


@ranks(cp=2)
def test_dropout_keeps_the_mean(context: ParallelContext) -> None:
    cp = context.pgs.cp
    transformer_config = config(
        hidden_size=CP_HEADS * CP_WIDTH,
        num_attention_heads=CP_HEADS,
        context_parallel_size=2,
        attention_dropout=0.2,
    )
    local = [plain.zigzag(x, cp.rank(), 2) for x in full_qkv(CP_HEADS, torch.float32)]
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="all_gather")
    mean = torch.stack([module(*local, None) for _ in range(400)]).mean(0)
    undropped = module.eval()(*local, None)
    assert not torch.equal(module.train()(*local, None), undropped)
    assert (mean - undropped).abs().mean() < 0.03 * undropped.abs().mean() + 0.02


@pytest.mark.parametrize("kind", CP_KINDS)
@ranks(tp=2, cp=2)
def test_deterministic_dropout_is_that_of_one_rank(context: ParallelContext, kind: str) -> None:
    transformer_config = StepTransformerConfig(
        num_layers=4,
        hidden_size=CP_HEADS * CP_WIDTH,
        num_attention_heads=CP_HEADS,
        attention_dropout=0.3,
        masked_softmax_fusion=False,
        context_parallel_size=2,
        tensor_model_parallel_size=2,
        deterministic_dropout=True,
    )
    query, key, value = full_qkv(CP_HEADS, torch.float64)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * CP_WIDTH**-0.5
    probabilities = scores.masked_fill(plain.causal(S, B)[:, None], -math.inf).softmax(dim=-1)
    module = build(DotProductAttention, transformer_config, context, cp_comm_type=kind)
    deeper = build(DotProductAttention, transformer_config, context, layer_number=2)
    assert module.site != deeper.site, "each layer draws masks of its own"
    tp, cp = context.pgs.tp, context.pgs.cp
    own = [plain.zigzag(x.chunk(2, dim=2)[tp.rank()], cp.rank(), 2) for x in (query, key, value)]
    with microbatch_masks(7, 3):
        cpu = torch.device("cpu")
        drawn = torch.stack([uniform(module.site, i, (CP_HEADS, S, S), cpu) for i in range(B)])
        out = module(*own, None)
    dropped = probabilities * (drawn >= 0.3) / 0.7
    want = torch.einsum("bnqk,kbnd->qbnd", dropped, value).chunk(2, dim=2)[tp.rank()].flatten(2)
    torch.testing.assert_close(out, plain.zigzag(want, cp.rank(), 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
@ranks(tp=2, cp=2)
def test_sinks_stay_with_their_heads(context: ParallelContext, kind: str) -> None:
    """Ranks that exchange heads exchange their sinks too; zeros are one more key without value."""
    tp, cp = context.pgs.tp, context.pgs.cp
    sinks = torch.zeros(CP_HEADS, dtype=torch.float64)
    if kind == "learnable":
        sinks = torch.randn(CP_HEADS, generator=torch.Generator().manual_seed(5)).double()
    query, key, value = full_qkv(CP_HEADS, torch.float64)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * CP_WIDTH**-0.5
    scores = scores.masked_fill(plain.causal(S, B)[:, None], -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(B, -1, S, 1)
    shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    want = torch.einsum("bnqk,kbnd->qbnd", shares, value).chunk(2, dim=2)[tp.rank()].flatten(2)
    transformer_config = config(
        hidden_size=CP_HEADS * CP_WIDTH,
        num_attention_heads=CP_HEADS,
        context_parallel_size=2,
        tensor_model_parallel_size=2,
        softmax_type=kind,
    )
    own = [plain.zigzag(x.chunk(2, dim=2)[tp.rank()], cp.rank(), 2) for x in (query, key, value)]
    for exchange in CP_KINDS:
        module = build(DotProductAttention, transformer_config, context, cp_comm_type=exchange)
        if kind == "learnable":
            module.double()
            parameter = module.softmax_offset
            assert parameter.tensor_model_parallel and parameter.partition_dim == 0
            (saved,) = module.sharded_state_dict().values()
            assert saved.global_shape == (CP_HEADS,)
            assert saved.global_offset == (tp.rank() * CP_HEADS // 2,)
            with torch.no_grad():
                parameter.copy_(sinks.chunk(2)[tp.rank()])
        out = module(*own, None)
        torch.testing.assert_close(out, plain.zigzag(want, cp.rank(), 2), rtol=0, atol=1e-12)


@ranks(cp=2)
def test_kinds_that_it_does_not_have_are_refused(context: ParallelContext) -> None:
    transformer_config = config(context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"`--cp-comm-type` \(a2a\+p2p\) must be p2p, all_gather"):
        build(DotProductAttention, transformer_config, context, cp_comm_type="a2a+p2p")
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="a2a")
    odd = [torch.zeros(S // 2, B, 3, CP_WIDTH)] * 3
    with pytest.raises(ConfigError, match=r"heads of a tensor-parallel rank \(3\) to be divisible"):
        module(*odd, None)


@ranks(cp=2)
def test_an_odd_number_of_groups_is_repeated_for_the_heads_of_two_ranks(
    context: ParallelContext,
) -> None:
    generator = torch.Generator().manual_seed(8)
    qkv = [torch.randn(S, B, n, D, generator=generator, dtype=torch.float64) for n in (6, 3, 3)]
    rank = context.pgs.cp.rank()
    want = plain.attention(*qkv, plain.causal(S, B))
    transformer_config = config(hidden_size=6 * D, num_attention_heads=6, num_query_groups=3)
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="a2a")
    got = module(*(plain.zigzag(x, rank, 2) for x in qkv), None)
    torch.testing.assert_close(got, plain.zigzag(want, rank, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value_size", [5, 12])
@ranks(cp=2)
def test_values_of_another_size_than_keys(context: ParallelContext, value_size: int) -> None:
    """Ranks gather both at once, or trade heads; CPU kernels get zeros beside the shorter ones."""
    query, key, _ = random_qkv(N)
    generator = torch.Generator().manual_seed(8)
    qkv = [query, key, torch.randn(S, B, N, value_size, generator=generator).requires_grad_()]
    rank = context.pgs.cp.rank()
    own = [plain.zigzag(x.detach(), rank, 2) for x in qkv]
    want = plain.attention(*(x.detach().double() for x in qkv), plain.causal(S, B))
    for kind, dropout in product(("p2p", "a2a"), (0.0, 1e-12)):
        module = build(
            DotProductAttention, config(), context, cp_comm_type=kind, attention_dropout=dropout
        )
        # With dropout, here of nothing, attention keeps all probabilities.
        got = module(*own, None)
        torch.testing.assert_close(got.double(), plain.zigzag(want, rank, 2), rtol=0, atol=1e-6)
