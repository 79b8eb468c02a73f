"""QK-clip by its equations in plain torch, the same weights in every layout, and its logs."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.chunks import wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.fused_adam import FusedAdam, model_weights
from megatron_ext.optim.qk_clip import AttentionLogits, multiply_rows
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.shards import Shard, shards_of
from megatron_ext.optim.update import parts_of, update_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.reporting.files import read_metrics
from tests.checkpoint.tiny import whole_tensors
from tests.graph_stand_in import graphs_on_a_cpu
from tests.layers import plain
from tests.layers.test_lora import CONSTANT, LATENT, bare_chunk, near
from tests.numerics.stock import gpt_config, rows, whole_batch
from tests.optim.test_muon import check_same
from tests.ranks import on_ranks, ranks
from tests.schedules.test_graphs import keep_replays
from tests.training_runs import train_steps, training_rows

GROUPED = "--group-query-attention --num-query-groups 2 --add-qkv-bias".split()


def watched(chunk: torch.nn.Module) -> list[list[Tensor]]:
    """Return a list for each layer, which gets the heads' largest logits of each forward pass."""
    found: list[list[Tensor]] = []
    for module in chunk.modules():
        if not isinstance(module, DotProductAttention):
            continue

        def look(module: Any, given: Any, own: list[Tensor]) -> None:
            query, key = (x.detach().double() for x in given[:2])
            key = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
            logits = torch.einsum("qbnd,kbnd->bnqk", query, key) * module.softmax_scale
            hidden = plain.causal(query.size(0), query.size(1))
            own.append(logits.masked_fill(hidden[:, None], -math.inf).amax(dim=(0, 2, 3)))

        found.append([])
        module.register_forward_pre_hook(functools.partial(look, own=found[-1]))
    return found


