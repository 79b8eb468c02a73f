"""Planned costs of a GPT: closed forms, the memory of real ranks, any combination of flags."""

import dataclasses
import random
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.gpus import GPUS
from megatron_ext.device.host import this_host
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.layers.transformer_config import check_core
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.host_memory import check_host_memory
from megatron_ext.planning.memory import memory
from megatron_ext.planning.network import Volume
from megatron_ext.planning.report import model_parameters
from megatron_ext.planning.state import rank_state
from megatron_ext.planning.step_time import estimate, rank_volume
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.text.cost.task_cost import most_memory, with_recomputation
from megatron_ext.text.run import padded_to_ranks
from megatron_ext.text.task import GPT
from tests.planning.measure import (
    TOLERANCE,
    check_peak,
    check_state,
    configuration,
    measure,
    slow_but,
)
from tests.text.cost import layouts
from tests.training_runs import config_of


@pytest.mark.parametrize("name", [*layouts.LAYOUTS, *layouts.MORE])
def test_operations_of_all_stages_are_those_of_the_training_log(name: str) -> None:
    config = configuration(layouts.flags_of(name))
    counted = GptNetwork.of(config).step_flops()
    wanted = flops_per_sample(config) * config.training.batch_sizes[1]
    depths = config.model.mtp_num_layers or 0
    # The log counts the norms of the depths too.
    assert counted == pytest.approx(wanted, rel=1e-2 if depths else 1e-12)


def test_layers_with_a_window_count_the_keys_in_it() -> None:
    length, left = layouts.llama().model.seq_length or 0, 999
    flags = f"--window-size {left} 0 --window-attn-skip-freq 4"
    full, windowed = layouts.llama_network(""), layouts.llama_network(flags)
    scores = [windowed.layer_flops(number).scores for number in range(4)]
    whole = full.layer_flops(0).scores
    assert scores[3] == whole
    seen = sum(min(at, left) + 0.5 for at in range(length)) / sum(at + 0.5 for at in range(length))
    assert scores[:3] == [pytest.approx(seen * whole, rel=1e-3)] * 3


def test_a_run_that_only_evaluates_needs_memory_for_its_weights_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight takes 4 bytes; to train it, 4 for its gradient and 8 for Adam's moments more."""
    words = (
        "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 4 "
        "--max-position-embeddings 4 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 2000 --padded-vocab-size 2048"
    )
    training = config_of(f"{words} --train-iters 1")
    evaluating = config_of(f"{words} --train-iters 1 --skip-train --eval-iters 1")
    params = model_parameters(memory(GptNetwork.of(training)))
    for factor, allowed in ((3, []), (10, [evaluating]), (24, [evaluating, training])):
        host = dataclasses.replace(this_host(), memory=factor * params)
        monkeypatch.setattr("megatron_ext.planning.host_memory.this_host", lambda host=host: host)
        for config in (evaluating, training):
            if config in allowed:
                check_host_memory(config, GPT.cost)
            else:
                with pytest.raises(ConfigError, match="make the model or the micro-batch smaller"):
                    check_host_memory(config, GPT.cost)


@pytest.mark.parametrize("name", [*layouts.LAYOUTS, *layouts.MORE])
def test_the_rough_bound_is_above_the_memory_of_every_rank(name: str) -> None:
    config = configuration(layouts.flags_of(name))
    network = GptNetwork.of(config)
    kept = sum(network.activations(stage).kept for stage in network.stages())
    weights = [network.weights(stage) for stage in network.stages()]
    state = rank_state(config, network.sizes, 0, weights)
    assert most_memory(config) > kept + state.total


def test_full_recomputation_repeats_the_layers() -> None:
    config = layouts.llama()
    stage = GptNetwork.of(config).stages()[0]
    full = GptNetwork.of(with_recomputation(config, "full"))
    again = full.recomputed(stage)
    assert again.again + again.scores_again == 32 * full.layer_flops(0).forward
    assert GptNetwork.of(config).recomputed(stage).forward == 0


def test_parameters_and_state_of_llama_3_8b() -> None:
    """8,030,261,248 by its model card's weights."""
    for more in ("", "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 4"):
        assert model_parameters(memory(layouts.llama_network(more))) == 8_030_261_248
        # The last stage holds a copy of tied embeddings, which counts once.
        tied = layouts.llama_network(f"{more} --no-untie-embeddings-and-output-weights")
        assert model_parameters(memory(tied)) == 8_030_261_248 - 128256 * 4096
    # 16 + 2 bytes each: bf16 weights, fp32 gradients, main weights and two moments, over replicas.
    (rank,) = memory(layouts.llama_network("--use-distributed-optimizer"))
    assert rank.state.parameters == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert rank.state.gradients == pytest.approx(4 * 8_030_261_248, rel=1e-4)
    assert rank.state.optimizer == pytest.approx(12 * 8_030_261_248 / 8, rel=1e-3)


