"""D34: the layers of megatron-core that need no Transformer Engine refuse two kinds of layout."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention as CoreAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_ext.layers import specs as layers
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.moe import Router, mark_experts
from megatron_ext.layers.pointwise import Norm
from megatron_ext.layers.specs import has_transformer_engine
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.step import gpt_forward_step
from tests.layers import plain
from tests.layers.test_layers import check_block, local_part, torch_block
from tests.layers.test_moe import E, H, S, config, plain_auxiliary, router_of, switches
from tests.numerics.stock import gpt_chunk, gpt_config, whole_batch
from tests.ranks import on_ranks, ranks
from tests.training_runs import TINY, curve, mock_data, train, train_steps


def small_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **changes)


@ranks(cp=2)
def test_d34_attention_under_context_parallelism(context: ParallelContext) -> None:
    transformer_config = small_config(context_parallel_size=2)
    words = (1, AttnMaskType.causal, "self")
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        CoreAttention(transformer_config, *words, pg_collection=context.pgs)
    DotProductAttention(transformer_config, *words, pg_collection=context.pgs)
    check_block(context)


@ranks(tp=2)
def test_d34_norms_under_sequence_parallelism(context: ParallelContext) -> None:
    transformer_config = small_config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        WrappedTorchNorm(transformer_config, 16)
    assert [p.sequence_parallel for p in Norm(transformer_config, 16).parameters()] == [True, True]
    check_block(context, sequence_parallel=True)


SEQUENCES = 8
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TO_VARY = ("--use-cpu-initialization", "--disable-bias-linear", "--use-distributed-optimizer")
WITHOUT_TE = pytest.mark.skipif(has_transformer_engine(), reason="the name exists with TE")


class StockRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router; `gating` alone is ours, because core's needs Transformer Engine."""

    gating = Router.gating


