"""Any combination of flags ends in a plan or in sentences, never in a failure of ours."""

from __future__ import annotations

import random
import traceback

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import MegatronExtError
from megatron_ext.planning.checks import check_core
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.memory import memory
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.preflight import with_padded_vocabulary
from megatron_ext.text.task import TEXT
from tests.text.cost.layouts import MODEL

NUMBERS = (0, 1, 2, 3, 4, 6, 8, 16, 64, 100, -1)
NUMBERED = (
    "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
    "expert-model-parallel-size expert-tensor-parallel-size num-attention-heads num-query-groups "
    "kv-channels micro-batch-size num-virtual-stages-per-pipeline-rank "
    "num-layers-per-virtual-pipeline-stage microbatch-group-size-per-virtual-pipeline-stage "
    "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers num-experts "
    "moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size mtp-num-layers "
    "recompute-num-layers lora-rank num-layers-at-start-in-bf16 ddp-num-buckets ddp-bucket-size "
    "vocab-size padded-vocab-size make-vocab-size-divisible-by cross-entropy-chunk-size"
).split()
CHOICES: dict[str, tuple[object, ...]] = {
    **{f"--{name}": NUMBERS for name in NUMBERED},
    "--num-layers": (*NUMBERS, 12, 48),
    "--hidden-size": (*NUMBERS, 256, 1024),
    "--ffn-hidden-size": (*NUMBERS, 1000),
    "--seq-length": (*NUMBERS, 4096),
    "--max-position-embeddings": (*NUMBERS, 4096),
    "--global-batch-size": (*NUMBERS, 256),
    "--pipeline-model-parallel-layout": ("Et|tttL", "Ettt|tL", "E|tttt|L", "Et*4L", "", "x|y"),
    "--pipeline-schedule": ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "core-1f1b"),
    "--moe-layer-freq": ("[0,1]", "2", "[1]*4", "0", "[]", "([1]+[0])*2"),
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-modules": ("core_attn", "mlp", "moe", "layernorm"),
    "--cp-comm-type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "--lora-target-modules": ("linear_qkv", "linear_fc1", "linear_kv"),
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp8-recipe": ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"),
    "--ema-decay": (0, 0.5, 1, 2),
    "--optimizer": ("adam", "sgd"),
    "--cross-entropy-impl": ("chunked", "eager", "core"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--position-embedding-type": ("rope", "learned_absolute", "none"),
    "--hidden-dropout": (0, 0.5, 1, -1),
    "--attention-dropout": (0, 0.5),
    "--transformer-impl": ("torch", "transformer_engine", "local"),
}
SWITCHES = (
    "--sequence-parallel --bf16 --fp16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --no-swiglu --add-bias-linear --add-qkv-bias --qk-layernorm "
    "--no-group-query-attention --no-untie-embeddings-and-output-weights --use-tp-pp-dp-mapping "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--first-last-layers-bf16 --moe-shared-expert-gate --deterministic-dropout "
    "--no-fp8-wgrad --moe-layer-recompute --calculate-per-token-loss"
).split()
CASUALTIES = (AssertionError, LookupError, ArithmeticError, TypeError, AttributeError)


def words_of(seed: int) -> list[str]:
    """Return up to six random flags after those of a good run, whose place they take."""
    draw = random.Random(seed)
    words = list(MODEL)
    for name in draw.sample(sorted(CHOICES), draw.randint(1, 4)):
        words += [name, str(draw.choice(CHOICES[name]))]
    return words + draw.sample(SWITCHES, draw.randint(0, 2))


def outcome(seed: int) -> str:
    """Return ``plan`` or ``errors``; anything else is a traceback."""
    draw = random.Random(-seed)
    world = draw.choice((1, 2, 4, 8, 12, 64))
    device, gpu = draw.choice(("cpu", "cuda")), draw.choice(sorted(GPUS))
    try:
        config = parse_args(words_of(seed), TEXT, world_size=world, device=device).config
        config = with_padded_vocabulary(config, 500)
        check_core(config)
        network = GptNetwork.of(config)
        assert all(rank.total > 0 for rank in memory(network))
        assert estimate(network, gpu_named(gpu)).seconds > 0
    except MegatronExtError as error:
        return "errors" if error.messages and all(map(str.strip, error.messages)) else "silence"
    return "plan"


def _broken(seeds: range) -> tuple[dict[str, int], list[str]]:
    counts, broken = {"plan": 0, "errors": 0}, list[str]()
    for seed in seeds:
        try:
            counts[outcome(seed)] += 1
        except (*CASUALTIES, ValueError, RuntimeError):
            said = traceback.format_exc(limit=-3)
            broken.append(f"{seed}: {' '.join(words_of(seed)[len(MODEL) :])}\n{said}")
    return counts, broken


def test_three_hundred_random_runs_end_in_a_plan_or_in_sentences() -> None:
    counts, broken = _broken(range(300))
    assert not broken, "\n".join(broken[:5])
    # A fuzz whose runs are all refused, or none, would show nothing.
    assert min(counts.values()) >= 50


@pytest.mark.slow
def test_five_thousand_random_runs_end_in_a_plan_or_in_sentences() -> None:
    _, broken = _broken(range(300, 5300))
    assert not broken, "\n".join(broken[:5])
