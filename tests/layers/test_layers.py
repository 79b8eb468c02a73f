"""Whole blocks of layers: plain arithmetic in every layout, and megatron-core's local spec."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_ext.core import MTP_LAYER, moe_submodules
from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.moe import Router
from megatron_ext.layers.norms import LayerNorm, RMSNorm
from megatron_ext.layers.specs import (
    has_transformer_engine,
    layer_kinds,
    layer_spec,
    mtp_block_spec,
)
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext, seed_everything
from tests.layers import plain
from tests.ranks import on_ranks, ranks

S, B, H, LAYERS, HEADS, GROUPS, FFN = 8, 2, 16, 2, 4, 2, 24
ENDS = [[3], [4, 5]]


SMALL: dict[str, Any] = dict(
    num_layers=LAYERS,
    hidden_size=H,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    ffn_hidden_size=FFN,
    normalization="RMSNorm",
    attention_dropout=0.0,
    hidden_dropout=0.0,
    add_bias_linear=False,
    masked_softmax_fusion=False,
    bias_activation_fusion=False,
    gradient_accumulation_fusion=False,
)


def config(context: ParallelContext | None = None, **changes: Any) -> TransformerConfig:
    base = dict(SMALL)
    if context is not None:
        base.update(
            tensor_model_parallel_size=context.pgs.tp.size(),
            context_parallel_size=context.pgs.cp.size(),
        )
    return TransformerConfig(**{**base, **changes})


def torch_block(
    transformer_config: TransformerConfig, context: ParallelContext
) -> TransformerBlock:
    spec = layer_spec(transformer_config, impl="torch")
    return TransformerBlock(transformer_config, spec, pg_collection=context.pgs)


def local_part(full: Tensor, context: ParallelContext, *, sequence_parallel: bool) -> Tensor:
    """Return this rank's positions of ``[s, ...]``."""
    cp, tp = context.pgs.cp, context.pgs.tp
    part = plain.zigzag(full, cp.rank(), cp.size()) if cp.size() > 1 else full
    return part.chunk(tp.size())[tp.rank()] if sequence_parallel else part


def check_block(
    context: ParallelContext,
    *,
    masked: bool = False,
    normalization: str = "RMSNorm",
    sequence_parallel: bool = False,
    **changes: Any,
) -> None:
    transformer_config = config(
        context, normalization=normalization, sequence_parallel=sequence_parallel, **changes
    )
    block = torch_block(transformer_config, context)
    plain.fill(block, context)
    truth = plain.PlainBlock(H, HEADS, GROUPS, FFN, LAYERS, rms=normalization == "RMSNorm")
    generator = torch.Generator().manual_seed(4)
    full = torch.randn(S, B, H, generator=generator)
    cotangent = torch.randn(S, B, H, generator=generator)
    forbidden = plain.documents(S, ENDS) if masked else plain.causal(S, B)
    plain_input = full.double().requires_grad_()
    want = truth(plain_input, forbidden)
    want.backward(cotangent.double())

    cp = context.pgs.cp
    mask = forbidden[:, None] if masked else None
    if masked and cp.size() > 1:
        mask = plain.zigzag(forbidden[:, None], cp.rank(), cp.size(), dim=2)
    mine = partial(local_part, context=context, sequence_parallel=sequence_parallel)
    own = mine(full).clone().requires_grad_()
    out = block(own, mask)
    out.backward(mine(cotangent))
    near(out, mine(want), "output")
    near(own.grad, mine(plain_input.grad), "in")
    check_gradients(block, truth, context, sequence_parallel=sequence_parallel)


def check_gradients(
    block: torch.nn.Module,
    truth: plain.PlainBlock,
    context: ParallelContext,
    *,
    sequence_parallel: bool,
) -> None:
    """Check gradients after the sums that megatron-core makes for the parameters that say so."""
    for name, parameter in block.named_parameters():
        grad = parameter.grad.clone()
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(grad, group=context.pgs.tp)
        torch.distributed.all_reduce(grad, group=context.pgs.cp)
        shard = plain.shard_of(name, parameter, context)
        full = truth.weights[shard.name].grad
        near(grad, shard.of(full), name)


