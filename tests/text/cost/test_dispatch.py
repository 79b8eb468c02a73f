"""The bytes of tokens on their way to experts, against every choice that a token can make."""

from itertools import combinations

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.kernels import Phase
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.dispatch import cast_work, dispatched, kept_tokens, share_with
from tests.text.cost.layouts import llama_network

EXPERTS, TOPK = 8, 3
H100 = GPUS["H100"]


def enumerated(block: int, groups: int, allowed: int) -> float:
    """Return the share of all choices of experts that have one of the first ``block`` experts."""
    size = EXPERTS // groups
    choices = [
        choice
        for opened in combinations(range(groups), allowed)
        for choice in combinations([n for n in range(EXPERTS) if n // size in opened], TOPK)
    ]
    return sum(min(choice) < block for choice in choices) / len(choices)


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "allowed"), [(1, 1), (4, 2), (2, 1), (4, 4)])
def test_a_share_of_the_tokens_chooses_an_expert_of_a_node(
    block: int, groups: int, allowed: int
) -> None:
    limits = f"--moe-router-num-groups {groups} --moe-router-group-topk {allowed}"
    moe = llama_network(f"--num-experts {EXPERTS} --moe-router-topk {TOPK} {limits}").moe
    assert share_with(moe, block) == pytest.approx(enumerated(block, groups, allowed))


def test_tokens_that_make_two_hops_go_once_to_each_node_and_rank() -> None:
    """The experts are on 2 nodes of 2 ranks; each rank has two."""
    flags = (
        f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --expert-model-parallel-size 4 "
        "--moe-token-dispatcher-type flex --moe-ranks-per-node"
    )
    network = llama_network(f"{flags} 2")
    found = dispatched(network)
    x = network.sizes
    row = 2 * x.h * x.width
    to_node = enumerated(4, 1, 1)
    to_rank = enumerated(2, 1, 1)
    assert found.expert == pytest.approx(x.tokens * to_node * (row + 4 * x.width))
    assert found.expert_in_node == pytest.approx(2 * x.tokens * to_rank * (row + 2 * x.width))
    one = dispatched(llama_network(f"{flags} 4"))
    assert one.expert == 0
    assert one.expert_in_node == pytest.approx(3 * x.tokens * to_rank * (row + 2 * x.width))
    shared = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"
    parts = dispatched(llama_network(f"{flags} 4 {shared}"))
    assert parts.expert == pytest.approx(found.expert / 2)
    assert parts.expert_in_node == pytest.approx(
        found.expert_in_node / 2 + TOPK * x.tokens * row / 2
    )


