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
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megatron_ext.core import moe_submodules
from megatron_ext.extras.audit import reproduce_layers
from megatron_ext.extras.audit import reproduce_router as stock
from megatron_ext.extras.audit.reproduce_router import (
    LENGTH,
    SEQUENCES,
    auxiliary_flags,
    auxiliary_share,
    stock_router,
)
from megatron_ext.layers import specs as layers
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.expert_parameters import mark_experts
from megatron_ext.layers.moe import Router
from megatron_ext.layers.norms import Norm
from megatron_ext.layers.specs import has_transformer_engine
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.step import gpt_forward_step
from tests.layers import plain
from tests.layers.test_layers import check_block, local_part, torch_block
from tests.layers.test_moe import E, H, S, config
from tests.numerics.reproductions import RELEASE, check_ratio
from tests.numerics.stock import gpt_chunk, gpt_config, whole_batch
from tests.ranks import on_ranks, ranks
from tests.training_runs import TINY, curve, mock_data, train, train_steps


def small_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **changes)


def test_d34_stock_refuses_two_layouts_without_transformer_engine() -> None:
    found = check_ratio(reproduce_layers.d34, {"0.16": math.nan, "0.19": math.nan})
    assert "only supported by TEDotProductAttention" in found.what
    assert "sequence parallel not supported by torch LayerNorm" in found.what


@ranks(cp=2)
def test_d34_attention_under_context_parallelism(context: ParallelContext) -> None:
    transformer_config = small_config(context_parallel_size=2)
    words = (1, AttnMaskType.causal, "self")
    DotProductAttention(transformer_config, *words, pg_collection=context.pgs)
    check_block(context)


@ranks(tp=2)
def test_d34_norms_under_sequence_parallelism(context: ParallelContext) -> None:
    transformer_config = small_config(tensor_model_parallel_size=2, sequence_parallel=True)
    assert [p.sequence_parallel for p in Norm(transformer_config, 16).parameters()] == [True, True]
    check_block(context, sequence_parallel=True)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TO_VARY = ("--use-cpu-initialization", "--disable-bias-linear", "--use-distributed-optimizer")
WITHOUT_TE = pytest.mark.skipif(has_transformer_engine(), reason="the name exists with TE")


def our_share(context: ParallelContext, kind: str, micro_batch: int, targets: int) -> float:
    """Return the gradient of an auxiliary loss of our router as a multiple of the right one."""
    options: dict[str, Any] = {
        "calculate_per_token_loss": True,
        "auxiliary_scale": AuxiliaryScale(torch.tensor(targets * micro_batch / SEQUENCES)),
        **auxiliary_flags(kind),
    }
    ours = Router(config(context, **options), pg_collection=context.pgs)
    ours.set_layer_number(1)
    return auxiliary_share(context, ours, kind, micro_batch=micro_batch, targets=targets)


def check_ours(context: ParallelContext, **step: Any) -> None:
    assert our_share(context, **step) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["aux_loss", "z_loss"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=["context", "sequence"])
def test_d01_parallel_ranks_do_not_shrink_auxiliary_losses(layout: Any, kind: str) -> None:
    on_ranks(check_ours, layout, kind=kind, micro_batch=1, targets=LENGTH * SEQUENCES)


def test_d01_stock_shrinks_auxiliary_losses_by_the_ranks() -> None:
    found = check_ratio(stock.parallel_ranks, {"0.16": 0.5, "0.19": 1.0})
    others = f"size 2 {found.stock:.4f}, of the z-loss {found.stock:.4f}"
    assert others in found.what


