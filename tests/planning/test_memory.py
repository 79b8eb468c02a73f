"""The memory of ranks and hosts: what counts at the peak, and which flags would fit."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.device.host import this_host
from megatron_ext.errors import ConfigError
from megatron_ext.planning import memory as memory_module
from megatron_ext.planning.hardware import size
from megatron_ext.planning.host_memory import check_host_memory
from megatron_ext.planning.memory import fullest, memory, moments, peak_of, worst_case
from megatron_ext.planning.network import Case, Network, fp8_bytes
from megatron_ext.planning.pipeline import Schedule
from megatron_ext.planning.products import Linear
from megatron_ext.planning.stages import LayerBytes, Ranks, Stage, in_order, recomputed
from megatron_ext.planning.state import (
    State,
    _at_once,
    _filled,
    _share,
    buckets,
    optimizer_bytes,
    rank_state,
    unit_of,
)
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.planning.weights import Weight, distinct, weights_of, with_frozen
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import COMPUTE, Kind
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.task_cost import GPT_COST, with_recomputation
from megatron_ext.text.task import GPT
from tests.planning.measure import configuration
from tests.text.cost import layouts
from tests.text.cost.layouts import llama_network
from tests.training_runs import config_of


def test_the_peak_is_the_largest_sum_of_what_is_kept_and_what_lasts_a_moment() -> None:
    """The first stage keeps little and needs much for a moment, the second the other way round."""
    plan = build_plan("interleaved", pipeline_size=1, num_microbatches=1, num_chunks=2)
    costs = [LayerBytes(5, 100), LayerBytes(30, 1)]
    # Forward of both stages: 5 + 100 at the first, 35 + 1 at the second; going back, 5 + 100.
    assert peak_of(moments(plan, 0), costs) == (5, 100, 1)
    assert peak_of(moments(plan, 0), [LayerBytes(5, 20), LayerBytes(30, 1)]) == (35, 1, 2)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)],
)
def test_a_walk_counts_what_is_held_at_its_peak(schedule: str, chunks: int) -> None:
    """Stages of unlike sizes have their peak in the middle of a step; sets show what is held.

    A message that has arrived has a buffer until a computation takes it.
    """
    plan = build_plan(schedule, pipeline_size=2, num_microbatches=6, num_chunks=chunks)
    draw = random.Random(3)
    for _ in range(20):
        num_stages = 2 * chunks
        costs = [LayerBytes(draw.randrange(1, 99), draw.randrange(99)) for _ in range(num_stages)]
        deferred = [draw.randrange(99) for _ in range(num_stages)]
        boundary = draw.randrange(1, 99)
        for rank in range(2):
            held: dict[tuple[int, int], int] = {}
            inputs = set[tuple[int, int]]()
            gradients = set[tuple[int, int]]()
            peaks = []
            for action in plan.ranks[rank]:
                one = action.microbatch, action.stage
                if action.kind not in COMPUTE:
                    inputs |= {one} if action.kind is Kind.RECEIVE_INPUT else set()
                    gradients |= {one} if action.kind is Kind.RECEIVE_GRADIENT else set()
                    continue
                if action.kind is Kind.FORWARD:
                    held[one] = costs[action.stage].kept  # The layers count their input.
                    inputs.discard(one)
                kept = sum(held.values()) + boundary * len(inputs | gradients)
                peaks.append((kept, costs[action.stage].transient, len(held)))
                gradients.discard(one)
                if action.kind is Kind.INPUT:
                    held[one] = deferred[action.stage]
                elif action.kind is not Kind.FORWARD:
                    del held[one]
            assert not held and not inputs and not gradients
            peak = max(peaks, key=lambda at: at[0] + at[1])
            assert peak_of(moments(plan, rank), costs, deferred=deferred, boundary=boundary) == peak


class Fake(SimpleNamespace):
    """A network whose formulas a test gives; each stage is of its own kind."""

    kind = Network.kind
    of_stages = Network.of_stages
    draws_by_name = True


def test_the_memory_of_a_rank_is_that_of_all_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of unlike size on one rank; of the zero-bubble schedule each keeps a rest."""
    monkeypatch.setattr(memory_module, "rank_state", lambda *_, **options: State(parameters=1000))
    stages = [Stage(index, 0, index, (index,), 0, False, False, False) for index in range(2)]
    eight = {0: 5, 1: 11}
    network: Any = Fake(
        config=None,
        states={},
        sizes=SimpleNamespace(pp=1),
        schedule=Schedule("interleaved", 1, 1, 2, None),
        boundary=0,
        stages=lambda: stages,
        activations=lambda stage: LayerBytes((30, 70)[stage.index], 1),
        deferred=lambda _: 0,
        parameters=lambda _: (),
        fp8_weights=lambda stage: eight[stage.index],
        hosted=lambda _: 0,
    )
    (rank,) = memory(network)
    assert (rank.fp8_weights, rank.activations, rank.transient) == (16, 100, 1)
    assert rank.total == 1000 + 16 + 100 + 1


