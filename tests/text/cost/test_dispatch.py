"""The bytes of tokens on their way to experts, against every choice that a token can make."""

from itertools import combinations

import pytest

from megatron_ext.text.cost.dispatch import dispatched, share_with
from tests.text.cost.layouts import llama_network

EXPERTS, TOPK = 8, 3


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