@pytest.mark.parametrize("kind", ["aux_loss", "z_loss"])
@ranks()
def test_d02_masked_targets_do_not_make_auxiliary_losses_grow(
    context: ParallelContext, kind: str
) -> None:
    check_ours(context, kind=kind, micro_batch=1, targets=LENGTH * SEQUENCES // 2)


def test_d02_stock_lets_auxiliary_losses_grow_with_the_masked_targets() -> None:
    found = check_ratio(stock.masked_targets, {"0.16": 2.0, "0.19": 2.0})
    assert f"of the z-loss {found.stock:.4f}" in found.what


@pytest.mark.parametrize("micro_batch", [1, 4])
@ranks()
def test_d03_the_micro_batch_size_does_not_shrink_the_loss_of_sequences(
    context: ParallelContext, micro_batch: int
) -> None:
    step = {"micro_batch": micro_batch, "targets": LENGTH * SEQUENCES}
    check_ours(context, kind="seq_aux_loss", **step)


def test_d03_stock_divides_the_loss_of_sequences_by_the_micro_batch_size() -> None:
    found = check_ratio(stock.sequences_of_a_micro_batch, {"0.16": 0.25, "0.19": 1.0})
    assert "with 1 sequence 1.0000" in found.what


@ranks()
def test_d28_a_step_without_targets_has_no_auxiliary_gradient(context: ParallelContext) -> None:
    assert our_share(context, "aux_loss", micro_batch=1, targets=0) == 0.0


def test_d28_stock_keeps_the_factor_of_a_step_without_targets() -> None:
    """Core divides by nothing: as many times too much as there are tokens."""
    found = check_ratio(stock.no_targets, {"0.16": math.inf, "0.19": math.inf})
    assert found.stock == pytest.approx(LENGTH * SEQUENCES, rel=1e-4)


@WITHOUT_TE
@ranks()
def test_d25_the_router_works_without_transformer_engine(context: ParallelContext) -> None:
    hidden = torch.randn(S, 1, H)
    ours = Router(config(context), pg_collection=context.pgs)
    truth = hidden.double() @ ours.weight.double().T
    torch.testing.assert_close(ours.gating(hidden).double(), truth, rtol=1e-5, atol=1e-6)


@WITHOUT_TE
def test_d25_stock_needs_a_name_of_transformer_engine() -> None:
    found = check_ratio(
        stock.router_without_transformer_engine, {"0.16": math.nan, "0.19": 1.0}, rel=1e-6
    )
    assert math.isnan(found.stock) == ("te_general_gemm" in found.what)


def test_d26_stock_masks_an_expert_instead_of_a_padded_token() -> None:
    check_ratio(stock.padding_of_the_expert_bias, {"0.16": 0.0, "0.19": 0.0})


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


def test_d27_stock_sizes_the_log_otherwise_without_experts() -> None:
    check_ratio(stock.log_without_experts, {"0.16": 4 / 5, "0.19": 1.0})


@pytest.mark.slow
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
    assert moe_submodules(layer.submodules.mlp).router is Router


def wrong_expert_gradients(context: ParallelContext, **changes: Any) -> set[str]:
    """Return parameters of experts whose gradient is not the sum over the ranks with copies.

    The truth adds up what autograd gives each rank, over the ranks that hold the same expert.
    """
    transformer_config = config(context, calculate_per_token_loss=True, **changes)
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
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


def test_d35_stock_sums_gradients_of_whole_experts_over_the_wrong_ranks() -> None:
    check_ratio(reproduce_layers.d35, {"0.16": 0.53396, "0.19": 1.0})


def test_d36_stock_sums_the_biases_of_different_experts() -> None:
    check_ratio(reproduce_layers.d36, {"0.16": 1.76581, "0.19": 1.76581})


def test_stock_rounds_a_routers_scores_before_it_chooses_on_older_releases() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4096, 64).bfloat16()
    _, chosen = topk_routing_with_score_function(logits, 8, score_function="sigmoid")[:2]
    best = torch.sigmoid(logits.float()).topk(8).indices
    other = (chosen != torch.zeros_like(chosen).scatter(1, best, True)).any(1)
    share = {"0.16": 0.052, "0.19": 0.0}[RELEASE]
    assert float(other.float().mean()) == pytest.approx(share, abs=5e-3)


def test_d37_stock_recomputes_an_mlp_with_biases_without_end() -> None:
    """Pieces that do not divide the layers are an error in 0.16 alone."""
    found = check_ratio(reproduce_layers.d37, {"0.16": math.nan, "0.19": math.nan})
    assert "--recompute-modules mlp ends with EndlessError" in found.what
    assert "multi-token prediction in pieces of two: AssertionError" in found.what
    assert ("3 layers in pieces of two: IndexError" in found.what) is (RELEASE == "0.16")


@ranks(tp=2, etp=1)
def test_d35_whole_experts_sum_gradients_over_their_copies(context: ParallelContext) -> None:
    assert wrong_expert_gradients(context) == set()


@ranks(tp=2, ep=2, etp=1)
def test_d36_biases_of_other_experts_are_not_summed(context: ParallelContext) -> None:
    assert wrong_expert_gradients(context, add_bias_linear=True) == set()


@pytest.mark.slow
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


def test_d42_stock_counts_the_norm_of_compressed_queries_on_each_rank() -> None:
    check_ratio(reproduce_layers.d42, {"0.16": 2.0, "0.19": 2.0})


def test_d43_stock_rounds_the_tokens_of_an_expert_to_16_bits() -> None:
    check_ratio(stock.counts_in_16_bits, {"0.16": 4160 / 4748, "0.19": 4256 / 4849})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(dp=2)
def test_d43_biases_step_by_the_tokens_of_the_whole_step(
    context: ParallelContext, dtype: torch.dtype
) -> None:
    """Two replicas count tokens of their own; a bias is loaded as it was saved."""
    in_16_bits = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    router = stock_router(context, Router, **stock.BIAS, **in_16_bits, params_dtype=dtype)
    chunk = Float16Module(router.config, router)
    saved = torch.tensor([0.1, 0.2, 0.3001, -0.1234567])
    router.load_state_dict({"weight": router.weight, "expert_bias": saved})
    assert torch.equal(router.expert_bias, saved)
    model = DistributedDataParallel(router.config, DistributedDataParallelConfig(), chunk)
    generator = torch.Generator().manual_seed(context.dp_rank)
    counts = torch.zeros(stock.EXPERTS, dtype=torch.long)
    for _ in range(300):
        hidden = torch.randn(24, 1, stock.HIDDEN, generator=generator).to(dtype)
        probs, chosen = model(hidden)
        (0 * probs.sum()).backward()
        counts += chosen.reshape(-1, stock.EXPERTS).sum(0)
    assert router.local_tokens_per_expert.tolist() == counts.tolist()
    torch.distributed.all_reduce(counts)
    finalize_model_grads([model], torch.tensor([1], dtype=torch.int))
    step = 1e-3 * torch.sign(counts.sum() / stock.EXPERTS - counts)
    torch.testing.assert_close(router.expert_bias, saved + step, rtol=0, atol=0)