def test_sharded_gradients_of_llama_3_8b() -> None:
    """A rank holds an eighth of 32.1 GB, the buckets of an embedding, and two of a layer.

    A bucket is closed at 40 million weights: one holds a layer's two matrices of the MLP.
    """
    (rank,) = memory(layouts.llama_network(SHARDED))
    embedding, of_mlp, small = 128256 * 4096, 2 * 14336 * 4096, 6 * 4096 * 4096
    filled = rank.state.gradients - 4 * 8_030_261_248 / 8
    assert 4 * 2 * embedding < filled < 4 * (2 * embedding + of_mlp + small)
    assert rank.state.reduced == pytest.approx(4 * 8_030_261_248, rel=1e-4)
    plain = memory(layouts.llama_network("--use-distributed-optimizer"))[0].state
    assert rank.state.gradients < plain.gradients / 3
    assert (rank.state.optimizer, rank.state.parameters) == pytest.approx(
        (plain.optimizer, plain.parameters), rel=1e-4
    )
    once, often = (_volume(SHARDED, count).data for count in (1, 16))
    assert once == _volume("--use-distributed-optimizer").data
    assert often - once == 15 * 7 / 8 * rank.state.reduced


SHARDED = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads"


def _volume(more: str, num_microbatches: int = 1) -> Volume:
    network = layouts.llama_network(more)
    return rank_volume(network, memory(network)[0], num_microbatches)


def test_tensor_parallel_messages_of_a_layer() -> None:
    """A layer has four all-reduces of [s, b, h], 2 (n - 1) / n each; SP gathers twice more."""
    tensor = 8192 * 4096 * 2
    for flags, passes in (("", 8), ("--sequence-parallel", 10)):
        network = layouts.llama_network(f"--tensor-model-parallel-size 4 {flags}")
        layer = network.layer_traffic("*-")
        assert layer.tensor == passes * 3 / 4 * tensor
        assert layer.context == layer.expert == 0


def test_messages_between_replicas_and_stages_and_along_the_sequence() -> None:
    gradients = memory(layouts.llama_network())[0].state.gradients
    assert _volume("").data == 2 * 7 / 8 * gradients
    shared = memory(layouts.llama_network("--use-distributed-optimizer"))[0].state
    wanted = 7 / 8 * (shared.gradients + shared.parameters)
    assert _volume("--use-distributed-optimizer").data == wanted
    tensor = 8192 * 4096 * 2
    assert _volume("--pipeline-model-parallel-size 2").pipeline == tensor
    keys = 32 * 2 * 4096 * 2 * 8 * 128 * 2  # layers, passes, tokens, keys and values, bytes
    assert _volume("--context-parallel-size 2").context == keys
    assert _volume("").total == _volume("").data


def test_eight_bit_layers_and_weights_of_llama_8b() -> None:
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    plain = layouts.llama("--use-distributed-optimizer")
    eight = dataclasses.replace(plain, fp8=Fp8Config(fp8_format="hybrid", fp8_recipe="tensorwise"))
    gathers = dataclasses.replace(eight, fp8=dataclasses.replace(eight.fp8, fp8_param_gather=True))
    wide, low, held = (memory(GptNetwork.of(config))[0] for config in (plain, eight, gathers))
    assert low.state == wide.state and low.fp8_weights == 2 * matrices
    assert low.activations < 0.95 * wide.activations
    assert held.fp8_weights == matrices
    saved = wide.state.parameters - held.state.parameters
    assert saved == pytest.approx(matrices, rel=1e-5)
    assert held.state.optimizer == pytest.approx(wide.state.optimizer, rel=1e-5)
    times = [estimate(GptNetwork.of(x), GPUS["H100"]).seconds for x in (plain, eight)]
    assert 1.19 < times[0] / times[1] < 1.9
    with pytest.raises(ConfigError, match="A100 has no fp8 products, but `--fp8-format`"):
        estimate(GptNetwork.of(eight), GPUS["A100"])


def test_adapters_of_llama_8b_have_no_other_gradients() -> None:
    """Adapters of rank 16 hold 32 * 16 * the sum of both sides of the four matrices."""
    (rank,) = memory(layouts.llama_network("--lora-rank 16"))
    sides = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
    assert rank.state.gradients == 4 * 32 * 16 * sides
    assert rank.state.frozen == 2 * 8_030_261_248
    plain = estimate(layouts.llama_network(), GPUS["H100"])
    adapted = estimate(layouts.llama_network("--lora-rank 16"), GPUS["H100"])
    assert adapted.seconds < 0.8 * plain.seconds