def clip_plainly(
    truth: dict[str, Tensor], layer: int, logits: Tensor, config: Any, alpha: float, limit: float
) -> int:
    """Scale the weights of a layer by its heads' largest logits; return how many heads exceed."""
    prefix = f"decoder.layers.{layer}.self_attention."
    if config.multi_latent_attention:
        up = truth[f"{prefix}linear_q_up_proj.weight"].view(len(logits), -1, config.q_lora_rank)
        down = truth[f"{prefix}linear_kv_up_proj.weight"].view(len(logits), -1, config.kv_lora_rank)
        for head, logit in enumerate(logits.tolist()):
            factor = min(1.0, limit / logit) if logit > 0 else 1.0
            up[head, : config.qk_head_dim] *= factor**alpha
            up[head, config.qk_head_dim :] *= factor
            down[head, : config.qk_head_dim] *= factor ** (1 - alpha)
        return int((logits > limit).sum())
    groups, d = config.num_query_groups, config.kv_channels
    per_group = len(logits) // groups
    for name in ("weight", "bias"):
        weight = truth[f"{prefix}linear_qkv.{name}"]
        # Queries, gates of outputs if any, a key and a value.
        heads = weight.view(groups, len(weight) // (groups * d), d, -1)
        for group, logit in enumerate(logits.view(groups, per_group).amax(dim=1).tolist()):
            factor = min(1.0, limit / logit) if logit > 0 else 1.0
            heads[group, :per_group] *= factor**alpha
            heads[group, -2] *= factor ** (1 - alpha)
    return int((logits.view(groups, per_group).amax(dim=1) > limit).sum())


@pytest.mark.parametrize(
    ("flags", "alpha", "limit"),
    [
        (GROUPED, 0.5, 3.0),
        ([*GROUPED, "--attention-output-gate"], 0.2, 3.0),
        ([*LATENT, "--no-bias-gelu-fusion"], 0.3, 3.0),
    ],
    ids=["grouped", "gated", "latent"],
)
@ranks()
def test_three_steps_are_those_of_plain_torch(
    context: ParallelContext, flags: list[str], alpha: float, limit: float
) -> None:
    given = f"--qk-clip --qk-clip-alpha {alpha} --qk-clip-threshold {limit}".split()
    run = gpt_config(*flags, *given, *CONSTANT, "--weight-decay", "0.1")
    transformer_config: Any = build_transformer_config(run)
    chunk = bare_chunk(run, context)
    seen = watched(chunk)
    own = dict(chunk.named_parameters())
    truth = {name: weight.detach().clone() for name, weight in own.items()}
    decayed, others = ([x for x in truth.values() if x.dim() == n] for n in (2, 1))
    groups: Any = [{"params": decayed}, {"params": others, "weight_decay": 0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    followed = AttentionLogits([ddp], optimizer, transformer_config, context.pgs)
    exceeding = []
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for each in (rows(whole_batch(run), first, 2) for first in (0, 2)):
            ddp(each.tokens, each.position_ids, None, labels=each.labels).mean().backward()
        for name, weight in truth.items():
            weight.grad = own[name].main_grad.clone()
        assert update_parameters(optimizer, 0.0, None, followed.before_update).applied
        adam.step()
        largest = [torch.stack(passes).amax(dim=0) for passes in seen]
        for layer, logits in enumerate(largest):
            exceeding.append(clip_plainly(truth, layer, logits, transformer_config, alpha, limit))
            seen[layer].clear()
        logged = {f"layer {i + 1}": pytest.approx(float(x.max())) for i, x in enumerate(largest)}
        assert followed.by_layer() == logged
    units = 4 if transformer_config.multi_latent_attention else 2
    assert 0 < sum(exceeding) < 3 * 2 * units
    for name, want in truth.items():
        near(own[name], want, name, 3e-6)


def _scaled_alike(context: ParallelContext, *, flags: str) -> None:
    """Check that weights in float32 and those that are rounded from them are scaled alike."""
    run = gpt_config(
        *GROUPED, "--qk-clip", *CONSTANT, "--weight-decay", "0", *flags.split(), world_size=2
    )
    transformer_config: Any = build_transformer_config(run)
    chunk = bare_chunk(run, context)
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    followed = AttentionLogits([ddp], optimizer, transformer_config, context.pgs)
    names = {parameter: name for name, parameter in ddp.named_parameters()}
    shards = [shard for part in parts_of(optimizer) for shard in shards_of(part)]
    before = [shard.main.detach().clone() for shard in shards]
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    # The second replica has seen a larger logit of the second group's first head.
    followed._followed[1].maxima.values.copy_(
        torch.tensor([90.0, 80.0, 100.0 if context.dp_rank == 0 else 400.0, -1.0])
    )
    assert update_parameters(optimizer, 0.0, None, followed.before_update).applied
    changed = 0
    for shard, old in zip(shards, before, strict=True):
        factors = torch.ones(shard.parameter.shape)
        if "layers.1.self_attention.linear_qkv" in names[shard.parameter]:
            factors[32:56] = 0.5
        own = factors.view(-1)[shard.start : shard.start + shard.main.numel()]
        torch.testing.assert_close(shard.main, old * own.view(old.shape), rtol=0, atol=0)
        changed += int((shard.main != old).sum())
    total = torch.tensor(changed)
    if "use-distributed-optimizer" in flags:
        torch.distributed.all_reduce(total, group=context.pgs.dp)
    assert total == 24 * 32 + 24
    for part in parts_of(optimizer):
        for main, model in model_weights(part).items():
            assert torch.equal(model, main.to(model.dtype))
    for parameter in ddp.parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(both, parameter.detach(), group=context.pgs.dp)
        assert torch.equal(both[0], both[1])


SHARED = "--use-distributed-optimizer"


@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {SHARED}",
        f"{SHARED} --optimizer muon",
        "--bf16 --optimizer sgd",
        f"--bf16 {SHARED} --use-precision-aware-optimizer --exp-avg-dtype bf16",
        f"--bf16 {SHARED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param(f"--bf16 {SHARED} --optimizer muon", marks=pytest.mark.slow),
        pytest.param("--optimizer-cpu-offload --bf16", marks=pytest.mark.slow),
        pytest.param("--optimizer-class torch.optim:RMSprop", marks=pytest.mark.slow),
    ],
)
def test_every_optimizer_scales_its_weights_and_those_of_the_model(flags: str) -> None:
    on_ranks(_scaled_alike, {"dp": 2}, flags=flags)


def test_a_device_that_skips_an_update_scales_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    adam = FusedAdam([weight], lr=0.0, weight_decay=0.0)
    logits: Any = SimpleNamespace(_factors={weight: torch.tensor([1.0, 0.5, 0.25, 1.0])})
    copies: dict[Tensor, Tensor] = {weight: torch.zeros(4, 3, dtype=torch.bfloat16)}
    for skipped, want in ((1.0, [1.0] * 4), (0.0, [1.0, 0.5, 0.25, 1.0])):
        adam.found_inf = torch.tensor(skipped)
        AttentionLogits._step(logits, adam, lambda _closure: None, [Shard(weight, weight)], copies)
        assert weight.detach()[:, 0].tolist() == want
        assert torch.equal(copies[weight].float(), weight.detach())


@pytest.mark.parametrize(("start", "end"), [(0, 15), (1, 2), (2, 11), (3, 9), (7, 15)])
def test_a_shard_may_begin_and_end_within_a_row(start: int, end: int) -> None:
    parameter = torch.nn.Parameter(torch.arange(1.0, 16.0).view(5, 3))
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    main = parameter.detach().flatten()[start:end].clone()
    multiply_rows(Shard(parameter, main, start), factors)
    assert torch.equal(main, (parameter.detach() * factors[:, None]).flatten()[start:end])


MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 4 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 "
    "--make-vocab-size-divisible-by 32 --num-workers 0 --log-interval 1 --eval-iters 0 "
    "--save-interval 2 --position-embedding-type rope --adam-eps 1e-3 --qk-clip "
    "--qk-clip-threshold 0.2"
).split()
GROUPS = "--group-query-attention --num-query-groups 2"
MUON = f"{GROUPS} --optimizer muon --muon-extra-scale-factor 0.2"
LATENT_MODEL = (
    "--multi-latent-attention --qk-layernorm --qk-head-dim 8 --q-lora-rank 24 --kv-lora-rank 16 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12"
)
DOCUMENTS = f"{GROUPS} --reset-attention-mask --window-size 6 0 --window-attn-skip-freq 2"
UNTIED = "--untie-embeddings-and-output-weights"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ZERO3 = f"{SHARED} --data-parallel-sharding-strategy optim_grads_params"
RECOMPUTES = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--delay-wgrad-compute"
)

