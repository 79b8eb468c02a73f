"""Over which links and how often the messages of a step go."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.hardware import DEFAULT, GAP, Rates
from megatron_ext.planning.memory import memory
from megatron_ext.planning.muon import muon_volume, muon_work
from megatron_ext.planning.network import Elements, Volume
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.step_time import Clock, estimate, step_volume, update_volume
from megatron_ext.planning.weights import Weight
from megatron_ext.text.cost.network import GptNetwork
from tests.planning.measure import configuration
from tests.text.cost import layouts
from tests.text.cost.layouts import llama, llama_network

SHARED = "--use-distributed-optimizer"


@dataclasses.dataclass(frozen=True)
class Spans(Rates):
    """Rates of a GPU whose links send one byte a second over one rank, 1 / span over more."""

    def link(self, span: int) -> float:
        return 1 / span

    def ring(self, ranks: int, stride: int = 1) -> float:
        return 1 / (ranks * stride)

    def all_to_all(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        return num_bytes * ranks * stride


def clock_of(more: str) -> Clock:
    return Clock(llama_network(more), Spans(GPUS["H100"]))


def test_messages_go_over_the_ranks_between_their_ends() -> None:
    """Neighbouring ranks share tensors, then come those of a sequence, replicas and stages."""
    four = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    clock = clock_of(four)
    assert clock.exchange(Volume(tensor=1)) == 2
    assert clock.exchange(Volume(context=1)) == 4
    assert clock.exchange(Volume(data=1, pipeline=1, embedding=1)) == 0
    experts = dataclasses.replace(clock.network.sizes, ep=4, etp=3)
    network: Any = SimpleNamespace(sizes=experts, config=clock.network.config)
    assert Clock(network, clock.rates).exchange(Volume(expert=1)) == 12
    assert clock.replicas(Volume(data=1)) == 8
    assert clock.latency() == 0
    stages = clock_of("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    assert stages.latency() == 8 * stages.network.boundary
    assert stages.replicas(Volume(embedding=1)) == 8
    # With stages before replicas, stages are neighbours of tensor-parallel ranks.
    mapped = clock_of(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    )
    assert mapped.latency() == 4 * mapped.network.boundary
    alone = clock_of("--pipeline-model-parallel-size 8")
    assert alone.replicas(Volume(data=1)) == 0


@pytest.mark.parametrize(
    ("more", "hidden"),
    [
        ("", 0),
        (SHARED, 0),
        ("--overlap-grad-reduce", 1),
        (f"{SHARED} --overlap-grad-reduce", 0.5),
        (f"{SHARED} --overlap-grad-reduce --overlap-param-gather", 1),
    ],
)
def test_overlap_hides_gradients_and_parameters_each_by_its_flag(more: str, hidden: float) -> None:
    shown = 1 - DEFAULT.hidden * hidden
    assert clock_of(more).replicas(Volume(data=1)) == pytest.approx(8 * shown)


def test_pairs_hide_the_hop_between_nodes_if_there_are_two() -> None:
    clock = clock_of("--num-experts 8 --expert-model-parallel-size 4")
    assert clock.hideable_exchange(Volume(expert=1, expert_in_node=1)) == 4
    assert clock.experts_exchange(Volume(expert=1, expert_in_node=1)) == 5
    assert clock.hideable_exchange(Volume(expert_in_node=1)) == 1


def test_a_pass_sends_half_of_the_messages() -> None:
    clock = clock_of("--tensor-model-parallel-size 2")
    (stage,) = clock.network.stages()
    passes = clock.durations(stage)
    silent = Clock(clock.network, dataclasses.replace(clock.rates))
    object.__setattr__(silent, "exchange", lambda _: 0.0)
    without = silent.durations(stage)
    half = clock.exchange(clock.network.traffic(stage)) / 2
    assert passes.forward - without.forward == pytest.approx(half)
    assert passes.input_gradient - without.input_gradient == pytest.approx(half)
    assert passes.weight_gradient == without.weight_gradient


def test_two_hops_follow_each_other() -> None:
    clock = Clock(llama_network(""), Rates(GPUS["H100"]))
    both = Volume(expert=1e9, expert_in_node=2e9)
    sizes = dataclasses.replace(clock.network.sizes, ep=16)
    network: Any = SimpleNamespace(sizes=sizes, config=clock.network.config)
    gpu = GPUS["H100"]
    seconds = (1e9 / gpu.network + 2e9 / gpu.link) / DEFAULT.links
    assert Clock(network, clock.rates).exchange(both) == pytest.approx(seconds)


def test_a_rank_with_two_chunks_takes_their_mean_and_the_slowest_decides() -> None:
    network = GptNetwork.of(configuration(layouts.flags_of("pp2vpp2")))
    clock = Clock(network, Rates(GPUS["H100"]))
    first, second = (clock.durations(stage).forward for stage in network.stages_of(1))
    assert first != second
    assert clock.rank_durations()[1].forward == pytest.approx((first + second) / 2)
    # The second rank of the other run has three of four layers, and the head.
    uneven = GptNetwork.of(configuration(layouts.flags_of("uneven")))
    assert Clock(uneven, clock.rates).slowest() == 1


def test_an_update_takes_its_kernels_the_gaps_between_them_and_its_messages() -> None:
    """Eight stages have no replicas; Muon's replicas are two tensor-parallel ranks apart."""
    clock = clock_of("--pipeline-model-parallel-size 8")
    rank = memory(clock.network)[3]
    (work,) = clock.update_work(rank)
    assert clock.after(rank) == pytest.approx(clock.rates.busy(work) + work.kernels * GAP)
    assert work.kernels * GAP > 0.01 * clock.after(rank)
    muon = clock_of(f"--optimizer muon {SHARED} --tensor-model-parallel-size 2")
    (rank,) = memory(muon.network)
    sent = update_volume(muon.network, rank)
    assert sent.data > 0 and sent.tensor > 0
    assert muon.update_exchange(rank) == pytest.approx(2 * sent.tensor + 8 * sent.data)


