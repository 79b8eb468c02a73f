"""The time of a step by class of kernels."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.budget import budget, budget_sheet
from megatron_ext.planning.hardware import DEFAULT, GAP, Rates
from megatron_ext.planning.kernels import KINDS, Phase, Work, gradient_bytes, update_work
from megatron_ext.planning.memory import memory
from megatron_ext.planning.network import Network
from megatron_ext.planning.stages import LayerBytes, Stage
from megatron_ext.planning.step_time import estimate
from tests.text.cost.layouts import llama_network

H200 = GPUS["H200"]


@pytest.mark.parametrize(
    "layout",
    [
        "--use-distributed-optimizer",
        "--pipeline-model-parallel-size 4",
        "--tensor-model-parallel-size 4 --sequence-parallel --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "--fp8-format hybrid --fp8-recipe delayed",
        "--optimizer muon --use-distributed-optimizer --tensor-model-parallel-size 2",
    ],
)
def test_the_classes_make_up_the_whole_step(layout: str) -> None:
    found = estimate(llama_network(layout), H200)
    lines = budget(found)
    assert sum(line.seconds for line in lines) == pytest.approx(found.seconds)
    assert all(line.seconds > 0 for line in lines)
    kinds = [line.kind for line in lines]
    assert set(kinds) <= {*KINDS, "waiting"}
    assert ("waiting" in kinds) == ("pipeline" in layout)
    assert ("casts" in kinds) == ("fp8" in layout)
    assert "communication" in kinds


def test_a_shared_expert_hides_its_own_time_at_most() -> None:
    flags = (
        "--num-experts 8 --moe-shared-expert-intermediate-size 4096 --moe-ffn-hidden-size 4096 "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    )
    plain = estimate(llama_network(flags), H200)
    beside = estimate(llama_network(f"{flags} --moe-shared-expert-overlap"), H200)
    count = plain.network.num_microbatches
    shared = 6 * 32 * 3 * 4096 * 4096 * plain.network.tokens * count
    most = shared / (H200.bf16 * DEFAULT.products * DEFAULT.layers)
    assert 0 < plain.seconds - beside.seconds <= most
    assert sum(line.seconds for line in budget(beside)) == pytest.approx(beside.seconds)


def test_a_class_takes_the_time_of_its_operations_and_bytes() -> None:
    found = estimate(llama_network("--global-batch-size 8"), H200)
    lines = {line.kind: line for line in budget(found)}
    # Eight replicas of 8.03 billion weights, one micro-batch of 8192 tokens each.
    linear = 6 * 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) * 8192
    rate = H200.bf16 * DEFAULT.products * DEFAULT.layers
    assert lines["linear"].seconds == pytest.approx(linear / rate)
    streams = H200.memory_bandwidth * DEFAULT.copies * DEFAULT.streams
    assert lines["logits"].seconds == pytest.approx(6 * 8192 * 128256 / streams)
    assert lines["gaps"].seconds == pytest.approx(lines["gaps"].kernels * GAP)
    assert lines["gaps"].rates == "5 µs a kernel"
    assert lines["linear"].rates.split(", ")[0] == f"{rate / 1e12:.0f} TFLOP/s"
    assert lines["logits"].rates == f"{streams / 1e12:.2f} TB/s"
    counted = sum(line.kernels for kind, line in lines.items() if kind != "gaps")
    assert counted == pytest.approx(lines["gaps"].kernels)


def test_the_classes_are_those_of_the_slowest_rank() -> None:
    """The second of two ranks has 20 of 32 layers, and the head."""
    more = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 12"
    found = estimate(llama_network(more), H200)
    lines = {line.kind: line for line in budget(found)}
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert lines["linear"].flops == 32 * 6 * 20 * layer * 8192
    assert lines["head"].flops == 32 * 6 * 4096 * 128256 * 8192


def test_messages_and_gaps_are_those_of_all_micro_batches() -> None:
    """Eight tensor-parallel ranks, two micro-batches: only they have messages."""
    found = estimate(llama_network("--tensor-model-parallel-size 8 --global-batch-size 2"), H200)
    lines = {line.kind: line for line in budget(found)}
    gather = 7 / 8 * 8192 * 4096 * 2
    assert lines["communication"].num_bytes == pytest.approx(2 * (32 * 8 + 4) * gather)
    graphed = estimate(llama_network("--cuda-graph-impl local"), H200)
    (gaps,) = [line for line in budget(graphed) if line.kind == "gaps"]
    # The loss and the update are not in graphs.
    assert gaps.rates == "5 µs a kernel, 4.6 in graphs"
    assert 4.6e-6 * gaps.kernels < gaps.seconds < 5e-6 * gaps.kernels


def test_attention_has_a_rate_for_each_direction() -> None:
    rates = Rates(H200)
    forward, backward = (Work("attention", x, flops=1e12) for x in (Phase.FORWARD, Phase.INPUT))
    large = H200.bf16 * DEFAULT.products
    assert rates.busy(forward) == pytest.approx(1e12 / large / DEFAULT.attention_forward)
    assert rates.busy(backward) == pytest.approx(1e12 / large / DEFAULT.attention_backward)


def test_bytes_of_an_update_by_weight() -> None:
    """Alone a rank moves 34 bytes a weight; over 8 replicas it updates an eighth of them."""
    alone, shared = (llama_network(x) for x in ("", "--use-distributed-optimizer"))
    found = []
    for network in (alone, shared):
        (rank,) = memory(network)
        (work,) = update_work(network.config.optimizer, network.sizes, rank.state)
        found.append(work.num_bytes / rank.state.count)
    assert found == pytest.approx([34, 34 / 8], rel=1e-3)


def test_the_table_says_the_share_of_the_matrix_rate() -> None:
    found = estimate(llama_network(), H200)
    shown = str(budget_sheet(found).caption)
    reached = f"at {H200.bf16 * DEFAULT.products / 1e12:.0f} TFLOP/s"
    assert f"{reached}, take {found.matrix_share:.1%} of it" in shown
    assert "where flash attention 3 is installed" in shown
    assert "flash attention 3" not in str(
        budget_sheet(estimate(llama_network(), GPUS["B200"])).caption
    )
    assert found.mfu == pytest.approx(found.matrix_share * DEFAULT.products)


def test_sums_of_weight_gradients_cost_more_after_the_first_micro_batch() -> None:
    """A product writes 4 bytes, later reads 4 too; in 8 bits another kernel moves 12 more."""
    assert [gradient_bytes(count) for count in (1, 4)] == [2, (2 + 3 * 6) / 4]
    assert [gradient_bytes(count, "delayed") for count in (1, 4)] == [2, (2 + 3 * 14) / 4]
    assert gradient_bytes(4, overwrites=False) == 6
    assert [gradient_bytes(count, "rowwise") for count in (1, 4)] == [6, (6 + 3 * 18) / 4]


def test_a_network_that_counts_no_kernels_moves_what_autograd_keeps() -> None:
    """The bytes once forward and twice backward, in 36 kernels a layer, a third of them forward."""
    network: Any = SimpleNamespace(activations=lambda _: LayerBytes(300, 7))
    stage = Stage.of_layers([4, 5], 0, 1)
    assert Network.other_work(network, stage) == [
        Work("pointwise", Phase.FORWARD, num_bytes=300, kernels=24),
        Work("pointwise", Phase.INPUT, num_bytes=600, kernels=48),
    ]


def test_the_work_of_several_micro_batches_has_all_their_kernels() -> None:
    one = Work("casts", Phase.INPUT, flops=2.0, num_bytes=3.0, kernels=5.0, width=1, graphed=True)
    assert one * 4 == Work("casts", Phase.INPUT, 8.0, 12.0, 20.0, width=1, graphed=True)
