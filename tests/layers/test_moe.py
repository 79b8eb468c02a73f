"""Experts in every layout against plain arithmetic, and the weight of the auxiliary losses."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ext import core
from megatron_ext.extras.audit.reproduce_router import (
    COEFFICIENT,
    auxiliary_flags,
    auxiliary_loss,
)
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.dropout import microbatch_masks, uniform
from megatron_ext.layers.expert_parameters import mark_experts
from megatron_ext.layers.moe import ExpertChoice, Router
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.auxiliary_losses import take_auxiliary_losses
from tests.layers import plain
from tests.layers.test_layers import FFN, SMALL, B, H, S, local_part, near, torch_block
from tests.ranks import on_ranks, ranks

E, TOPK, SHARED = 4, 2, 8
DISPATCHERS = ["allgather", "alltoall"]


def config(context: ParallelContext, **changes: Any) -> StepTransformerConfig:
    base: dict[str, Any] = dict(
        SMALL,
        num_layers=1,
        num_moe_experts=E,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        tensor_model_parallel_size=context.pgs.tp.size(),
        sequence_parallel=context.pgs.tp.size() > 1,
        context_parallel_size=context.pgs.cp.size(),
        expert_model_parallel_size=context.pgs.ep.size(),
        expert_tensor_parallel_size=context.pgs.expt_tp.size(),
    )
    return StepTransformerConfig(**{**base, **changes})


def check_block(context: ParallelContext, **changes: Any) -> None:
    """Check a layer of experts: each replica has a batch of its own, the loss is a sum."""
    transformer_config = config(context, **changes)
    shared = transformer_config.moe_shared_expert_intermediate_size or 0
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
    truth = plain.PlainBlock(H, 4, 2, FFN, 1, experts=E, topk=TOPK, shared_ffn=shared)
    split = transformer_config.sequence_parallel
    for replica in range(context.pgs.dp.size()):
        generator = torch.Generator().manual_seed(replica)
        full = torch.randn(S, B, H, generator=generator)
        cotangent = torch.randn(S, B, H, generator=generator)
        plain_input = full.double().requires_grad_()
        want = truth(plain_input, plain.causal(S, B))
        want.backward(cotangent.double())
        if replica == context.dp_rank:
            own = local_part(full, context, sequence_parallel=split).clone().requires_grad_()
            out = block(own, None)
            out.backward(local_part(cotangent, context, sequence_parallel=split))
            near(out, local_part(want, context, sequence_parallel=split), "output")
            near(own.grad, local_part(plain_input.grad, context, sequence_parallel=split), "in")
    check_gradients(block, truth, context)


def check_gradients(
    block: torch.nn.Module, truth: plain.PlainBlock, context: ParallelContext
) -> None:
    pgs = context.pgs
    for name, parameter in block.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if "local_experts" in name:
            torch.distributed.all_reduce(grad, group=pgs.expt_dp)
        else:
            torch.distributed.all_reduce(grad, group=pgs.dp_cp)
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(grad, group=pgs.tp)
        shard = plain.shard_of(name, parameter, context, E)
        full = truth.weights[shard.name].grad
        near(grad, shard.of(full), name)


LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "expert parallel": {"dp": 2, "ep": 2},
    "tensor and sequence parallel": {"tp": 2},
    "whole experts on tensor-parallel ranks": {"tp": 2, "ep": 2, "etp": 1},
    "context parallel": {"dp": 2, "cp": 2, "ep": 2},
    # The parts of an expert get unequal numbers of tokens, which Gloo cannot gather.
    "experts dealt out and cut": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_plain_torch_computes(layout: str, dispatcher: str) -> None:
    on_ranks(check_block, LAYOUTS[layout], moe_token_dispatcher_type=dispatcher)


@pytest.mark.parametrize("policy", ["probs", "position"])
@ranks(tp=2)
def test_dispatchers_agree_where_tokens_are_dropped(context: ParallelContext, policy: str) -> None:
    """Each tensor-parallel rank drops its own, so that unequal numbers are left."""
    full = torch.randn(S, B, H, generator=torch.Generator().manual_seed(5))
    found = []
    for dispatcher in DISPATCHERS:
        transformer_config = config(
            context,
            moe_token_dispatcher_type=dispatcher,
            moe_expert_capacity_factor=0.5,
            moe_token_drop_policy=policy,
        )
        block = torch_block(transformer_config, context)
        plain.fill(block, context, E)
        own = local_part(full, context, sequence_parallel=True).clone().requires_grad_()
        output = block(own, None)
        output.square().sum().backward()
        gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        found.append({"output": output, "input": own.grad, **gradients})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        near(found[1][name], value, name, tolerance=1e-5)


@pytest.mark.parametrize("modules", [None, ["moe"], ["core_attn", "shared_experts"]])
@ranks(tp=2)
def test_recomputed_shared_experts(context: ParallelContext, modules: list[str] | None) -> None:
    check_block(
        context,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=SHARED,
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules,
    )


@ranks(tp=2)
def test_shared_experts_beside_the_communication(context: ParallelContext) -> None:
    check_block(
        context,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=SHARED,
        moe_shared_expert_overlap=True,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
@pytest.mark.parametrize("biased", [False, True])
@ranks()
def test_logits_come_in_the_routers_dtype(
    context: ParallelContext, name: str | None, dtype: torch.dtype, biased: bool
) -> None:
    transformer_config = config(
        context,
        moe_router_dtype=name,
        params_dtype=torch.bfloat16,
        bf16=True,
        add_bias_linear=biased,
    )
    router = Router(transformer_config, pg_collection=context.pgs)
    x = torch.randn(S, B, H).bfloat16()
    bias = torch.zeros(E)
    if biased:
        bias = torch.arange(1.0, E + 1)
        router.bias.data.copy_(bias)
    logits = router.gating(x)
    assert logits.dtype == dtype
    want = x.double() @ router.weight.double().T + bias
    torch.testing.assert_close(logits.double(), want, rtol=1e-2, atol=1e-2)


@ranks()
def test_jitter_is_even_noise_around_1_and_only_in_training(context: ParallelContext) -> None:
    eps = 0.25
    given = {"moe_input_jitter_eps": eps, "deterministic_dropout": True}
    router = Router(config(context, **given), pg_collection=context.pgs)
    router.set_layer_number(3)
    x = torch.randn(S, B, H)
    with microbatch_masks(7, 40):
        drawn = [uniform("router 3", sample, (S, H), x.device) for sample in range(B)]
        found = router.apply_input_jitter(x)
        assert router.eval().apply_input_jitter(x) is x
    noise = torch.stack(drawn, dim=1)
    torch.testing.assert_close(found, x * (1 - eps + 2 * eps * noise))


@ranks()
def test_padding_does_not_count_in_the_z_loss(context: ParallelContext) -> None:
    scale = AuxiliaryScale(torch.tensor(1.0))
    router, _ = router_of(context, Router, scale, **auxiliary_flags("z_loss"))
    logits = torch.randn(6, E, requires_grad=True)
    padding = torch.tensor([False, True, False, False, True, False])
    core.take_auxiliary_losses()
    router.apply_z_loss(logits, padding).sum().backward()
    exact = logits.detach().double().requires_grad_()
    want = exact[~padding].logsumexp(-1).square().mean()
    near(core.take_auxiliary_losses()["z_loss"][0], want.detach(), "log")
    (COEFFICIENT * want + exact.sum()).backward()
    near(logits.grad, exact.grad, "gradient")
    with torch.no_grad():
        assert router.apply_z_loss(logits) is logits
    assert router.eval().apply_z_loss(logits) is logits
    assert not any(values.any() for values in core.take_auxiliary_losses().values())


@ranks()
def test_padded_experts_compute_what_the_kept_tokens_do(context: ParallelContext) -> None:
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(5))
    found = []
    for pads in (False, True):
        transformer_config = config(
            context,
            moe_token_dispatcher_type="alltoall",
            moe_expert_capacity_factor=0.5,
            moe_pad_expert_input_to_capacity=pads,
        )
        block = torch_block(transformer_config, context)
        plain.fill(block, context, E)
        found.append(block(x, None).detach())
    near(found[1], found[0], "output", tolerance=1e-5)


def router_of(
    context: ParallelContext, cls: type[TopKRouter], scale: AuxiliaryScale, **changes: Any
) -> tuple[Any, Tensor]:
    """Return a router, and the weight that it holds, in single precision."""
    changes = {"calculate_per_token_loss": True, "auxiliary_scale": scale, **changes}
    router = cls(config(context, **changes), pg_collection=context.pgs)
    router.set_layer_number(1)
    full = plain.full_weight("router", (E, H)).float()
    with torch.no_grad():
        router.weight.copy_(full)
    return router, full


def check_auxiliary(context: ParallelContext, kind: str, micro_batch: int) -> None:
    """Check that the gradient over N, and the log, are those of the mean over all micro-batches."""
    targets, sequences = 13.0, 8
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(S, sequences, H, generator=generator)
    batches = hidden.split(micro_batch, dim=1)
    dp = context.pgs.dp
    mine = batches[dp.rank() :: dp.size()]
    scale = AuxiliaryScale(torch.tensor(targets / len(batches)))
    flags = {**auxiliary_flags(kind), "mtp_num_layers": 1}
    router, full = router_of(context, Router, scale, **flags)
    # The router of a depth of multi-token prediction logs its losses as those of a further layer.
    deeper, _ = router_of(context, Router, scale, **flags)
    deeper.set_layer_number(2)
    split = router.config.sequence_parallel
    core.take_auxiliary_losses()
    for batch in mine:
        part = local_part(batch, context, sequence_parallel=split)
        deeper(part)
        probs, _ = router(part)
        (0 * probs.sum()).backward()
    gradient = router.weight.grad
    torch.distributed.all_reduce(gradient, group=context.pgs.dp_cp)
    if split:
        torch.distributed.all_reduce(gradient, group=context.pgs.tp)

    weight = full.double().requires_grad_()
    losses = [auxiliary_loss(kind, batch.double(), weight) for batch in batches]
    (wanted,) = torch.autograd.grad(torch.stack(losses).mean(), weight)
    near(gradient / targets, wanted, f"{kind} gradient")

    logged = take_auxiliary_losses(router.config, context, len(mine))
    (mean,) = logged.values()
    near(mean * COEFFICIENT, torch.stack(losses).mean().detach(), f"{kind} log")


def check_global_log(context: ParallelContext) -> None:
    """Check the log of the balance over all replicas: it is that of their batches together."""
    hidden = torch.randn(S, 4, H, generator=torch.Generator().manual_seed(6))
    mine = hidden.chunk(context.pgs.dp.size(), dim=1)[context.dp_rank]
    scale = AuxiliaryScale(torch.tensor(1.0))
    router, full = router_of(context, Router, scale, **auxiliary_flags("global_aux_loss"))
    router(local_part(mine, context, sequence_parallel=router.config.sequence_parallel))
    logged = take_auxiliary_losses(router.config, context, 1)
    wanted = auxiliary_loss("aux_loss", hidden.double(), full.double())
    near(logged["global_load_balancing_loss"] * COEFFICIENT, wanted, "global log")


def check_auxiliaries(context: ParallelContext) -> None:
    for kind in ("aux_loss", "seq_aux_loss", "z_loss"):
        for micro_batch in (1, 4):
            check_auxiliary(context, kind, micro_batch)
    check_global_log(context)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"tp": 2}, {"tp": 2, "dp": 2}])
def test_auxiliary_losses_have_the_gradient_of_their_mean(layout: dict[str, int]) -> None:
    on_ranks(check_auxiliaries, layout)


@ranks()
def test_a_step_without_targets_logs_and_leaves_no_gradient(context: ParallelContext) -> None:
    scale = AuxiliaryScale(torch.tensor(0.0))
    router, _ = router_of(context, Router, scale, **auxiliary_flags("aux_loss"))
    core.take_auxiliary_losses()
    probs, _ = router(torch.randn(S, B, H))
    (0 * probs.sum()).backward()
    assert router.weight.grad is not None and not router.weight.grad.any()
    logged = core.take_auxiliary_losses()["load_balancing_loss"]
    assert torch.isfinite(logged).all() and logged[0] > 0


@ranks(tp=2, etp=1)
def test_biases_of_whole_experts_count_on_every_rank(context: ParallelContext) -> None:
    """Layers of Transformer Engine may say of such a bias that it is not split."""
    block = torch_block(config(context, add_bias_linear=True), context)
    named = [(x, p) for x, p in block.named_parameters() if "local_experts" in x and "fc2.b" in x]
    for _, bias in named:
        bias.tensor_model_parallel = False
    mark_experts(block, context.pgs)
    assert [name for name, bias in named if bias.tensor_model_parallel] == [x for x, _ in named]
    assert len(named) == E


@ranks(tp=2, etp=1)
def test_whole_experts_are_summed_over_their_copies_alone(context: ParallelContext) -> None:
    """Copies of experts are not on the ranks of dense weights, nor on tensor-parallel ones."""
    block = torch_block(config(context, add_bias_linear=True), context)
    assert block.config.sequence_parallel
    mark_experts(block, context.pgs)
    marks = {
        name: (getattr(p, "allreduce", True), getattr(p, "sequence_parallel", False))
        for name, p in block.named_parameters()
    }
    experts = {name: mark for name, mark in marks.items() if "local_experts" in name}
    assert len(experts) == 4 * E and set(experts.values()) == {(False, False)}
    assert all(dense for name, (dense, _) in marks.items() if name not in experts)
    assert marks["final_layernorm.weight"] == (True, True)


@ranks()
def test_a_shared_expert_follows_what_a_step_sets(context: ParallelContext) -> None:
    """Core's shared expert copies its configuration, deeply in newer releases."""
    queue, scale = DeferredWeightGradients(), AuxiliaryScale()
    given = {"weight_gradients": queue, "auxiliary_scale": scale, "num_layers": 1}
    shared = {"moe_shared_expert_intermediate_size": SHARED, "add_bias_linear": False}
    block = torch_block(config(context, **given, **shared), context)
    expert = block.layers[0].mlp.shared_experts
    assert expert.config.auxiliary_scale is scale
    weights = [expert.linear_fc1.weight, expert.linear_fc2.weight]
    with queue.collect((0, 0)):
        block(torch.randn(S, B, H, requires_grad=True), None).sum().backward()
    assert [weight.grad for weight in weights] == [None, None]
    queue.compute((0, 0))
    assert all(weight.grad.norm() > 0 for weight in weights)


