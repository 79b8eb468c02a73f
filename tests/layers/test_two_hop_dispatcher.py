"""Tokens that go to nodes first: the same results as from the all-to-all, with fewer bytes."""

from typing import Any

import pytest
import torch

from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher, use_two_hops
from megatron_ext.parallel.context import ParallelContext, expert_hops
from tests.layers import plain
from tests.layers.test_layers import B, H, S, local_part, torch_block
from tests.layers.test_moe import config
from tests.ranks import on_ranks

E = 8


def outcome(context: ParallelContext, ranks_per_node: int | None, **changes: Any) -> dict[str, Any]:
    """Return output and gradients of a layer of experts, by name."""
    base = {"num_moe_experts": E, "moe_token_dispatcher_type": "alltoall"}
    transformer_config = config(context, **{**base, **changes})
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
    if ranks_per_node is not None:
        use_two_hops([block], expert_hops(context, ranks_per_node), context)
        assert type(block.layers[0].mlp.token_dispatcher) is TwoHopDispatcher
    generator = torch.Generator().manual_seed(context.dp_rank)
    full = torch.randn(S, B, H, generator=generator)
    split = transformer_config.sequence_parallel
    own = local_part(full, context, sequence_parallel=split).clone().requires_grad_()
    output = block(own, None)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": output, "input": own.grad, **gradients}


def check_equal(context: ParallelContext, ranks_per_node: int, **changes: Any) -> None:
    wanted = outcome(context, None, **changes)
    found = outcome(context, ranks_per_node, **changes)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node"),
    [
        ({"dp": 4, "ep": 4}, 2),
        ({"dp": 4, "ep": 4}, 1),
        ({"dp": 4, "ep": 4}, 4),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, 2),
        ({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, 2),
        ({"dp": 4, "tp": 2, "ep": 4, "etp": 2}, 4),
        ({"dp": 8, "ep": 8}, 4),
    ],
)
def test_results_are_those_of_the_all_to_all(sizes: dict[str, int], ranks_per_node: int) -> None:
    on_ranks(check_equal, sizes, ranks_per_node=ranks_per_node)