def test_the_step_ends_with_the_rank_that_updates_longest() -> None:
    more = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2"
    found = estimate(llama_network(more), GPUS["H100"])
    clock = Clock(found.network, found.rates)
    after = [clock.after(rank) for rank in found.ranks]
    assert after[0] < max(after)
    assert found.seconds == pytest.approx(found.price.makespan + max(after))
    # The first micro-batch passes three borders between stages, and so does the last gradient.
    passes = clock.rank_durations()[clock.slowest()]
    silent = found.network.schedule.time(passes).makespan
    assert found.price.makespan - silent >= 5.99 * clock.latency() > 0


def test_tokens_of_a_step_are_those_of_all_replicas() -> None:
    """The batch of 128 has one sample for each token of 8192, however it is cut."""
    for more in ("--micro-batch-size 2", "--tensor-model-parallel-size 2 --micro-batch-size 4"):
        found = estimate(llama_network(more), GPUS["H100"])
        assert found.tokens_per_second == pytest.approx(128 * 8192 / found.seconds)


def test_frozen_weights_are_not_sent_and_sharded_gradients_are_sent_each_time() -> None:
    """Adapters are sent as gradients and weights; the frozen weights stay where they are."""
    network = llama_network(f"{SHARED} --lora-rank 16")
    (rank,) = memory(network)
    state = rank.state
    trained = state.parameters - state.frozen
    assert 0 < trained < state.frozen / 50
    sent = step_volume(network, rank, 4)
    assert sent.data == pytest.approx(7 / 8 * (state.reduced + trained))
    sharded = llama_network(f"{SHARED} --data-parallel-sharding-strategy optim_grads")
    (rank,) = memory(sharded)
    state = rank.state
    often = step_volume(sharded, rank, 4).data
    assert often == pytest.approx(7 / 8 * (4 * state.reduced + state.parameters))


@pytest.mark.parametrize(("more", "width"), [("", 4), ("--grad-reduce-in-bf16", 2)])
def test_copies_of_the_embedding_send_their_gradients(more: str, width: int) -> None:
    flags = "--pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights"
    network = llama_network(f"{flags} {more}")
    for rank in memory(network):
        assert step_volume(network, rank, 4).embedding == width * 128256 * 4096


def test_experts_have_replicas_of_their_own() -> None:
    """A quarter of the weights are experts, of which 8 ranks hold two replicas."""
    network = llama_network(SHARED)
    (rank,) = memory(network)
    network = dataclasses.replace(network, sizes=dataclasses.replace(network.sizes, expert_dp=2))
    counted = Elements.of([Weight("a", 300), Weight("e", 100, expert=True)])
    object.__setattr__(network, "elements", lambda _: counted)
    sent = rank.state.reduced + rank.state.parameters
    found = step_volume(network, rank, 1)
    assert found.data == pytest.approx(sent * 7 / 8 * 3 / 4)
    assert found.expert_data == pytest.approx(sent * 1 / 2 / 4)


def test_muon_deals_the_matrices_of_experts_to_their_replicas() -> None:
    """A matrix [4, 6] of a layer is dealt to 4 × 2 replicas, one of an expert to 2."""
    ranks = dataclasses.replace(Ranks.of(llama()), dp=4, cp=2, expert_dp=2)
    flags = llama(f"--optimizer muon {SHARED}").optimizer
    one = 4 * 16 * 6 + 2 * 64
    steps = flags.muon_num_ns_steps
    dense = Weight("a", 24, matrix=(4, 6))
    expert = dataclasses.replace(dense, expert=True)
    frozen = dataclasses.replace(dense, frozen=True)
    for weight, dealt in ((dense, 8), (expert, 2)):
        (work,) = muon_work(flags, ranks, [weight, frozen, Weight("b", 7)])
        assert work.flops == pytest.approx(steps * one / dealt)
        assert work.kernels == pytest.approx(3 * steps / dealt)
        sent = muon_volume(flags, ranks, [weight, frozen])
        assert (sent.data, sent.tensor) == (pytest.approx(2 * 2 * (1 - 1 / dealt) / dealt * 24), 0)
    assert muon_work(flags, ranks, [frozen]) == []
    exact = dataclasses.replace(flags, muon_fp32_matmul_prec="highest")
    (work,) = muon_work(exact, ranks, [dense])
    assert work.width == 4
    assert muon_volume(exact, ranks, [dense]).data == 2 * muon_volume(flags, ranks, [dense]).data
    (work,) = muon_work(flags, ranks, [dense])
    assert work.width == 2
    # Two tensor-parallel ranks sum the small Gram matrix [4, 4] of their halves in each step.
    halves = dataclasses.replace(flags, muon_tp_mode="distributed")
    split = dataclasses.replace(dense, numel=12)
    sent = muon_volume(halves, ranks, [split])
    assert sent.tensor == pytest.approx(2 * 2 * 1 / 2 * steps * 16 / 8)
