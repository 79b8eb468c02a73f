"""Adapters: plain arithmetic on one rank, and every layout trains as one rank does."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor
from torch.func import functional_call

from megatron_ext.config.optimizer import TARGETS
from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect import parity
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.lora import Adapter, merge_adapters, merged_weight_of
from megatron_ext.layers.moe import Router
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import GPT
from tests.layers import plain
from tests.layers.test_mtp_layout import assert_same
from tests.numerics.stock import gpt_chunk, gpt_config, whole_batch
from tests.ranks import ranks
from tests.training_runs import SAME_WEIGHTS, mock_data

LORA = "--lora-rank 4 --lora-alpha 8".split()
APART = "--lora-separate-projections"
CONSTANT = "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --clip-grad 0".split()
STEPS = 3


def bare_chunk(run: RunConfig, context: ParallelContext) -> Any:
    """Build the whole model on this rank; its weights, but not A and B, follow from their names."""
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if ".lora." not in name:
                parameter.copy_(plain.full_weight(name, tuple(parameter.shape)))
    return chunk


def loss_of(model: Any, run: RunConfig) -> Tensor:
    batch = whole_batch(run)
    return model(batch.tokens, batch.position_ids, None, labels=batch.labels).mean()


MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 16 --moe-token-dispatcher-type alltoall"
).split()
LATENT = (
    "--multi-latent-attention --qk-layernorm --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12 --no-rope-fusion"
).split()
DOWN = "linear_q_down_proj linear_kv_down_proj linear_q_up_proj linear_kv_up_proj".split()


class PlainLora:
    """LoRA in plain torch: full weights ``W + scale * B A`` of a model without adapters.

    The gradients of A and B are autograd's through that sum.
    """

    def __init__(self, base: Any, adapters: dict[str, Tensor], scale: float) -> None:
        self.base, self.scale = base, scale
        self.adapters = {k: v.detach().clone().requires_grad_() for k, v in adapters.items()}

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        weights = {name: weight.detach() for name, weight in self.base.named_parameters()}
        for name in [n.removesuffix("lora.a") for n in self.adapters if n.endswith("lora.a")]:
            product = self._product(name, self.adapters[f"{name}lora.a"])
            weights[f"{name}weight"] = weights[f"{name}weight"] + self.scale * product
        output: Tensor = functional_call(self.base, weights, inputs, named)
        return output

    def _product(self, name: str, a: Tensor) -> Tensor:
        """Return B A, where each projection of a layer may have rows of A of its own."""
        b = self.adapters[f"{name}lora.b"]
        if len(a) == b.size(1):
            return b @ a
        config = self.base.config
        head = config.kv_channels
        rows = [config.num_attention_heads // config.num_query_groups * head, head, head]
        if "linear_fc1" in name:
            rows = [len(b) // 2] * 2
        groups = b.split(rows * (len(b) // sum(rows)))
        own = a.split(b.size(1))
        return torch.cat([part @ own[i % len(rows)] for i, part in enumerate(groups)])


def near(got: Tensor, want: Tensor, name: str, tolerance: float = 1e-5) -> None:
    error = (got - want).norm() / want.norm().clamp(min=1e-20)
    assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("targets", "more", "count"),
    [
        (list(TARGETS), [], 4),
        (["linear_qkv", "linear_fc2"], [], 2),
        (list(TARGETS), [APART], 4),
        (["linear_fc1", "experts.linear_fc2"], [APART, *MOE], 4 + 1 + 4),
        (["linear_qkv", "linear_fc1", "linear_fc2"], ["--moe-grouped-gemm", *MOE], 1 + 2 * 5),
        ([*DOWN, "shared_experts.linear_fc1"], [*LATENT, *MOE], 4 + 1),
    ],
)
@ranks()
def test_three_steps_are_those_of_plain_torch(
    context: ParallelContext, targets: list[str], more: list[str], count: int
) -> None:
    run = gpt_config(*LORA, "--lora-target-modules", *targets, *CONSTANT, *more)
    transformer_config = build_transformer_config(run)
    chunk = bare_chunk(run, context)
    before = {k: v.clone() for k, v in chunk.named_parameters() if ".lora." not in k}
    own = dict(chunk.named_parameters())
    base = gpt_chunk(gpt_config(*[word for word in more if word != APART]), context)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            parameter.copy_(own[name])
    truth = PlainLora(base, {k: own[k] for k in own if ".lora." in k}, 2)
    assert len(truth.adapters) == 2 * 2 * count
    reference = torch.optim.AdamW(
        truth.adapters.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)  # sets the learning rate
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(ddp, run)
        loss.backward()
        reference.zero_grad()
        expected = loss_of(truth, run)
        expected.backward()
        near(loss, expected, f"loss of step {step}", 1e-6)
        for name, want in truth.adapters.items():
            near(own[name].main_grad, want.grad, f"{name} of step {step}")
        optimizer.step()
        reference.step()
    for name, want in truth.adapters.items():
        near(own[name], want, name)
    assert all(torch.equal(own[name], value) for name, value in before.items())
    assert not any(hasattr(own[name], "main_grad") for name in before)


@ranks()
def test_the_seed_draws_a_kaiming_uniform_a(context: ParallelContext) -> None:
    """Within 1 / sqrt(inputs), as in the authors' code."""
    found = []
    for seed in ("1234", "7"):
        run = gpt_config(*LORA, "--seed", seed)
        (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
        own = {k: v.detach() for k, v in chunk.named_parameters() if k.endswith("lora.a")}
        for name, matrix in own.items():
            limit = matrix.size(1) ** -0.5
            assert 0.9 * limit < float(matrix.abs().max()) <= limit, name
        found.append(own)
    assert not any(torch.equal(matrix, found[1][name]) for name, matrix in found[0].items())


@ranks()
def test_starts_as_the_model_without_adapters_bit_for_bit(context: ParallelContext) -> None:
    run = gpt_config(*LORA)
    with_adapters, without = bare_chunk(run, context), gpt_chunk(gpt_config(), context)
    assert torch.equal(loss_of(with_adapters, run), loss_of(without, run))


@torch.no_grad()
def draw_b(chunk: torch.nn.Module) -> None:
    """Give the matrices B values, so that the adapters do something."""
    for name, parameter in chunk.named_parameters():
        if name.endswith("lora.b"):
            parameter.normal_(std=0.1)


@ranks(tp=2)
def test_merged_weights_give_the_output_of_the_adapters(context: ParallelContext) -> None:
    run = gpt_config(*LORA, "--tensor-model-parallel-size", "2", world_size=2)
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    start = loss_of(chunk, run)
    draw_b(chunk)
    torch.distributed.barrier()
    for parameter in chunk.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            torch.distributed.broadcast(parameter.detach(), src=0)
    want = loss_of(chunk, run)
    assert (want - start).abs() > 1e-3
    assert merge_adapters([chunk]) == 2 * len(TARGETS)
    assert not any("lora" in name for name, _ in chunk.named_parameters())
    near(loss_of(chunk, run), want, "loss", 1e-6)


@ranks()
def test_merged_weights_have_the_dtype_of_the_weights(context: ParallelContext) -> None:
    """The sum is rounded once."""
    run = gpt_config(*LORA, "--bf16")
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    draw_b(chunk)
    layer = chunk.decoder.layers[0].self_attention.linear_qkv
    merged = merged_weight_of([chunk])
    assert len(merged) == 2 * len(TARGETS)
    want = layer.weight.float() + 2 * layer.lora.b.float() @ layer.lora.a.float()
    assert layer.weight.dtype == layer.lora.a.dtype == torch.bfloat16
    assert torch.equal(merged[id(layer.weight)](), want.bfloat16())
    assert merge_adapters([chunk]) == 2 * len(TARGETS)
    assert torch.equal(layer.weight, want.bfloat16()) and layer.lora is None


@ranks()
def test_dropout_is_for_training_only(context: ParallelContext) -> None:
    run = gpt_config(*LORA, "--lora-dropout", "0.5")
    chunk = bare_chunk(run, context)
    draw_b(chunk)
    assert loss_of(chunk, run) != loss_of(chunk, run)
    chunk.eval()
    assert torch.equal(loss_of(chunk, run), loss_of(chunk, run))


TIED = [word for word in SAME_WEIGHTS if word != "--untie-embeddings-and-output-weights"]
MTP = "--mtp-num-layers 1".split()
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LAYOUTS = "tp2 tp2sp pp2 cp2 dp2 dp2do pp2vpp2 pp2zbh1 pp2zbv pp2core1f1b".split()
LAYOUTS += [f"pp2[{RECOMPUTE}]", "pp4[--pipeline-model-parallel-layout E|tt|tt|L]"]


def run_layout(layout: str, words: list[str], folder: Path) -> parity.Recording:
    words = [word for word in words if word != "--use-distributed-optimizer"]
    flags = [*words, *mock_data(), *LORA]
    return parity.record(GPT, flags, parse_layout(layout), STEPS, folder, select())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> parity.Recording:
    truth = run_layout("dp1", SAME_WEIGHTS, tmp_path_factory.mktemp("one") / "run")
    assert truth.failure is None
    return truth


@pytest.mark.parametrize(
    ("layout", "more"),
    [("tp2sp", "--attention-output-gate"), ("pp2vpp2", ""), ("dp2do", "")],
)
def test_separate_projections_train_as_on_one_rank(layout: str, more: str, tmp_path: Path) -> None:
    words = [*SAME_WEIGHTS, APART, *more.split()]
    truth = run_layout("dp1", words, tmp_path / "truth")
    found = parity.compare(run_layout(layout, words, tmp_path / "run"), truth, parity.Tolerances())
    assert_same(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_rank(layout: str, one_rank: parity.Recording, tmp_path: Path) -> None:
    found = parity.compare(
        run_layout(layout, SAME_WEIGHTS, tmp_path / "run"), one_rank, parity.Tolerances()
    )
    assert_same(found)
    last = parity.read_gradients(found.recording.folder, STEPS)
    assert len(last) == 4 * len(TARGETS) * 2 and all(gradient.any() for gradient in last.values())


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --lora-target-modules linear_qkv linear_proj"
).split()


@pytest.mark.parametrize("layout", ["pp2", "tp2sp", "tp2sp experts", "ep2 experts"])
def test_attention_beside_experts_tied_embeddings_and_mtp(layout: str, tmp_path: Path) -> None:
    """megatron-core's sums over copies of the embedding meet weights without gradients."""
    layout, _, experts = layout.partition(" ")
    words = [*SAME_WEIGHTS, *EXPERTS] if experts else [*TIED, *MTP]
    truth = run_layout("dp1", words, tmp_path / "truth")
    found = parity.compare(run_layout(layout, words, tmp_path / "run"), truth, parity.Tolerances())
    assert_same(found)
    if experts:
        assert len(parity.read_gradients(found.recording.folder, STEPS)) == 4 * 2 * 2


def gradients_with_dropout(context: ParallelContext, *words: str) -> dict[str, Tensor]:
    run = gpt_config(
        *LORA, "--lora-dropout", "0.3", "--tensor-model-parallel-size", "2", *words, world_size=2
    )
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    plain.fill(chunk, context)
    seed_everything(context, 1234)
    loss_of(chunk, run).backward()
    return {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}


@ranks(tp=2)
def test_masks_of_whole_inputs_agree_between_ranks(
    context: ParallelContext,
) -> None:
    """The whole matrices, which each rank updates by itself, thus stay alike."""
    whole = [
        gradient
        for name, gradient in gradients_with_dropout(context).items()
        if name.endswith(("qkv.lora.a", "fc1.lora.a", "proj.lora.b", "fc2.lora.b"))
    ]
    assert len(whole) == 2 * len(TARGETS)
    for gradient in whole:
        theirs = gradient.clone()
        torch.distributed.broadcast(theirs, src=0)
        assert torch.equal(gradient, theirs) and gradient.any()


@pytest.mark.parametrize("more", [[], ["--sequence-parallel"]])
@ranks(tp=2)
def test_recomputed_layers_drop_the_same(context: ParallelContext, more: list[str]) -> None:
    truth = gradients_with_dropout(context, *more)
    recomputed = gradients_with_dropout(context, *more, *RECOMPUTE.split())
    assert len(truth) == 2 * 2 * len(TARGETS)
    assert recomputed.keys() == truth.keys()
    for name, gradient in recomputed.items():
        assert torch.equal(gradient, truth[name]), name


@ranks()
def test_targets_that_a_model_lacks(context: ParallelContext) -> None:
    run = gpt_config(*LORA)
    lora = dataclasses.replace(run.lora, lora_target_modules=["linear_q"])
    with pytest.raises(ConfigError, match=r"`--lora-target-modules` \(linear_q\) names no linear"):
        bare_chunk(dataclasses.replace(run, lora=lora), context)


KEPT = f"--moe-keep-dispatched-tokens {RECOMPUTE}"
EXPERT_LAYOUTS = [
    "ep2etp2",
    "tp4spetp2",
    "tp2spetp1[--moe-shared-expert-overlap]",
    f"ep2dp2do[{KEPT}]",
    "ep2pp2vpp2[--overlap-moe-expert-parallel-comm]",
    "ep2[--moe-token-dispatcher-type allgather]",
    "ep2[--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity]",
]
"""The capacity of the last is that of all tokens, so that only padding is added."""


@pytest.fixture(scope="module")
def experts_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> parity.Recording:
    words = [*SAME_WEIGHTS, *MOE, APART, "--num-query-groups", "4"]
    truth = run_layout("dp1", words, tmp_path_factory.mktemp("experts") / "run")
    assert truth.failure is None
    return truth


@ranks()
def test_experts_computed_together_leave_out_what_their_start_has_removed(
    context: ParallelContext,
) -> None:
    run = gpt_config(*LORA, *MOE, "--lora-init", "pissa")
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    own = {name: x for name, x in chunk.named_parameters() if ".lora." in name}
    with torch.no_grad():
        for parameter in own.values():
            parameter.normal_(std=0.1)
    together = loss_of(chunk, run)
    adapters = [module for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.groups = False
    near(together, loss_of(chunk, run), "loss", 1e-6)
    with torch.no_grad():
        for name in own:
            if ".removed." in name:
                own[name].zero_()
    assert (loss_of(chunk, run) - together).abs() > 1e-3


WHOLE = [*MOE, "--lora-modules-to-save", "embedding", "router", "norm"]


@pytest.mark.parametrize("layout", ["pp2dp2do", "tp2sp", "ep2"])
def test_parts_trained_whole_are_those_of_one_rank(layout: str, tmp_path: Path) -> None:
    """The tied embedding has copies on the first and the last stage, and one of a depth."""
    words = [*TIED, *WHOLE, *MTP]
    truth = run_layout("dp1", words, tmp_path / "truth")
    found = parity.compare(run_layout(layout, words, tmp_path / "run"), truth, parity.Tolerances())
    assert_same(found)
    names = parity.read_gradients(found.recording.folder, STEPS)
    whole = [name for name in names if ".lora." not in name]
    # The embedding; of five layers two norms and a router; three of the depth; the last.
    assert len(whole) == 1 + 5 * 3 + 3 + 1


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_train_as_on_one_rank(
    layout: str, experts_on_one_rank: parity.Recording, tmp_path: Path
) -> None:
    words = [*SAME_WEIGHTS, *MOE, APART, "--num-query-groups", "4"]
    recording = run_layout(layout, words, tmp_path / "run")
    assert_same(parity.compare(recording, experts_on_one_rank, parity.Tolerances()))
    gradients = parity.read_gradients(recording.folder, STEPS)
    assert len(gradients) == 4 * 2 * (2 + 2 + 2 * 4)
    assert all(gradient.any() for gradient in gradients.values())


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --lora-target-modules linear_qkv linear_proj"
).split()


@ranks()
def test_the_bias_of_experts_is_frozen(context: ParallelContext) -> None:
    run = gpt_config(*LORA, *EXPERTS)
    transformer_config = build_transformer_config(run)
    (chunk,) = build_chunks(build_gpt_chunk, run, transformer_config, context)
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    routers = [module for module in ddp.modules() if isinstance(module, Router)]
    before = torch.tensor([0.1, -0.2, 0.30001, 0.0])
    for router in routers:
        router.expert_bias.copy_(before)
    loss_of(ddp, run).backward()
    assert all(float(router.local_tokens_per_expert.sum()) > 0 for router in routers)
    finalize_model_grads([ddp], torch.tensor([1], dtype=torch.int))
    assert len(routers) == 2
    assert all(torch.equal(router.expert_bias, before) for router in routers)


@ranks(tp=2)
def test_shards_of_adapters_lie_as_those_of_their_weights(context: ParallelContext) -> None:
    """Both halves of a gated layer are cut; whole matrices of cut sequences are summed."""
    words = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    run = gpt_config(*LORA, *words, world_size=2)
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    rows: dict[str, list[tuple[int, int]]] = {}
    for shard in shards_of(chunk):
        rows.setdefault(shard.name, []).append((shard.full_shape[0], shard.offset[0]))
    for name in TARGETS:
        (weight,) = (key for key in rows if f"{name}.weight[0]" in key)
        assert rows[weight.replace("weight", "lora.b")] == rows[weight], name
    assert len(rows["decoder.layers.mlp.linear_fc1.lora.b[0]"]) == 2
    whole = {"a": ("linear_qkv", "linear_fc1"), "b": ("linear_proj", "linear_fc2")}
    marks = dict(chunk.named_parameters())
    for matrix, names in whole.items():
        other = "b" if matrix == "a" else "a"
        for key, parameter in marks.items():
            if key.endswith(tuple(f"{name}.lora.{matrix}" for name in names)):
                assert parameter.sequence_parallel and not parameter.tensor_model_parallel
                cut = marks[f"{key.removesuffix(matrix)}{other}"]
                assert cut.tensor_model_parallel and not getattr(cut, "sequence_parallel", False)
