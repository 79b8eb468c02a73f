"""Activations that wait on the host, against runs that keep them: the bits must be the same."""

from dataclasses import replace

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.config.offload import OffloadConfig
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.train.loop import IntervalMetrics
from megatron_ext.train.run import Run
from tests.ranks import on_ranks
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, check_refused, mock_data

SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 4 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 4 --micro-batch-size 1 --global-batch-size 4".split(),
]
LAYERS = "--min-offloaded-tensor-size 1 --cpu-offloading-num-layers"
PARTS = "--min-offloaded-tensor-size 1 --fine-grained-activation-offloading --offload-modules"


def _steps(run: Run, count: int) -> list[Tensor]:
    """Return norms and weights after some steps."""
    metrics = IntervalMetrics(run)
    norms = []
    for _ in range(count):
        one_step(run, metrics)
        if run.config.optimizer.data_parallel_sharding_strategy != "no_shard":
            continue  # Weights and gradients have no memory between steps.
        norms += [p.main_grad.norm() for chunk in run.chunks for p in chunk.parameters()]
    if not norms:
        return norms
    return [*norms, *(p.detach().clone() for chunk in run.chunks for p in chunk.parameters())]


def _same_on(context: ParallelContext, *, flags: str, offload: str) -> None:
    """Compare two steps, and the bytes moved in each micro-batch with the plan's upper bound."""
    truth = _steps(build([*SMALL, *flags.split()], context), 2)
    run = build([*SMALL, *flags.split(), *offload.split()], context)
    found = _steps(run, 2)
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))
    network = GptNetwork.of(run.config)
    stages = sorted(network.stages_of(context.pp_rank), key=lambda stage: stage.chunk)
    passes = 2 * run.batch_size.num_microbatches
    for chunk, stage in zip(unwrap_model(run.chunks), stages, strict=True):
        traffic = chunk.activation_offload.traffic
        planned = network.hosted(stage)
        # Little is saved for gradients that nothing needs, such as those of routers' counts.
        assert 0.99 * traffic.to_host <= traffic.to_device <= traffic.to_host
        counted = traffic.to_host / passes
        everything = LAYERS in offload
        # The plan counts no scalars, and as many tokens for each expert.
        assert 0.9 * everything * planned <= counted <= 1.03 * planned, (counted, planned)
        # The plan takes no more from the device than has gone. It may count too much of whole
        # layers, but then of what is gone, too.
        kept = network.with_config(replace(run.config, offload=OffloadConfig())).activations(stage)
        gone = kept.kept - network.activations(stage).kept
        assert gone <= 1.01 * counted or everything
        assert counted or not planned


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 48 "
    "--moe-router-load-balancing-type aux_loss"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
PP2 = "--pipeline-model-parallel-size 2"
ALL = "attn_norm qkv_linear core_attn attn_proj mlp_norm"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --no-group-query-attention"
)


@pytest.mark.parametrize(
    ("sizes", "flags", "offload"),
    [
        pytest.param({}, "--mtp-num-layers 1", f"{PARTS} {ALL}", id="parts"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "layers": ({}, "--bf16 --hidden-dropout 0.1", f"{LAYERS} 2"),
                "all layers": ({}, "--attention-dropout 0.1 --bf16", f"{LAYERS} 4"),
                "1F1B": ({"pp": 2}, f"{PP2} --mtp-num-layers 1", f"{LAYERS} 1"),
                "interleaved": (
                    {"pp": 2, "tp": 2, "vpp": 2},
                    f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel "
                    "--tensor-model-parallel-size 2",
                    f"{LAYERS} 1",
                ),
                "zero bubble": ({"pp": 2}, f"{PP2} --pipeline-schedule zb-h1", f"{LAYERS} 2"),
                "recomputed": ({}, f"{FULL} 1", f"{LAYERS} 3"),
                "recomputed groups": ({"pp": 2}, f"{PP2} {FULL} 2", f"{LAYERS} 2"),
                "recomputed in part": (
                    {},
                    "--recompute-granularity full --recompute-method block "
                    "--recompute-num-layers 2",
                    f"{LAYERS} 3",
                ),
                "selective": ({}, "--recompute-granularity selective", f"{LAYERS} 3"),
                "experts": ({"dp": 2, "ep": 2}, f"{EXPERTS} --bf16", f"{LAYERS} 3"),
                "experts' parts": (
                    {"dp": 2, "ep": 2},
                    EXPERTS,
                    f"{PARTS} expert_fc1 moe_act {ALL}",
                ),
                "grouped experts": (
                    {"dp": 2, "ep": 2},
                    f"{EXPERTS} --moe-grouped-gemm",
                    f"{PARTS} expert_fc1 moe_act",
                ),
                "pairs": (
                    {"dp": 2, "ep": 2},
                    f"{EXPERTS} --overlap-moe-expert-parallel-comm",
                    f"{LAYERS} 2",
                ),
                "weights sharded": (
                    {"dp": 2},
                    "--data-parallel-sharding-strategy optim_grads_params --bf16",
                    f"{LAYERS} 2",
                ),
                "tokens kept": (
                    {"dp": 2, "ep": 2},
                    f"{EXPERTS} {FULL} 1 --moe-keep-dispatched-tokens",
                    f"{LAYERS} 2",
                ),
                "latent": ({}, LATENT, f"{PARTS} {ALL}"),
                "CP": ({"cp": 2}, "--context-parallel-size 2", f"{LAYERS} 2"),
                "small stays": (
                    {},
                    "",
                    "--min-offloaded-tensor-size 1000 --cpu-offloading-num-layers 4",
                ),
            }.items()
        ),
    ],
)
def test_activations_on_the_host_give_the_same_bits(
    sizes: dict[str, int], flags: str, offload: str
) -> None:
    on_ranks(_same_on, sizes, flags=flags, offload=offload)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--cpu-offloading-num-layers 5", "(5) must be at most `--num-layers` (4)"),
        ("--offload-modules core_attn", "needs `--fine-grained-activation-offloading`"),
        ("--fine-grained-activation-offloading", "needs `--offload-modules`"),
        (f"{PARTS} core_attn {FULL} 1", "does not go with `--recompute-granularity full`"),
        (
            f"{PARTS} core_attn --recompute-granularity selective",
            "`--offload-modules` (core_attn) is recomputed",
        ),
        (f"{PARTS} core_attn --cpu-offloading-num-layers 1", "exclude each other"),
        ("--cpu-offloading-num-layers 1 --fp8-format hybrid", "does not go with `--fp8-format`"),
    ],
)
def test_what_cannot_wait_on_the_host_is_told(flags: str, sentence: str) -> None:
    check_refused([*SMALL, *flags.split()], sentence)