def test_each_hop_casts_its_rows_to_8_bits_and_back() -> None:
    flags = (
        f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --expert-model-parallel-size 4 "
        "--moe-ranks-per-node 2 --moe-token-dispatcher-type"
    )
    there = "--moe-dispatch-fwd-dtype fp8"
    plain = llama_network(f"{flags} alltoall {there}")
    x = plain.sizes
    (work,) = cast_work(plain)
    assert work.phase is Phase.FORWARD
    assert work.num_bytes == x.tokens * TOPK * x.h * (33 + 21)
    hops = cast_work(llama_network(f"{flags} flex {there} --moe-combine-bwd-dtype fp8"))
    assert [each.phase for each in hops] == [Phase.FORWARD, Phase.INPUT]
    rows = x.tokens * (2 * enumerated(4, 1, 1) + 4 * enumerated(2, 1, 1))
    assert hops[1].num_bytes == pytest.approx(rows * x.h * (33 + 21))
    assert cast_work(llama_network(f"{flags} flex")) == []
    alone = there.replace("fp8", "bf16")
    assert (
        estimate(plain, H100).seconds
        != estimate(llama_network(f"{flags} alltoall {alone}"), H100).seconds
    )


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex --moe-ranks-per-node 2"])
@pytest.mark.parametrize(
    ("recomputation", "output"),
    [
        ("--moe-layer-recompute", 0),
        (f"{FULL} 1", 0),
        (f"{FULL} 2", 1),
        (f"{FULL} 1 --sandwich-norm", 1),
    ],
)
def test_kept_tokens_save_the_exchanges_of_the_second_forward_pass(
    dispatcher: str, recomputation: str, output: int
) -> None:
    flags = (
        f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --expert-model-parallel-size 4 "
        f"--moe-token-dispatcher-type {dispatcher}"
    )
    plain, twice, once = (
        llama_network(f"{flags} {more}")
        for more in ("", recomputation, f"{recomputation} --moe-keep-dispatched-tokens")
    )
    exchanged = dispatched(plain)
    for network, times in ((plain, 2), (twice, 3), (once, 2)):
        found = network.layer_traffic("*E")
        assert found.expert == pytest.approx(times * exchanged.expert)
        assert found.expert_in_node == pytest.approx(times * exchanged.expert_in_node)
    assert kept_tokens(twice) == 0
    x = once.sizes
    row = x.h * x.width
    rows = float(TOPK * (row + x.width))
    if dispatcher.startswith("flex"):
        # 4 ranks have 2 experts each, whose scores come along; those of 4 experts come to a node.
        rows = 4 * enumerated(2, 1, 1) * (row + 2 * x.width) + 2 * enumerated(4, 1, 1) * 4 * x.width
    assert kept_tokens(once) == pytest.approx(x.tokens * (rows + EXPERTS + output * row), rel=1e-6)
    layers = len(once.sizes.kinds)
    (stage,) = once.stages()
    more = once.activations(stage).kept - twice.activations(stage).kept
    assert more == layers * kept_tokens(once)


def test_layers_beyond_the_recomputed_block_exchange_nothing_again() -> None:
    flags = f"--num-experts {EXPERTS} --expert-model-parallel-size 4"
    block = f"{FULL} 8 --recompute-method block"
    plain, some = (llama_network(f"{flags} {more}") for more in ("", block))
    (stage,) = plain.stages()
    once, found = (network.traffic(stage).expert for network in (plain, some))
    assert found == pytest.approx(once * (1 + 8 / 32 / 2))


@pytest.mark.parametrize(("name", "block"), [("fp8", 128), ("mxfp8", 32)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "flex --moe-ranks-per-node 2"])
def test_rows_in_8_bits_take_half_the_way_to_their_experts(
    dispatcher: str, name: str, block: int
) -> None:
    flags = (
        f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --expert-model-parallel-size 4 "
        f"--moe-layer-recompute --moe-keep-dispatched-tokens --moe-token-dispatcher-type "
    )
    plain, there, both = (
        llama_network(f"{flags}{dispatcher} {more}")
        for more in (
            "",
            f"--moe-dispatch-fwd-dtype {name}",
            f"--moe-dispatch-fwd-dtype {name} --moe-combine-bwd-dtype {name}",
        )
    )
    x = plain.sizes
    saved = x.h * (x.width - 1 - 1 / block)
    copies = {"expert": 3 / 4 * TOPK, "expert_in_node": 0.0}
    kept = float(TOPK)
    if dispatcher.startswith("flex"):
        copies = {"expert": enumerated(4, 1, 1), "expert_in_node": 2 * enumerated(2, 1, 1)}
        kept = 4 * enumerated(2, 1, 1)
    for network, times in ((there, 1), (both, 2)):
        for kind, count in copies.items():
            less = getattr(plain.layer_traffic("*E"), kind)
            less -= getattr(network.layer_traffic("*E"), kind)
            assert less == pytest.approx(times * count * x.tokens * saved)
        less = kept_tokens(plain) - kept_tokens(network)
        assert less == pytest.approx(kept * x.tokens * saved, rel=1e-6)
    assert dispatched(both, backward=True) == dispatched(both)
    assert dispatched(there, backward=True) == dispatched(plain)