def test_the_memory_of_a_rank_has_what_waits_and_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rank holds two micro-batches, the second one; each has one message waiting."""
    monkeypatch.setattr(memory_module, "rank_state", lambda *_, **options: State())
    stages = [Stage.of_layers([index], index, 2, rank=index) for index in range(2)]
    schedule = Schedule("zb-h1", 2, 6, 1, None)
    peaks = {(0, 0): [200, 100], (40, 0): [200, 140], (0, 300): [500, 400]}
    for (deferred, boundary), expected in peaks.items():
        network: Any = Fake(
            config=None,
            states={},
            sizes=SimpleNamespace(pp=2),
            schedule=schedule,
            boundary=boundary,
            stages=lambda: stages,
            activations=lambda _: LayerBytes(100, 0),
            deferred=lambda _, each=deferred: each,
            parameters=lambda _: (),
            fp8_weights=lambda _: 0,
            hosted=lambda _: 0,
        )
        assert [rank.activations for rank in memory(network)] == expected


def test_what_runs_after_another_is_freed_first() -> None:
    """Going back, the last part is freed before the first one needs its moment."""
    assert in_order(LayerBytes(10, 7), LayerBytes(20, 3)) == LayerBytes(30, 3)
    assert in_order(LayerBytes(10, 40), LayerBytes(20, 3)) == LayerBytes(30, 20)
    assert in_order() == LayerBytes(0, 0)


def test_groups_of_recomputed_layers_keep_their_inputs() -> None:
    layers = [LayerBytes(10 + i, 3) for i in range(5)]
    found = recomputed(layers, 2, size=2, limit=5)
    assert found == [LayerBytes(2, 10 + 11 + 3), LayerBytes(2, 12 + 13 + 3), LayerBytes(2, 14 + 3)]
    assert recomputed(layers, 2, size=1, limit=2) == [
        LayerBytes(2, 13), LayerBytes(2, 14), *layers[2:],
    ]  # fmt: skip
    assert recomputed(layers, 2, size=1, limit=0) == layers


def test_a_bucket_ends_when_it_is_full_and_at_what_replicas_share() -> None:
    weights = [Weight(name, 128) for name in "abcde"]
    full = buckets(weights, distributed=True, replicas=2, bucket_size=256)
    assert [(x.start, x.end, len(x.spans)) for x in full] == [
        (0, 256, 2),
        (256, 512, 2),
        (512, 640, 1),
    ]
    # 3 replicas share multiples of 3 and of 128; 256 replicas multiples of 256.
    for replicas, end in ((3, 768), (4, 640), (256, 768)):
        (one,) = buckets(weights, distributed=True, replicas=replicas, bucket_size=None)
        assert one.end == end
    plain = buckets(
        [Weight("a", 100), Weight("b", 56)], distributed=False, replicas=4, bucket_size=56
    )
    assert [(x.start, x.end) for x in plain] == [(0, 56), (56, 156)]
    (bucket,) = buckets(
        [Weight("a", 100, matrix=(10, 10)), Weight("b", 60)],
        distributed=True, replicas=2, bucket_size=None,
    )  # fmt: skip
    # b lies at 0 to 60 and a at 64 to 164 of 256; the halves end at 128.
    assert [_share(bucket, replica, 2) for replica in (0, 1)] == [(124, 2, 64), (36, 1, 36)]
    assert _share(bucket, 0, 1) == (160, 2, 100)


def test_buckets_of_sharded_gradients_that_are_in_memory_at_a_time() -> None:
    """The last bucket and the two or three largest neighbours before it."""
    ends = [10, 14, 34, 41, 50, 57]
    laid: list[Any] = [
        SimpleNamespace(start=start, end=end) for start, end in zip([0, *ends], ends, strict=False)
    ]
    assert _filled(laid, 2) == 7 + 27
    assert _filled(laid, 3) == 7 + 36
    assert _filled(laid[:1], 3) == 10


def test_the_state_of_an_optimizer_has_its_moments_and_formats() -> None:
    """Bytes of state per weight, and of averages, on one rank."""
    per_weight = {
        "--bf16": (12, 0),
        "": (8, 0),
        "--bf16 --ema-decay 0.9": (12, 4),
        "--bf16 --ema-decay 0": (12, 0),
        "--bf16 --optimizer sgd": (8, 0),
        "--optimizer sgd": (4, 0),
        "--optimizer sgd --sgd-momentum 0": (0, 0),
        "--bf16 --optimizer sgd --sgd-momentum 0": (4, 0),
    }
    for flags, (state, average) in per_weight.items():
        config = config_of([*layouts.MODEL, *flags.split()])
        model = dataclasses.replace(config.model, padded_vocab_size=512)
        (rank,) = memory(GptNetwork.of(dataclasses.replace(config, model=model)))
        count = rank.state.count
        counters = 4 * len(rank.all_weights) if "sgd" not in flags else 0
        assert rank.state.optimizer == state * count + counters, flags
        assert rank.state.average == average * count, flags


def test_a_sharded_layer_and_its_adapter_have_parts_on_several_ranks() -> None:
    """12 outputs on 2 ranks and 6 inputs on 3, of each of 7 experts; rank 5."""
    layer = Linear("linear_proj", 12, 6, rows=2, columns=3, copies=7, expert=True)
    adapted = LoraConfig(lora_rank=5, lora_target_modules=["linear_proj"])
    found = weights_of(layer, adapted, "mlp.")
    assert [(weight.name, weight.numel, weight.parts, weight.expert) for weight in found] == [
        ("mlp.linear_proj.weight", 6 * 2, 2 * 3 * 7, True),
        ("mlp.linear_proj.bias", 6, 2 * 7, True),
        ("mlp.linear_proj.lora.a", 5 * 2, 3 * 7, True),
        ("mlp.linear_proj.lora.b", 6 * 5, 2 * 7, True),
    ]
    assert found[0].matrix == (12, 6)
    assert len(weights_of(layer, LoraConfig(lora_rank=5, lora_target_modules=["linear"]))) == 2
    frozen = with_frozen(adapted, found)
    assert [weight.frozen for weight in frozen] == [True, True, False, False]
    # All of it over all ranks, and a table of the vocabulary with a copy on another stage.
    table = Weight("embedding", 100, parts=2, shared=True)
    numbers = 7 * (12 * 6 + 12 + 5 * 6 + 12 * 5) + 2 * 100
    assert distinct([[*found, table], [table]]) == numbers


def test_moments_have_their_own_formats() -> None:
    """Muon updates 40 of 100 elements of 3 parameters, which have no second moment."""
    flags = dataclasses.replace(
        layouts.llama().optimizer, optimizer="muon", exp_avg_dtype="bf16", exp_avg_sq_dtype="fp32"
    )
    assert optimizer_bytes(flags, 100, 3, 40, half=True) == 100 * (4 + 2) + 60 * 4 + 3 * 4
    other = dataclasses.replace(flags, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp16")
    assert optimizer_bytes(other, 100, 3, 40, half=False) == 100 * 4 + 60 * 2 + 3 * 4


def test_only_the_first_chunk_of_a_model_has_several_buckets() -> None:
    """Each of two weights fills a bucket of 128, in which both have room; a number has 2 bytes."""
    config = layouts.llama("--use-distributed-optimizer --overlap-grad-reduce")
    ranks = Ranks.of(config)
    chunk = [Weight("a", 60), Weight("b", 60)]
    flags = dataclasses.replace(config.optimizer, ddp_bucket_size=60)
    sharded = dataclasses.replace(flags, data_parallel_sharding_strategy="optim_grads")
    for optimizer, rank, elements in (
        (flags, 0, 256 + 128), (flags, 1, 128 + 128), (sharded, 0, 512), (sharded, 1, 512),
    ):  # fmt: skip
        run = dataclasses.replace(config, optimizer=optimizer)
        assert rank_state(run, ranks, rank, [chunk, chunk]).parameters == 2 * elements


def test_dense_weights_and_experts_have_shares_of_their_own() -> None:
    """8 replicas share 896 numbers with 800 weights, 2 replicas of an expert 128 with 100."""
    config = layouts.llama("--use-distributed-optimizer")
    ranks = dataclasses.replace(Ranks.of(config), expert_dp=2)
    chunk = [Weight("a", 800), Weight("e", 100, expert=True)]
    for replica, expert_replica, updated in ((0, 1, 112 + 36), (7, 0, 16 + 64), (7, 1, 16 + 36)):
        state = rank_state(
            config, ranks, 0, [chunk], replica=replica, expert_replica=expert_replica
        )
        assert (state.updated, state.count) == (updated, 900)


def test_weights_in_8_bits_have_a_transposed_copy() -> None:
    weights = [Weight("decoder.layers.0.mlp.linear_fc1.weight", 10), Weight("a.linear_fc1.bias", 5)]
    weights += [Weight("output_layer.weight", 3), Weight("x.linear_q_up_proj.weight", 20)]
    fp8 = layouts.llama().fp8
    assert fp8_bytes(fp8, weights) == 2 * 30
    assert fp8_bytes(dataclasses.replace(fp8, fp8_param_gather=True), weights) == 30


def test_a_rank_sends_to_both_neighbours_of_each_of_its_stages() -> None:
    """The first and the last of four stages on two ranks have one neighbour."""
    network = GptNetwork.of(configuration(layouts.flags_of("pp2vpp2")))
    boundary = network.boundary
    assert boundary == 128 * 2 * 64 * 4
    assert [network.messages(stage) / boundary for stage in network.stages()] == [1, 2, 2, 1]
    assert [stage.index for stage in network.stages_of(1)] == [1, 3]
    assert [stage.chunk for stage in network.stages_of(0)] == [0, 1]
    alone = GptNetwork.of(configuration(layouts.MODEL))
    assert alone.messages(alone.stages()[0]) == 0


def test_graphs_allow_no_recomputation() -> None:
    graphs = layouts.llama().cuda_graphs
    assert GPT_COST.modes_with(graphs) == ("none", "selective", "full")
    local = dataclasses.replace(graphs, cuda_graph_impl="local")
    assert GPT_COST.modes_with(local) == ("none",)


def test_the_kind_of_batch_with_the_highest_peak_decides() -> None:
    small, large = (llama_network(f"--micro-batch-size {x}") for x in (1, 2))
    for cases in ((small, large), (large, small)):
        network, ranks = worst_case([Case(x) for x in cases])
        assert network is large
        assert fullest(ranks).total == max(rank.total for rank in memory(large))


def test_a_step_has_at_least_one_micro_batch() -> None:
    config = layouts.llama("--global-batch-size 16 --micro-batch-size 2")
    assert Schedule.of(config.parallel, config.training).num_microbatches == 1
    four = layouts.llama("--global-batch-size 64 --micro-batch-size 2")
    assert Schedule.of(four.parallel, four.training).num_microbatches == 4


HOST = "megatron_ext.planning.host_memory.this_host"
WORDS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 12 --global-batch-size 24 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --padded-vocab-size 128 "
    "--train-iters 1 --attention-dropout 0 --hidden-dropout 0"
)


def least(config: Any) -> int:
    """Return the bytes of one pipeline's state and of one micro-batch's activations."""
    network = GptNetwork.of(config)
    kept = sum(network.activations(stage).kept for stage in network.stages())
    return kept + sum(rank.state.total for rank in memory(network))


def refusal(config: Any, bytes_of_host: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    host = dataclasses.replace(this_host(), memory=bytes_of_host)
    monkeypatch.setattr(HOST, lambda: host)
    try:
        check_host_memory(config, GPT.cost)
    except ConfigError as error:
        return str(error)
    return None


def test_the_first_flags_that_fit_a_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(WORDS)

    def needed(micro_batch: int, mode: str = "none") -> int:
        training = dataclasses.replace(config.training, micro_batch_size=micro_batch)
        return least(with_recomputation(dataclasses.replace(config, training=training), mode))

    full = "`--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`"
    assert refusal(config, needed(12), monkeypatch) is None
    told = refusal(config, needed(12) - 1, monkeypatch)
    assert told is not None and f"at least {size(needed(12))} on this machine for 1 rank(s)" in told
    # Micro-batches must divide the given one: 12 has none between 6 and 12.
    assert told.endswith(f"; `--micro-batch-size 6` needs at least {size(needed(6))}.")
    told = refusal(config, needed(6) - 1, monkeypatch)
    assert told is not None and "; `--micro-batch-size 4` needs" in told
    assert needed(1) > needed(4, "full")
    told = refusal(config, needed(1) - 1, monkeypatch)
    assert told is not None and (
        f"; {full} needs" in told or f"` and {full} needs at least" in told
    )
    told = refusal(config, needed(1, "full") - 1, monkeypatch)
    assert told is not None and told.endswith("; no smaller micro-batch alone would fit.")
    single = config_of(f"{WORDS} --micro-batch-size 1")
    told = refusal(single, needed(1, "full"), monkeypatch)
    assert told is not None and told.endswith(f"; {full} needs at least {size(needed(1, 'full'))}.")


def test_a_host_holds_its_own_ranks_of_each_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks in two pipelines of two stages may be on another machine."""
    config = config_of([*WORDS.split(), *"--pipeline-model-parallel-size 2".split()], ranks=4)
    whole = least(config)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert refusal(config, 2 * whole, monkeypatch) is None
    told = refusal(config, 2 * whole - 1, monkeypatch)
    assert told is not None and "on this machine for 4 rank(s)" in told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert refusal(config, whole, monkeypatch) is None
    assert "for 2 rank(s)" in str(refusal(config, whole - 1, monkeypatch))