def share(
    context: ParallelContext, cls: type[TopKRouter], kind: str, *, micro_batch: int, targets: int
) -> float:
    """Return the gradient of an auxiliary loss after a step, as a share of the truth.

    The truth is the mean over all micro-batches in double precision. The gradient passes through
    megatron-core's data-parallel wrapper and `finalize_model_grads`, as in a run.
    """
    hidden = torch.randn(S, SEQUENCES, H, generator=torch.Generator().manual_seed(6))
    batches = hidden.split(micro_batch, dim=1)
    scale = AuxiliaryScale(torch.tensor(targets / len(batches)))
    router, full = router_of(context, cls, scale, **switches(kind))
    model = DistributedDataParallel(router.config, DistributedDataParallelConfig(), router)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    for batch in batches:
        own = local_part(batch, context, sequence_parallel=router.config.sequence_parallel)
        (0 * model(own)[0].sum()).backward()
    local_targets = torch.tensor([targets // context.pgs.dp_cp.size()], dtype=torch.int)
    finalize_model_grads([model], local_targets)

    weight = full.double().requires_grad_()
    losses = [plain_auxiliary(kind, batch.double(), weight) for batch in batches]
    (truth,) = torch.autograd.grad(torch.stack(losses).mean(), weight)
    gradient = router.weight.main_grad.double()
    ratio = float((gradient * truth).sum() / truth.square().sum())
    assert float((gradient - ratio * truth).norm()) <= 1e-4 * max(ratio, 1.0) * float(truth.norm())
    return ratio


def check_both(context: ParallelContext, kind: str, stock: float, **step: int) -> None:
    assert share(context, StockRouter, kind, **step) == pytest.approx(stock, rel=1e-4)
    assert share(context, Router, kind, **step) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["aux_loss", "z_loss"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=["context", "sequence"])
def test_d01_parallel_ranks_do_not_shrink_auxiliary_losses(layout: Any, kind: str) -> None:
    step = {"micro_batch": 1, "targets": S * SEQUENCES}
    on_ranks(check_both, layout, kind=kind, stock=0.5, **step)


@pytest.mark.parametrize("kind", ["aux_loss", "z_loss"])
@ranks()
def test_d02_masked_targets_do_not_make_auxiliary_losses_grow(
    context: ParallelContext, kind: str
) -> None:
    check_both(context, kind, 2.0, micro_batch=1, targets=S * SEQUENCES // 2)


@pytest.mark.parametrize(("micro_batch", "stock"), [(1, 1.0), (4, 0.25)])
@ranks()
def test_d03_the_micro_batch_size_does_not_shrink_the_loss_of_sequences(
    context: ParallelContext, micro_batch: int, stock: float
) -> None:
    check_both(context, "seq_aux_loss", stock, micro_batch=micro_batch, targets=S * SEQUENCES)


@ranks()
def test_d28_a_step_without_targets_has_no_auxiliary_gradient(context: ParallelContext) -> None:
    """Core divides by nothing and keeps the factor: as many times too much as there are tokens."""
    stock = share(context, StockRouter, "aux_loss", micro_batch=1, targets=0)
    assert stock == pytest.approx(S * SEQUENCES, rel=1e-4)
    assert share(context, Router, "aux_loss", micro_batch=1, targets=0) == 0.0


@WITHOUT_TE
@ranks()
def test_d25_the_router_works_without_transformer_engine(context: ParallelContext) -> None:
    hidden = torch.randn(S, 1, H)
    with pytest.raises(NameError, match="te_general_gemm"):
        TopKRouter(config(context), pg_collection=context.pgs)(hidden)
    router = Router(config(context), pg_collection=context.pgs)
    truth = hidden.double() @ router.weight.double().T
    torch.testing.assert_close(router.gating(hidden).double(), truth, rtol=1e-5, atol=1e-6)


@ranks()
def test_d26_stock_masks_an_expert_instead_of_a_padded_token(context: ParallelContext) -> None:
    transformer_config = config(
        context, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"
    )
    router = StockRouter(transformer_config, pg_collection=context.pgs)
    routing = torch.ones(E, E, dtype=torch.bool)
    padded = torch.arange(E) == 1
    router._apply_expert_bias(routing, padded)
    # All but one of the tokens chose every expert.
    assert router.local_tokens_per_expert.tolist() == [4.0, 0.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="must match"):
        router._apply_expert_bias(torch.ones(E + 1, E, dtype=torch.bool), torch.zeros(E + 1) > 0)


EXPERTS = (
    f"--num-experts {E} --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-token-dispatcher-type alltoall"
).split()


@ranks()
def test_d13_d26_no_router_is_given_padding(context: ParallelContext) -> None:
    """Samples are full, so that decoder and MTP experts route and count the same positions."""
    run = gpt_config(*EXPERTS, "--mtp-num-layers", "1")
    chunk = gpt_chunk(run, context)
    routers = {n: m for n, m in chunk.named_modules() if isinstance(m, Router)}
    seen: dict[str, Tensor | None] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)

        return hook

    for name, router in routers.items():
        router.register_forward_pre_hook(keep(name), with_kwargs=True)
    batch = whole_batch(run)
    targets = batch.loss_weights.sum()
    counts = StepCounts(targets, targets, torch.stack([batch.mtp_loss_weights[0].sum()]), 1)
    gpt_forward_step(run, batch, chunk, counts)
    assert sum("mtp" in name for name in routers) == 1 and len(routers) == 3
    assert seen == dict.fromkeys(routers)
    for name, router in routers.items():
        assert float(router.local_tokens_per_expert.sum()) == 2 * batch.tokens.numel(), name


@ranks()
def test_d27_stock_sizes_the_log_otherwise_without_experts(context: ParallelContext) -> None:
    transformer_config = config(context, num_layers=4, mtp_num_layers=1, **switches("aux_loss"))
    router = StockRouter(transformer_config, pg_collection=context.pgs)
    router.set_layer_number(4)
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    tracker.clear()
    router(torch.randn(S, 1, H))
    with_experts = tracker["load_balancing_loss"]["values"].numel()
    tracker.clear()
    size = {"num_layers": 4, "mtp_num_layers": 1, "pg_collection": context.pgs}
    names = ["load_balancing_loss"]
    moe_utils.track_moe_metrics(1.0, 1, force_initialize=True, track_names=names, **size)
    without = tracker["load_balancing_loss"]["values"].numel()
    moe_utils.clear_aux_losses_tracker()
    assert (with_experts, without) == (5, 4)


def test_d27_a_stage_without_experts_logs_what_one_rank_logs(tmp_path: Path) -> None:
    flags = [*TINY, *mock_data(), "--num-experts", "4", "--moe-router-topk", "2"]
    flags += "--moe-layer-freq [0,0,1,1] --moe-aux-loss-coeff 0.01 --mtp-num-layers 1".split()
    train([*flags, "--train-iters", "1"], tmp_path / "start")
    flags += ["--train-iters", "2", "--load", str(tmp_path / "start"), "--finetune"]
    rows = train_steps(flags, tmp_path / "one")
    mine = train_steps([*flags, "--pipeline-model-parallel-size", "2"], tmp_path / "two", ranks=2)
    for row, want in zip(mine, rows, strict=True):
        for key in ("load_balancing_loss", "mtp_1 loss", "lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=1e-6), (key, row[key], want[key])


@ranks()
def test_d01_d02_d03_d28_transformer_engines_layers_have_our_router(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--transformer-impl transformer_engine` takes core's spec, whose router is core's.

    Core's local spec stands in for the one that needs Transformer Engine; both name the router.
    """

    def local_spec(transformer_config: StepTransformerConfig, _use_te: bool, **words: Any) -> Any:
        return get_gpt_decoder_block_spec(transformer_config, False, **words)

    monkeypatch.setattr(layers, "gpt_specs", SimpleNamespace(get_gpt_decoder_block_spec=local_spec))
    experts = {"num_moe_experts": E, "moe_aux_loss_coeff": 0.01, "calculate_per_token_loss": True}
    size = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2}
    transformer_config = StepTransformerConfig(**size, **experts)
    (layer,) = layers.layer_spec(transformer_config, impl="transformer_engine").layer_specs
    assert layer.submodules.mlp.submodules.router is Router


def wrong_expert_gradients(context: ParallelContext, *, marked: bool, **changes: Any) -> set[str]:
    """Return parameters of experts whose gradient is not the sum over the ranks with copies.

    The truth adds up what autograd gives each rank, over the ranks that hold the same expert.
    """
    transformer_config = config(context, calculate_per_token_loss=True, **changes)
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
    if marked:
        mark_experts(block, context.pgs)
    full = torch.randn(S, 2, H, generator=torch.Generator().manual_seed(3))
    own = local_part(full, context, sequence_parallel=True)

    def backward(model: torch.nn.Module) -> None:
        output = model(own.clone().requires_grad_(), None)
        output.square().sum().backward()

    backward(block)
    truth = {}
    for name, parameter in block.named_parameters():
        if "local_experts" in name and parameter.grad is not None:
            truth[name] = parameter.grad.clone()
            torch.distributed.all_reduce(truth[name], group=context.pgs.expt_dp)
        parameter.grad = None
    ddp = DistributedDataParallelConfig()
    model = DistributedDataParallel(transformer_config, ddp, block, pg_collection=context.pgs)
    backward(model)
    finalize_model_grads([model], torch.tensor([1], dtype=torch.int), pg_collection=context.pgs)
    wrong = set()
    for name, want in truth.items():
        got = block.get_parameter(name).main_grad
        if float((got - want).norm()) > 1e-4 * float(want.norm()):
            wrong.add(name.partition("local_experts.")[2].partition(".")[2])
    return wrong


@ranks(tp=2, etp=1)
def test_d35_whole_experts_sum_gradients_over_their_copies(context: ParallelContext) -> None:
    both = {"linear_fc1.weight", "linear_fc2.weight"}
    assert wrong_expert_gradients(context, marked=False) == both
    assert wrong_expert_gradients(context, marked=True) == set()


@ranks(tp=2, ep=2, etp=1)
def test_d36_biases_of_other_experts_are_not_summed(context: ParallelContext) -> None:
    stock = wrong_expert_gradients(context, marked=False, add_bias_linear=True)
    assert stock == {"linear_fc2.bias"}
    assert wrong_expert_gradients(context, marked=True, add_bias_linear=True) == set()


def test_d35_d36_runs_log_the_same_however_experts_are_shared(tmp_path: Path) -> None:
    """Steps are clipped and have biases, with and without the distributed optimizer."""
    tiny = [word for word in TINY if word not in TO_VARY]
    flags = [*tiny, *mock_data(), *"--num-experts 4 --num-layers 2 --train-iters 2".split()]
    truth = train_steps(flags, tmp_path / "one")
    for words in ("--expert-model-parallel-size 2", "--use-distributed-optimizer"):
        more = f"{TP2} --expert-tensor-parallel-size 1 --check-invariants 1 {words}".split()
        rows = train_steps([*flags, *more], tmp_path / words.split()[0], ranks=2)
        for row, want in zip(rows, truth, strict=True):
            for key in ("lm loss", "grad_norm"):
                assert row[key] == pytest.approx(want[key], rel=1e-5), (words, key)


@pytest.mark.parametrize(
    ("balancing", "ranks", "more", "equal"),
    [
        ("aux_loss", 2, "", True),
        ("aux_loss", 1, "--micro-batch-size 4", False),
        ("global_aux_loss", 2, "", False),
    ],
)
def test_what_load_balancing_depends_on(
    balancing: str, ranks: int, more: str, equal: bool, tmp_path: Path
) -> None:
    """docs/numerics.md says so under "What is not invariant"."""
    flags = [*TINY, *mock_data(), *"--num-experts 4 --num-layers 2 --train-iters 2".split()]
    flags += ["--moe-router-load-balancing-type", balancing, "--moe-aux-loss-coeff", "1"]
    one = [norm for _, norm in curve(flags, tmp_path / "one")]
    other = [norm for _, norm in curve([*flags, *more.split()], tmp_path / "other", ranks)]
    assert (other == pytest.approx(one, rel=1e-5)) is equal
