"""The bytes that a rank sends to bring tokens to their experts and outputs back.

Tokens are assumed to choose their experts at random, each expert as likely as any other.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.network import Volume, ring
from megatron_ext.planning.stages import FP32

if TYPE_CHECKING:
    from megatron_ext.text.config.moe import MoEConfig
    from megatron_ext.text.cost.flops import GptRun


def dispatched(run: GptRun) -> Volume:
    """Return the bytes of one layer's forward pass: tokens that go to experts, and outputs back."""
    x = run.sizes
    moe = run.moe
    tokens = x.residual_tokens * x.h * x.width
    if moe.moe_token_dispatcher_type == "allgather":
        return Volume(expert=2 * (x.ep * x.etp - 1) * tokens)
    copies = tokens * moe.moe_router_topk
    if moe.moe_token_dispatcher_type == "flex":
        return _two_hops(run) + Volume(expert_in_node=2 * (x.etp - 1) * copies)
    return Volume(expert=2 * (ring(x.ep) + x.etp - 1) * copies)


def _two_hops(run: GptRun) -> Volume:
    """Return the bytes of the hops between nodes and inside nodes, both there and back.

    On the way there, a token takes along the probabilities of all experts of the node, and then of
    the rank, that it is sent to.
    """
    from megatron_ext.text.config.flex import ranks_per_node

    x = run.sizes
    moe = run.moe
    layout = Layout.from_config(run.config.parallel)
    in_node = layout.experts_in_node(ranks_per_node(moe.moe_ranks_per_node, run.config.parallel))
    nodes = x.ep // in_node
    of_rank = (moe.num_experts or x.ep) // x.ep
    of_node = of_rank * in_node
    row = 2 * x.h * x.width
    probability = {"fp32": FP32, "fp64": 2 * FP32}.get(moe.moe_router_dtype or "", x.width)
    between = (nodes - 1) * share_with(moe, of_node) * (row + of_node * probability)
    # A rank passes on the tokens of the ranks with its place on all nodes.
    inside = nodes * (in_node - 1) * share_with(moe, of_rank) * (row + of_rank * probability)
    return Volume(expert=x.residual_tokens * between, expert_in_node=x.residual_tokens * inside)


def share_with(moe: MoEConfig, block: int) -> float:
    """Return the share of tokens that choose any of ``block`` consecutive experts.

    The experts of a node are such a block. ``block`` divides the number of all experts.
    """
    count = moe.num_experts or 1
    groups = moe.moe_router_num_groups or 1
    allowed = moe.moe_router_group_topk or groups
    size = count // groups
    chosen = min(allowed * size, moe.moe_router_topk)
    if block % size and size % block:
        return 1 - comb(count - block, chosen) / comb(count, chosen)
    # The block has some whole groups, or is a part of one.
    own = max(1, block // size)
    least = min(block, size)
    without = 0.0
    for open_groups in range(min(own, allowed) + 1):
        ways = comb(own, open_groups) * comb(groups - own, allowed - open_groups)
        others = allowed * size - open_groups * least
        missed = comb(others, chosen) / comb(allowed * size, chosen)
        without += ways / comb(groups, allowed) * missed
    return 1 - without
