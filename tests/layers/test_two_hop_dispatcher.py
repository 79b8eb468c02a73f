"""Tokens that make two hops get the results of one all-to-all, with fewer bytes between nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher, use_two_hops
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.expert_hops import ExpertHops, expert_hops
from megatron_ext.parallel.turns import Turns
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.layers import plain
from tests.layers.test_layers import B, H, S, local_part, near, same, torch_block
from tests.layers.test_moe import SHARED, config
from tests.ranks import on_ranks, ranks
from tests.training_runs import SMALL, config_of

E = 8
SHARED_EXPERT = {"moe_shared_expert_intermediate_size": SHARED}
DROPPING = {"moe_expert_capacity_factor": 0.5}
PADDED = {**DROPPING, "moe_pad_expert_input_to_capacity": True}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
KINDS: list[dict[str, Any]] = [
    {},
    SHARED_EXPERT,
    {**SHARED_EXPERT, "moe_shared_expert_overlap": True},
    DROPPING,
    PADDED,
    {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
    MOE,
    # Some nodes and ranks get no token at all.
    {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
]


def forward(
    block: TransformerBlock, context: ParallelContext, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return an input of the block, and its output."""
    generator = torch.Generator().manual_seed(100 * seed + context.dp_rank)
    full = torch.randn(S, B, H, generator=generator)
    split = block.config.sequence_parallel
    own = local_part(full, context, sequence_parallel=split).clone().requires_grad_()
    return own, block(own, None)


def outcome(
    context: ParallelContext, hops: ExpertHops | None, **changes: Any
) -> tuple[dict[str, Tensor], Any]:
    """Return output and gradients of a layer of experts by name, and its dispatcher."""
    base = {"num_moe_experts": E, "moe_token_dispatcher_type": "alltoall"}
    transformer_config = config(context, **{**base, **changes})
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
    if transformer_config.moe_router_topk == 1:
        block.layers[0].mlp.router.weight.data.zero_()
    if hops is not None:
        use_two_hops([block], hops, context)
    own, output = forward(block, context)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    named = {"output": output, "input": own.grad, **gradients}
    return named, block.layers[0].mlp.token_dispatcher


def check_equal(context: ParallelContext, ranks_per_node: int, kinds: list[dict[str, Any]]) -> None:
    hops = expert_hops(context, ranks_per_node)
    for changes in kinds:
        wanted, _ = outcome(context, None, **changes)
        found, dispatcher = outcome(context, hops, **changes)
        assert type(dispatcher) is TwoHopDispatcher
        same(found, wanted, changes)


def check_all_kinds(context: ParallelContext) -> None:
    check_equal(context, 2, KINDS)
    for ranks_per_node in (1, 4):
        check_equal(context, ranks_per_node, [{}])


def check_rounding(context: ParallelContext) -> None:
    hops = expert_hops(context, 2)
    wanted, _ = outcome(context, None, moe_router_topk=5)
    found, _ = outcome(context, hops, moe_router_topk=5)
    for name, value in wanted.items():
        near(found[name], value, name, tolerance=3e-6)