def test_only_runs_on_cpus_with_a_cost_of_their_flags_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(WORDS)
    assert refusal(config, 1, monkeypatch) is not None
    check_host_memory(config, None)
    check_host_memory(config, dataclasses.replace(GPT_COST, from_flags=False))
    check_host_memory(config, TaskCost())
    assert refusal(config_of(WORDS, device="cuda"), 1, monkeypatch) is None


def test_ends_of_a_model_without_depths() -> None:
    stages = [Stage.of_layers([index], index, 3) for index in range(3)]
    assert [stage.embedding for stage in stages] == [True, False, False]
    assert [(stage.final_norm, stage.head) for stage in stages] == [(False, False)] * 2 + [
        (True, True)
    ]


def test_sharded_weights_that_are_in_memory_at_a_time() -> None:
    """Two neighbours; a depth beside the embedding, whose weight the output layer may have."""
    layers = [("embedding.word_embeddings", 50), ("decoder.layers.0", 30), ("decoder.layers.1", 40)]
    assert _at_once(layers) == 50 + 40  # a tied output layer beside the last layer
    assert _at_once([*layers, ("output_layer", 45)]) == 85
    assert _at_once([*layers, ("mtp.layers.0", 35), ("output_layer", 45)]) == 50 + 35 + 45
    assert _at_once(layers[1:]) == 70
    assert _at_once([]) == 0
    names = ["decoder.layers.10.mlp.weight", "decoder.final_layernorm.weight", "embedding.weight"]
    assert [unit_of(x) for x in names] == [
        "decoder.layers.10", "decoder.final_layernorm", "embedding",
    ]  # fmt: skip


def test_the_buckets_of_sharded_weights_are_layers() -> None:
    """Each parameter ends at a multiple of 128, and 8 ranks hold an eighth of each layer."""
    config = layouts.llama("--use-distributed-optimizer")
    ranks = Ranks.of(config)
    chunk = [Weight(f"layers.{i}.{x}", 100) for i in range(3) for x in "ab"]
    chunk += [Weight("layers.3.e", 60, expert=True)]
    flags = dataclasses.replace(
        config.optimizer, data_parallel_sharding_strategy="optim_grads_params"
    )
    state = rank_state(
        dataclasses.replace(config, optimizer=flags), dataclasses.replace(ranks, expert_dp=1), 0,
        [chunk],
    )  # fmt: skip
    dense, expert = 6 * 128, 128
    # Experts without copies stay; two layers have memory at a time.
    assert state.parameters == 2 * (dense // 8 + expert + 2 * 256)
    assert state.gathered == 2 * (dense + expert)
    assert state.setup == 0
