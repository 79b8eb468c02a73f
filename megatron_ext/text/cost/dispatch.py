"""The bytes that a rank sends to bring tokens to their experts and outputs back, or keeps instead.

Tokens are assumed to choose their experts at random, each expert as likely as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.planning.network import Volume, ring
from megatron_ext.planning.stages import FP32

if TYPE_CHECKING:
    from megatron_ext.text.config.moe import MoEConfig
    from megatron_ext.text.cost.flops import GptRun


def dispatched(run: GptRun, *, backward: bool = False) -> Volume:
    """Return the bytes of one layer's forward pass: tokens that go to experts, and outputs back.

    With ``backward`` return those of the gradients, which go the same ways. Rows on their way to
    experts may take 8 bits for a value.
    """
    x = run.sizes
    moe = run.moe
    tokens = x.residual_tokens * run.routed_hidden * x.width
    if moe.moe_token_dispatcher_type == "allgather":
        return Volume(expert=2 * (x.ep * x.etp - 1) * tokens)
    copies = x.residual_tokens * moe.moe_router_topk
    row = run.routed_hidden * x.width
    there = _sent_row(run, moe.moe_combine_bwd_dtype if backward else moe.moe_dispatch_fwd_dtype)
    gathered = 2 * (x.etp - 1) * copies * row
    if moe.moe_token_dispatcher_type == "flex":
        return _Hops.of(run).sent(there + row) + Volume(expert_in_node=gathered)
    return Volume(expert=ring(x.ep) * copies * (there + row) + gathered)


def _sent_row(run: GptRun, name: str) -> float:
    """Return the bytes of a row that is sent in the format of a ``--moe-dispatch-fwd-dtype``."""
    x = run.sizes
    if name == "bf16":
        return run.routed_hidden * x.width
    from megatron_ext.layers.fp8.blocks import BLOCKS

    return run.routed_hidden * (1 + 1 / BLOCKS[name])


ENCODING = 33
"""Bytes that torch's kernels read and write for a 16-bit value that `layers.fp8.rows` encodes."""
DECODING = 21
"""Bytes for a value that is decoded."""
CODING_KERNELS = 23
"""The number of kernels that encode and decode the rows of one exchange."""


def cast_work(run: GptRun) -> list[Work]:
    """Return the kernels of a layer with experts that cast rows to 8 bits, and back, on their way.

    Every hop encodes what it sends and decodes what has come.
    """
    x = run.sizes
    if x.ep * x.etp == 1:
        return []
    names = run.moe.moe_dispatch_fwd_dtype, run.moe.moe_combine_bwd_dtype
    phases = Phase.FORWARD, Phase.INPUT
    if run.moe.moe_token_dispatcher_type == "flex":
        hops = _Hops.of(run)
        rows = hops.rows
        exchanges = (hops.nodes > 1) + (hops.in_node > 1)
    else:
        rows = x.residual_tokens * run.moe.moe_router_topk
        exchanges = 1
    moved = rows * run.routed_hidden * (ENCODING + DECODING)
    kernels = exchanges * CODING_KERNELS
    return [
        Work("casts", phase, num_bytes=moved, kernels=kernels)
        for name, phase in zip(names, phases, strict=True)
        if name != "bf16"
    ]


def dispatched_again(run: GptRun) -> Volume:
    """Return the bytes that a recomputed layer sends again, of those that `dispatched` counts.

    Tokens that are kept are only gathered by the ranks that share an expert.
    """
    whole = dispatched(run)
    if not run.keeps_tokens:
        return whole
    x = run.sizes
    copies = x.residual_tokens * run.moe.moe_router_topk
    gathered = 2.0 * (x.etp - 1) * copies * run.routed_hidden * x.width
    flex = run.moe.moe_token_dispatcher_type == "flex"
    return Volume(expert_in_node=gathered) if flex else Volume(expert=gathered)


def kept_tokens(run: GptRun) -> int:
    """Return the bytes of tokens that a recomputed layer keeps of each micro-batch.

    They are the rows that have arrived at this rank's experts and their probabilities, the choice
    of the experts, and, where a norm, a projection or another layer runs again from it, the sum of
    their outputs.
    """
    if not run.keeps_tokens:
        return 0
    x = run.sizes
    moe = run.moe
    row = _sent_row(run, moe.moe_dispatch_fwd_dtype)
    if moe.moe_token_dispatcher_type == "flex":
        kept = _Hops.of(run).kept(row)
    else:
        kept = x.residual_tokens * moe.moe_router_topk * (row + _probability(run))
    model = run.config.model
    whole = model.recompute_granularity == "full"
    read = whole and (run.group_size > 1 or run.normalizes_outputs)
    reads = read or moe.moe_latent_size is not None
    output = x.residual_tokens * run.routed_hidden * x.width if reads else 0
    return round(kept) + x.residual_tokens * (moe.num_experts or 0) + output


def _probability(run: GptRun) -> int:
    """Return the bytes of the probability of one expert."""
    width = run.sizes.width
    return {"fp32": FP32, "fp64": 2 * FP32}.get(run.moe.moe_router_dtype or "", width)


@dataclass(frozen=True)
class _Hops:
    """The two hops of a rank's tokens.

    On the way there, a token takes along the probabilities of all experts of the node, and then of
    the rank, that it is sent to.

    Attributes:
        nodes, in_node: the number of nodes with experts, and of ranks with experts on each.
        to_node, to_rank: the number of tokens that a rank sends to one node, and that the ranks
            with its place on all nodes send to one rank of the node.
        node_scores, rank_scores: the bytes of the probabilities that a token takes along.
    """

    nodes: int
    in_node: int
    to_node: float
    to_rank: float
    node_scores: int
    rank_scores: int

    @classmethod
    def of(cls, run: GptRun) -> _Hops:
        from megatron_ext.text.config.flex import ranks_per_node

        x = run.sizes
        moe = run.moe
        parallel = run.config.parallel
        node = ranks_per_node(moe.moe_ranks_per_node, parallel)
        in_node = Layout.from_config(parallel).experts_in_node(node)
        nodes = x.ep // in_node
        of_rank = (moe.num_experts or x.ep) // x.ep
        of_node = of_rank * in_node
        to_node = x.residual_tokens * share_with(moe, of_node)
        to_rank = x.residual_tokens * nodes * share_with(moe, of_rank)
        width = _probability(run)
        return cls(nodes, in_node, to_node, to_rank, of_node * width, of_rank * width)

    @property
    def rows(self) -> float:
        """Return the number of rows that a rank sends in both hops together, itself included."""
        between = self.nodes * self.to_node if self.nodes > 1 else 0.0
        return between + (self.in_node * self.to_rank if self.in_node > 1 else 0.0)

    def sent(self, rows: float) -> Volume:
        """Return the bytes of the hops between nodes and inside nodes, both there and back.

        ``rows`` are the bytes of a token on its way there, and of an output on its way back.
        """
        between = (self.nodes - 1) * self.to_node * (rows + self.node_scores)
        inside = (self.in_node - 1) * self.to_rank * (rows + self.rank_scores)
        return Volume(expert=between, expert_in_node=inside)

    def kept(self, row: float) -> float:
        """Return the bytes that have arrived by the last hop, with the scores of both hops.

        ``row`` are the bytes of a token.
        """
        rows = self.in_node * self.to_rank * (row + self.rank_scores)
        two = self.nodes > 1 and self.in_node > 1
        return rows + (self.nodes * self.to_node * self.node_scores if two else 0)


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