Found = tuple[dict[str, Tensor], list[dict[str, float]]]


def trained(flags: str, folder: Path, size: int = 1) -> Found:
    """Train; return the weights of the last checkpoint, and the logged logits of each step."""
    train_steps([*MODEL, *flags.split()], folder, size)
    tensors = whole_tensors(folder_of(folder, 4), folder / "whole.pt")
    return tensors, logged(folder)


def logged(folder: Path) -> list[dict[str, float]]:
    steps = training_rows(read_metrics(folder / "metrics.jsonl"))
    return [{k: x for k, x in row.items() if k.startswith("max_attention")} for row in steps]


OneRank = Callable[[str], Found]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Return a function from the flags of a model to the weights and logits of one rank."""
    return functools.cache(lambda model: trained(model, tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize(
    ("model", "layout", "size"),
    [
        (GROUPS, f"{TP2} --sequence-parallel", 2),
        (GROUPS, f"{CP2} --cp-comm-type a2a", 2),
        (GROUPS, SHARED, 2),
        (MUON, f"{TP2} {PP2} {SHARED}", 4),
        (LATENT_MODEL, f"{PP2} {SHARED}", 2),
        (DOCUMENTS, f"{CP2} --cp-comm-type all_gather", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (GROUPS, f"{CP2} {TP2}", 4),
                (GROUPS, f"{PP2}", 2),
                (GROUPS, ZERO3, 2),
                (GROUPS, f"--overlap-grad-reduce --overlap-param-gather {SHARED}", 2),
                (GROUPS, "--recompute-granularity selective", 1),
                (GROUPS, f"{TP2} --recompute-granularity full --recompute-method uniform "
                         "--recompute-num-layers 1", 2),
                ("--mtp-num-layers 1", f"{PP2} {SHARED}", 2),
                ("--num-layers 4", f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2),
                (f"--num-layers 4 {UNTIED}", f"{PP2} --pipeline-schedule zb-v", 2),
                (LATENT_MODEL, f"{TP2} {CP2} {SHARED}", 4),
                (LATENT_MODEL, f"{TP2} --recompute-granularity selective "
                               "--recompute-modules mla_up_proj core_attn", 2),
                (DOCUMENTS, f"{CP2} --cp-comm-type a2a {SHARED}", 2),
            )
        ),
    ],
)  # fmt: skip
def test_a_layout_clips_as_one_rank_does(
    model: str, layout: str, size: int, one_rank: OneRank, tmp_path: Path
) -> None:
    weights, logits = trained(f"{model} {layout}", tmp_path, size)
    want, wanted = one_rank(model)
    assert all(max(step.values()) > 0.2 for step in wanted[:2])
    check_same(weights, want)
    for found, truth in zip(logits, wanted, strict=True):
        assert found == pytest.approx(truth, rel=1e-5)


def test_the_log_names_the_model_and_each_layer(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = [x for x in MODEL if x != "--qk-clip"]
    at = flags.index("--qk-clip-threshold")
    del flags[at : at + 2]
    rows = train_steps([*flags, "--log-max-attention-logit", "--mtp-num-layers", "1"], tmp_path)
    names = ["layer 1", "layer 2", "mtp layer 1"]
    for row in rows:
        layers = [row[f"max_attention_logit/{name}"] for name in names]
        assert row["max_attention_logit"] == max(layers) and min(layers) > 0
    text = f"| max attention logit: {rows[-1]['max_attention_logit']:.3f} |"
    assert text in capfd.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(one_rank: OneRank, tmp_path: Path) -> None:
    train_steps([*MODEL, *GROUPS.split(), "--exit-interval", "2"], tmp_path)
    weights, logits = trained(GROUPS, tmp_path)
    want, wanted = one_rank(GROUPS)
    assert logits[-2:] == wanted[-2:]
    assert all(torch.equal(weights[name], value) for name, value in want.items())


@pytest.mark.slow
def test_graphs_follow_logits_of_their_replays(tmp_path: Path) -> None:
    flags = [*MODEL, "--reset-attention-mask"]
    folder = tmp_path / "recorded"
    train_steps(flags, tmp_path)
    with graphs_on_a_cpu():
        watch = functools.partial(keep_replays, folder=tmp_path)
        train_steps([*flags, "--cuda-graph-impl", "local"], folder, prepare=watch)
    replays = json.loads((tmp_path / "0.json").read_text())
    assert [bool(step) for step in replays] == [False, True, True, True]
    assert logged(folder) == logged(tmp_path)