def near(got: Tensor, want: Tensor, name: str, tolerance: float = 2e-6) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"{name}: {error:.2e}"


def same(got: dict[str, Tensor], want: dict[str, Tensor], note: object) -> None:
    """Check that two runs have the same tensors by name, bit by bit."""
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} with {note}"


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize(
    ("tp", "how"), [(1, ""), (1, "masked"), (2, "masked"), (2, "masked sequence_parallel")]
)
def test_ranks_are_plain_arithmetic(tp: int, how: str, normalization: str) -> None:
    given = dict.fromkeys(how.split(), True)
    on_ranks(check_block, {"tp": tp}, normalization=normalization, **given)


@pytest.mark.parametrize(
    "changes",
    [
        {"cp_comm_type": "all_gather"},
        {"cp_comm_type": "a2a"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
@ranks(tp=2, cp=2)
def test_all_ranks_and_recomputation_are_too(context: ParallelContext, changes: Any) -> None:
    check_block(context, sequence_parallel=True, masked=True, **changes)


def gpt(
    transformer_config: TransformerConfig, spec: Any, mtp: Any, context: ParallelContext
) -> GPTModel:
    seed_everything(context, 1234)
    return GPTModel(
        transformer_config,
        spec,
        vocab_size=64,
        max_sequence_length=S,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
        pg_collection=context.pgs,
    )


MODELS: list[dict[str, Any]] = [
    {},
    {"normalization": "LayerNorm", "add_bias_linear": True},
    {"qk_layernorm": True, "gated_linear_unit": True},
    {"mtp_num_layers": 2},
    {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8},
]


@pytest.mark.parametrize("changes", MODELS)
@ranks()
def test_starts_with_the_weights_of_cores_spec(context: ParallelContext, changes: Any) -> None:
    transformer_config = config(**changes)
    theirs_spec = get_gpt_decoder_block_spec(
        transformer_config, False, normalization=transformer_config.normalization
    )
    theirs_mtp = ours_mtp = None
    if transformer_config.mtp_num_layers:
        theirs_mtp = get_gpt_mtp_block_spec(
            transformer_config, theirs_spec, use_transformer_engine=False
        )
        ours_mtp = mtp_block_spec(transformer_config, impl="torch")
    theirs = gpt(transformer_config, theirs_spec, theirs_mtp, context)
    ours = gpt(transformer_config, layer_spec(transformer_config, impl="torch"), ours_mtp, context)
    expected = dict(theirs.named_parameters())
    got = dict(ours.named_parameters())
    assert list(got) == list(expected)
    for name, parameter in got.items():
        assert torch.equal(parameter, expected[name]), name
    ids = torch.arange(S)[None]
    if not transformer_config.num_moe_experts:  # core's own router needs Transformer Engine
        mine, other = (model(ids, ids, None, labels=ids + 1) for model in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=0)


@ranks()
def test_checkpoints_carry_the_names_of_megatron_cores_local_spec(context: ParallelContext) -> None:
    transformer_config = config()
    specs = (
        layer_spec(transformer_config, impl="torch"),
        get_gpt_decoder_block_spec(transformer_config, False, normalization="RMSNorm"),
    )
    ours, theirs = (gpt(transformer_config, x, None, context).sharded_state_dict() for x in specs)
    assert {k: v.key for k, v in ours.items()} == {k: v.key for k, v in theirs.items()}
    keys = {v.key for v in ours.values()}
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in keys
    experts = config(num_moe_experts=2)
    model = gpt(experts, layer_spec(experts, impl="torch"), None, context)
    keys = {entry.key for entry in model.sharded_state_dict().values()}
    assert "decoder.layers.pre_mlp_layernorm.weight" in keys


@ranks()
def test_a_block_is_made_of_our_modules(context: ParallelContext) -> None:
    transformer_config = config(num_moe_experts=2, moe_layer_freq=[0, 1], normalization="LayerNorm")
    block = torch_block(transformer_config, context)
    kinds = [type(module) for module in block.modules()]
    assert kinds.count(DotProductAttention) == LAYERS
    assert kinds.count(LayerNorm) == 2 * LAYERS + 1
    assert kinds.count(RMSNorm) == 0
    assert kinds.count(Router) == 1 and kinds.count(TopKRouter) == 0
    assert not hasattr(block.layers[0].mlp, "router") and hasattr(block.layers[1].mlp, "router")


@pytest.mark.parametrize("part", ["proj_bias", "mlp_bias"])
@ranks()
def test_a_part_of_a_layer_may_have_the_only_bias(context: ParallelContext, part: str) -> None:
    """Dense MLPs are meant, and no experts."""
    moe = {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8}
    changes: dict[str, Any] = {**moe, part: True}
    block = torch_block(StepTransformerConfig(**{**SMALL, **changes}), context)
    found = {name for name, _ in block.named_parameters() if name.endswith("bias")}
    assert (
        found
        == {
            "proj_bias": {f"layers.{n}.self_attention.linear_proj.bias" for n in range(2)},
            "mlp_bias": {f"layers.0.mlp.linear_{n}.bias" for n in ("fc1", "fc2")},
        }[part]
    )


@ranks()
def test_recomputed_mlps_add_their_own_bias(context: ParallelContext) -> None:
    found = []
    for modules in (None, ["mlp"]):
        transformer_config = config(
            add_bias_linear=True,
            recompute_granularity="selective" if modules else None,
            recompute_modules=modules,
        )
        block = torch_block(transformer_config, context)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(S, B, H, generator=generator).requires_grad_()
        output = block(x, None)
        output.square().sum().backward()
        found.append([output.detach(), x.grad, *(p.grad for p in block.parameters())])
    for plainly, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plainly)


@ranks()
def test_prediction_depths_are_like_the_last_layer(context: ParallelContext) -> None:
    for pattern in ([0, 1], [1, 0]):
        changes = {"num_moe_experts": 2, "moe_layer_freq": pattern, "mtp_num_layers": 1}
        spec: Any = mtp_block_spec(config(**changes), impl="torch")
        (depth,) = spec.layer_specs
        layer = getattr(depth.submodules, MTP_LAYER)
        assert (moe_submodules(layer.submodules.mlp) is not None) is bool(pattern[-1])


@ranks(pp=2, vpp=2)
def test_each_virtual_stage_gets_its_layers(context: ParallelContext) -> None:
    transformer_config = config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        num_moe_experts=2,
        moe_layer_freq=[0, 0, 1, 1],
    )
    for stage in (0, 1):
        spec = layer_spec(transformer_config, impl="torch", vp_stage=stage)
        (layer,) = spec.layer_specs
        is_moe = moe_submodules(layer.submodules.mlp) is not None
        assert is_moe is (stage == 1)


def test_the_frequency_says_which_layers_hold_experts() -> None:
    assert layer_kinds(config()) == ["*-", "*-"]
    every_other = config(num_layers=5, num_moe_experts=2, moe_layer_freq=2)
    assert layer_kinds(every_other) == ["*E", "*-", "*E", "*-", "*E"]
    listed = config(num_moe_experts=2, moe_layer_freq=[1, 0])
    assert layer_kinds(listed) == ["*E", "*-"]
    listed.moe_layer_freq = [1, 0, 1]
    with pytest.raises(ConfigError, match="`--moe-layer-freq` has 3 entries, but must have one"):
        layer_kinds(listed)


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
@ranks()
def test_recomputation_that_needs_transformer_engine_is_refused(context: ParallelContext) -> None:
    transformer_config = config(recompute_granularity="selective", recompute_modules=["layernorm"])
    with pytest.raises(ConfigError, match="`--recompute-modules layernorm` needs Transformer Eng"):
        layer_spec(transformer_config, impl="torch")
    # The modules have an effect only with selective recomputation.
    layer_spec(config(recompute_modules=["layernorm"]), impl="torch")