@pytest.mark.slow
def test_results_are_those_of_one_all_to_all_bit_by_bit() -> None:
    on_ranks(check_all_kinds, {"dp": 4, "ep": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ranks_per_node"),
    [
        ({"tp": 2, "dp": 2, "ep": 4, "etp": 1}, 2),
        ({"tp": 2, "dp": 4, "ep": 4, "etp": 2}, 4),
        ({"cp": 2, "dp": 2, "ep": 4}, 2),
    ],
)
def test_experts_beside_other_parallelism_get_equal_rows(
    sizes: dict[str, int], ranks_per_node: int
) -> None:
    on_ranks(check_equal, sizes, ranks_per_node=ranks_per_node, kinds=[{}, DROPPING, PADDED])


def test_sums_over_many_experts_differ_by_their_rounding() -> None:
    on_ranks(check_rounding, {"dp": 4, "ep": 4})


@ranks(dp=4, ep=4)
def test_only_the_hop_between_nodes_gives_way_to_another_pass(context: ParallelContext) -> None:
    hops = expert_hops(context, 2)
    groups = list[ProcessGroup | None]()
    start = torch.distributed.all_to_all_single

    def started(*args: Any, **kwargs: Any) -> Any:
        groups.append(kwargs["group"])
        return start(*args, **kwargs)

    turns = Turns()
    wanted, _ = outcome(context, hops)
    with (
        mock.patch.object(torch.distributed, "all_to_all_single", started),
        mock.patch.object(turns, "give_way", side_effect=lambda: groups.append(None)),
    ):
        found, _ = outcome(context, hops, turns=turns)
    there = [hops.between, hops.between, None, hops.inside, hops.inside]
    back = [hops.inside, hops.between, None]
    # Gradients of outputs go there without probabilities, and those of tokens come back with them.
    backward = [hops.between, None, hops.inside, *[hops.inside] * 2, *[hops.between] * 2, None]
    assert groups == [*there, *back, *backward]
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@ranks(dp=2, ep=2)
def test_flags_give_two_hops_to_every_layer_and_depth(context: ParallelContext) -> None:
    words = (
        "--num-experts 4 --disable-bias-linear --padded-vocab-size 128 --mtp-num-layers 1 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-ranks-per-node"
    )
    for ranks_per_node, ranks_in_node in ((1, 1), (2, 2), (8, 2)):
        config = config_of([*SMALL, *words.split(), str(ranks_per_node)], ranks=2)
        transformer_config = build_transformer_config(config)
        (chunk,) = build_chunks(build_gpt_chunk, config, transformer_config, context)
        layers = [x for x in chunk.modules() if isinstance(x, BaseMoELayer)]
        assert len(layers) == 3
        for layer in layers:
            assert type(layer.token_dispatcher) is TwoHopDispatcher
            hops = layer.token_dispatcher.hops
            assert [hops.between, hops.inside][ranks_in_node - 1] is context.pgs.ep
            assert [hops.inside, hops.between][ranks_in_node - 1] is None


@contextmanager
def counted(group: ProcessGroup | None) -> Iterator[list[int]]:
    """Collect the bytes that each all-to-all of a group sends from this rank to others."""
    sent: list[int] = []
    exchange = torch.distributed.all_to_all_single

    def counting(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if group is not None and kwargs["group"] is group:
            rows = list(kwargs["input_split_sizes"])
            others = sum(rows) - rows[group.rank()]
            sent.append(others * input[:1].numel() * input.element_size())
        return exchange(output, input, *args, **kwargs)

    torch.distributed.all_to_all_single = counting
    try:
        yield sent
    finally:
        torch.distributed.all_to_all_single = exchange


def check_bytes(context: ParallelContext, ranks_per_node: int) -> None:
    hops = expert_hops(context, ranks_per_node)
    ep = context.pgs.ep
    nodes = ep.size() // ranks_per_node
    with counted(hops.between) as between, counted(hops.inside) as inside:
        _, dispatcher = outcome(context, hops, moe_router_topk=3)
    by_rank = dispatcher.routing_map.unflatten(1, (ep.size(), -1)).any(-1)
    by_node = by_rank.unflatten(1, (nodes, -1)).any(-1)
    node = ep.rank() // ranks_per_node
    places = torch.arange(ep.size()) % ranks_per_node
    numbers = [
        by_node.sum() - by_node[:, node].sum(),
        by_rank.sum() - by_rank[:, places == ep.rank() % ranks_per_node].sum(),
        sum(between),
        sum(inside),
    ]
    summed = torch.stack([torch.as_tensor(x) for x in numbers])
    torch.distributed.all_reduce(summed)
    nodes_reached, ranks_reached, bytes_between, bytes_inside = summed.tolist()
    assert nodes_reached and ranks_reached
    # A row goes there and back, forward and backward; the probabilities of its experts go there,
    # and their gradients back.
    width = 4
    assert bytes_between == nodes_reached * (4 * H + 2 * E // nodes) * width
    assert bytes_inside == ranks_reached * (4 * H + 2 * E // ep.size()) * width


@pytest.mark.parametrize(
    ("size", "ranks_per_node"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)]
)
def test_a_token_is_sent_once_to_a_node_and_once_to_a_rank(size: int, ranks_per_node: int) -> None:
    on_ranks(check_bytes, {"dp": size, "ep": size}, ranks_per_node=ranks_per_node)


@ranks(dp=2, ep=2)
def test_nodes_of_different_sizes_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"ranks-per-node.*1 to 2 ranks; give a number that div"):
        expert_hops(context, 1 + context.rank)