def _network(flags: Sequence[str]) -> GptNetwork:
    return GptNetwork.of(configuration(flags))


@pytest.mark.parametrize("name", slow_but(layouts.QUICK, [*layouts.LAYOUTS, *layouts.PEAKS]))
def test_state_exactly_and_peak_within_a_tenth(name: str, tmp_path: Path) -> None:
    ranks, network = measure(layouts.flags_of(name), tmp_path), _network(layouts.flags_of(name))
    check_state(network, ranks)
    check_peak(network, ranks)


RECOMPUTED = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "selective": "--recompute-granularity selective",
    "mlp": "--recompute-granularity selective --recompute-modules core_attn mlp",
}


@pytest.mark.parametrize("mode", slow_but(["full"], RECOMPUTED))
def test_peak_with_recomputation(mode: str, tmp_path: Path) -> None:
    flags = [*layouts.flags_of("dp2"), *RECOMPUTED[mode].split()]
    planned = memory(_network(flags))[0]
    for rank in measure(flags, tmp_path):
        assert planned.activations + planned.transient == pytest.approx(rank.peak, rel=TOLERANCE)


KEPT = (
    "--num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 4 --nproc-per-node 4 "
    "--moe-ffn-hidden-size 96 --moe-keep-dispatched-tokens --moe-token-dispatcher-type"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [f"alltoall {RECOMPUTED['full']}", "flex --moe-ranks-per-node 2 --moe-layer-recompute"]
)
def test_peak_with_kept_tokens(words: str, tmp_path: Path) -> None:
    flags = [*layouts.MODEL, *f"{KEPT} {words}".split()]
    check_peak(_network(flags), measure(flags, tmp_path))


def test_shares_of_all_replicas_make_the_whole() -> None:
    network = _network(layouts.flags_of("dp2"))
    (rank,) = memory(network)
    (weights,) = rank.weights
    held = partial(rank_state, network.config, network.sizes, 0, rank.weights)
    counters = sum(held(replica=i).optimizer for i in range(2)) - 8 * rank.state.count
    assert counters % 4 == 0
    assert len(weights) * 4 <= counters <= (len(weights) + 1) * 4


@pytest.mark.parametrize("name", ["pp2", "pp2vpp2", "zbv", "uneven", "layout", "mtp1 pp2"])
def test_stages_hold_every_layer_once(name: str) -> None:
    held = [layer for stage in _network(layouts.flags_of(name)).stages() for layer in stage.layers]
    assert held == [0, 1, 2, 3]


def test_recomputation_never_takes_more() -> None:
    config = configuration(layouts.flags_of("pp2"))
    peaks = [
        [rank.activations for rank in memory(GptNetwork.of(with_recomputation(config, mode)))]
        for mode in ("none", "selective", "full")
    ]
    for none, selective, full in zip(*peaks, strict=True):
        assert none >= selective > full


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
    "--optimizer": ("adam", "muon", "sgd"),
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
    words = list(layouts.MODEL)
    for name in draw.sample(sorted(CHOICES), draw.randint(1, 4)):
        words += [name, str(draw.choice(CHOICES[name]))]
    return words + draw.sample(SWITCHES, draw.randint(0, 2))


def outcome(seed: int) -> str:
    """Return ``plan`` or ``errors``; anything else is a traceback."""
    draw = random.Random(-seed)
    world = draw.choice((1, 2, 4, 8, 12, 64))
    device, gpu = draw.choice(("cpu", "cuda")), draw.choice(sorted(GPUS))
    try:
        config = config_of(words_of(seed), ranks=world, device=device)
        model = padded_to_ranks(config.model, config.parallel, 500)
        config = dataclasses.replace(config, model=model)
        check_core(config)
        network = GptNetwork.of(config)
        assert all(rank.total > 0 for rank in memory(network))
        assert estimate(network, gpu_named(gpu)).seconds > 0
    except MegatronExtError as error:
        return "errors" if error.messages and all(map(str.strip, error.messages)) else "silence"
    return "plan"


@pytest.mark.parametrize("seeds", slow_but([range(300)], [range(300), range(300, 5300)]))
def test_random_runs_end_in_a_plan_or_in_sentences(seeds: range) -> None:
    counts, broken = {"plan": 0, "errors": 0}, list[str]()
    for seed in seeds:
        try:
            counts[outcome(seed)] += 1
        except (*CASUALTIES, ValueError, RuntimeError):
            said = traceback.format_exc(limit=-3)
            broken.append(f"{seed}: {' '.join(words_of(seed)[len(layouts.MODEL) :])}\n{said}")
    assert not broken, "\n".join(broken[:5])
    # A fuzz whose runs are all refused, or none, would show nothing.
    assert min(counts.values()) >= 50
