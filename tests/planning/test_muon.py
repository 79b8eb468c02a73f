"""The planned cost of Muon's update of Llama 3 8B, by hand."""

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.memory import memory
from megatron_ext.planning.muon import muon_work
from megatron_ext.planning.state import rank_state
from megatron_ext.planning.step_time import (
    estimate,
    rank_volume,
    step_volume,
    update_volume,
)
from tests.text.cost import layouts

SHARED = "--use-distributed-optimizer"
LAYER = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
ELEMENTS = 32 * sum(rows * columns for rows, columns in LAYER.values())
OPERATIONS = 32 * sum(4 * 4096**2 * max(sizes) + 2 * 4096**3 for sizes in LAYER.values())


def cost(flags: str) -> tuple[float, float, float]:
    """Return operations of a rank, and the bytes that it sends to replicas and tensor ranks."""
    network = layouts.llama_network(f"--optimizer muon {flags}")
    (rank,) = memory(network)
    found = muon_work(network.config.optimizer, network.sizes, rank.all_weights)
    volume = update_volume(network, rank)
    outside = step_volume(network, rank, 3)
    assert rank_volume(network, rank, 3).total == pytest.approx(outside.total + volume.total)
    return sum(x.flops for x in found), volume.data, volume.tensor


def test_matrices_are_dealt_to_replicas_and_have_no_second_moment() -> None:
    flops, data, tensor = cost(SHARED)
    assert flops == pytest.approx(5 * OPERATIONS / 8)
    # 7/8 of a rank's eighth goes out as momenta, and comes back as directions, in bf16.
    assert data == pytest.approx(2 * 2 * 7 / 8 * ELEMENTS / 8) and not tensor
    others = 8_030_261_248 - ELEMENTS
    network = layouts.llama_network(f"--optimizer muon {SHARED}")
    weights = memory(network)[0].weights
    states = [rank_state(network.config, network.sizes, 0, weights, replica=x) for x in range(8)]
    total = sum(state.optimizer for state in states)
    assert total == pytest.approx(8 * ELEMENTS + 12 * others, rel=1e-5)
    # The buffer begins with the output layer and ends with the embedding, which are AdamW's.
    for replica in (0, 7):
        assert states[replica].optimizer > 1.1 * total / 8


def test_tensor_parallel_ranks_gather_matrices_or_sum_gram_matrices() -> None:
    tp = "--tensor-model-parallel-size 4"
    flops, data, tensor = cost(tp)
    assert flops == pytest.approx(5 * OPERATIONS) and not data
    assert tensor == pytest.approx(2 * 3 / 4 * ELEMENTS)
    flops, _, tensor = cost(f"{tp} --muon-tp-mode distributed")
    assert flops == pytest.approx(5 * OPERATIONS / 4)
    assert tensor == pytest.approx(2 * 5 * 2 * 3 / 4 * 32 * 4 * 4096**2)
    assert cost(f"{tp} --muon-tp-mode blockwise")[2] == 0


def test_the_update_takes_longer_than_that_of_adam() -> None:
    adam, muon = (
        estimate(layouts.llama_network(f"{SHARED} {flags}"), GPUS["H100"])
        for flags in ("", "--optimizer muon")
    )
    assert 1.0 < muon.seconds / adam.seconds < 1.2