@pytest.mark.parametrize("count", [1, 2])
def test_groups_of_experts_are_ranked_by_their_best_scores(count: int) -> None:
    """``count`` 2 is megatron-core's own number here, and 1 is that of DeepSeek-V2."""
    scores = torch.rand(64, 12, generator=torch.Generator().manual_seed(3))
    values, indices = ExpertChoice(count).get_replay_topk(scores, 4, 4, 2)
    for token, row in enumerate(scores.tolist()):
        groups = [sorted(row[3 * g : 3 * g + 3], reverse=True) for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(groups[g][:count]))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        want = sorted(allowed, key=lambda e: -row[e])[:4]
        assert indices[token].tolist() == want
    torch.testing.assert_close(values, scores.gather(1, indices), rtol=0, atol=0)
    _, usual = group_limited_topk(scores, 4, 64, 12, 4, 2)
    assert torch.equal(usual.sort().values, indices.sort().values) == (count == 2)


@pytest.mark.parametrize("groups", [None, 2])
@ranks()
def test_a_bias_on_a_softmax_changes_the_choice_and_not_the_weights(
    context: ParallelContext, groups: int | None
) -> None:
    """The truth is transformers' router of ERNIE 4.5; with groups, that of Mistral 4."""
    from transformers import AutoConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
    from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

    router, _ = router_of(
        context,
        Router,
        AuxiliaryScale(),
        moe_router_pre_softmax=True,
        moe_router_norm_topk_prob=True,
        moe_router_enable_expert_bias=groups is None,
        moe_router_num_groups=groups,
        moe_router_group_topk=groups and 1,
        moe_router_group_scores=groups,
        moe_router_dtype="fp32",
    )
    router.eval()
    sizes = {"hidden_size": H, "num_experts_per_tok": TOPK}
    if groups is None:
        truth = Ernie4_5_MoeTopKRouter(
            AutoConfig.for_model("ernie4_5_moe", moe_num_experts=E, moe_k=TOPK, **sizes)
        )
        bias = 0.3 * torch.randn(E, generator=torch.Generator().manual_seed(1))
        truth.moe_statics.e_score_correction_bias.data.copy_(bias[None])
        router.expert_bias.copy_(bias)
    else:
        truth = Mistral4TopkRouter(
            AutoConfig.for_model(
                "mistral4", n_routed_experts=E, n_group=groups, topk_group=1, norm_topk_prob=True,
                routed_scaling_factor=1.0, num_key_value_heads=32, **sizes,
            )
        )  # fmt: skip
    truth.weight.data.copy_(router.weight)
    hidden = torch.randn(S, B, H, generator=torch.Generator().manual_seed(2))
    probs, chosen = router(hidden)
    _, weights, indices = truth(hidden.flatten(0, 1)[None] if groups else hidden.flatten(0, 1))
    want = torch.zeros_like(probs).scatter(1, indices, weights.to(probs.dtype))
    assert torch.equal(chosen, want > 0)
    torch.testing.assert_close(probs, want, rtol=0, atol=1e-6)
    without = router.weight @ hidden.flatten(0, 1).T
    plain_choice = without.T.topk(TOPK).indices.sort().values
    assert not torch.equal(plain_choice, indices.sort().values)
