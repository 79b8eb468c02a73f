"""Recomputed layers that keep their tokens: the same bits, and no exchange in the second pass."""

import multiprocessing
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_ext.layers.keeping_dispatcher import (
    KeepingDispatcher,
    KeepingTwoHopDispatcher,
    drop_unread_outputs,
)
from megatron_ext.layers.kept_tokens import KeptTokens
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher, use_two_hops
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.expert_hops import ExpertHops, expert_hops
from tests.layers import plain
from tests.layers.test_layers import same, torch_block
from tests.layers.test_moe import config
from tests.layers.test_two_hop_dispatcher import DROPPING, MOE, PADDED, SHARED_EXPERT, E, forward
from tests.ranks import on_ranks, ranks
from tests.schedules.test_pairs import FLAGS
from tests.training_runs import curve

FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
PAIRS_OF_LAYERS = {**FULL, "recompute_num_layers": 2}
BLOCK = {**FULL, "recompute_method": "block"}
KINDS: list[dict[str, Any]] = [
    FULL,
    {**MOE, **SHARED_EXPERT, "moe_shared_expert_overlap": True},
    {**PAIRS_OF_LAYERS, **SHARED_EXPERT, "hidden_dropout": 0.1},
    {**BLOCK, **DROPPING, "moe_input_jitter_eps": 0.1},
    {**FULL, **PADDED, "sandwich_norm": True},
    {**MOE, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_router_dtype": "fp64"},
]


def build(
    context: ParallelContext, hops: ExpertHops | None, *, keeps: bool, **changes: Any
) -> TransformerBlock:
    """Return a block of two layers of experts."""
    base = {"num_layers": 2, "num_moe_experts": E, "moe_token_dispatcher_type": "alltoall"}
    transformer_config = config(context, **{**base, **changes})
    tokens = transformer_config.kept_tokens = KeptTokens() if keeps else None
    block = torch_block(transformer_config, context)
    plain.fill(block, context, E)
    if hops is not None:
        use_two_hops([block], hops, context, KeepingTwoHopDispatcher if keeps else TwoHopDispatcher)
    if tokens is not None:
        tokens.follow(block)
        drop_unread_outputs(block, TransformerLayer)
        wanted = KeepingDispatcher if hops is None else KeepingTwoHopDispatcher
        assert {type(layer.mlp.token_dispatcher) for layer in block.layers} == {wanted}
    return block


def results(block: TransformerBlock, context: ParallelContext) -> dict[str, Tensor]:
    """Run two micro-batches whose passes overlap, and one evaluation; return outputs, gradients."""
    torch.manual_seed(7)
    block.train()
    first = forward(block, context, 1)
    second = forward(block, context, 2)
    block.eval()
    with torch.no_grad():
        forward(block, context, 3)
    block.train()
    for own, output in (first, second):
        output.square().sum().backward()
        assert own.grad is not None
    named = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    return {
        **named,
        **{f"output {n}": output for n, (_, output) in enumerate((first, second))},
        **{f"input {n}": own.grad for n, (own, _) in enumerate((first, second))},
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the bytes that each collective of experts sends from this rank, itself included."""
    sent: list[int] = []

    def counting(start: Any) -> Any:
        def started(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(input.numel() * input.element_size())
            return start(output, input, *args, **kwargs)

        return started

    name = "all_to_all_single"
    with mock.patch.object(torch.distributed, name, counting(getattr(torch.distributed, name))):
        yield sent


def check_equal(
    context: ParallelContext, ranks_per_node: int | None, kinds: list[dict[str, Any]]
) -> None:
    hops = None if ranks_per_node is None else expert_hops(context, ranks_per_node)
    for changes in kinds:
        wanted = results(build(context, hops, keeps=False, **changes), context)
        found = results(build(context, hops, keeps=True, **changes), context)
        same(found, wanted, changes)


@pytest.mark.parametrize("ranks_per_node", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_a_second_exchange_bit_by_bit(ranks_per_node: int | None) -> None:
    size = 2 if ranks_per_node is None else 4
    on_ranks(check_equal, {"dp": size, "ep": size}, ranks_per_node=ranks_per_node, kinds=KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}]
)
def test_tokens_are_kept_beside_tensor_parallelism(
    sizes: dict[str, int], ranks_per_node: int | None
) -> None:
    kinds = [{**FULL, "distribute_saved_activations": False}, {**MOE, **DROPPING}]
    on_ranks(check_equal, sizes, ranks_per_node=ranks_per_node, kinds=kinds)


def check_counts(context: ParallelContext, ranks_per_node: int | None) -> None:
    hops = None if ranks_per_node is None else expert_hops(context, ranks_per_node)
    for changes in (FULL, MOE):
        sent = []
        for keeps, recomputes in ((False, {}), (False, changes), (True, changes)):
            block = build(context, hops, keeps=keeps, **recomputes)
            with counted() as passes:
                _, output = forward(block, context, 1)
                first = len(passes)
                output.square().sum().backward()
            sent.append((sorted(passes[:first]), sorted(passes[first:])))
        (plain_ahead, plain_back), (_, again), (ahead, back) = sent
        # The second pass has sent what the first one sent, and sends nothing now.
        assert again == sorted([*plain_ahead, *plain_back])
        assert (ahead, back) == (plain_ahead, plain_back)
        assert ahead


@pytest.mark.parametrize(
    ("size", "ranks_per_node"), [(2, None), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_forward_exchanges_run_half_as_often(size: int, ranks_per_node: int | None) -> None:
    on_ranks(check_counts, {"dp": size, "ep": size}, ranks_per_node=ranks_per_node)


@ranks(dp=2, ep=2)
def test_kept_tokens_live_as_long_as_the_graph_that_needs_them(context: ParallelContext) -> None:
    """A micro-batch whose backward pass never comes leaves nothing to those that follow."""
    block = build(context, None, keeps=True, **FULL)
    dispatcher = block.layers[0].mlp.token_dispatcher
    kept = []
    genuine = KeptTokens.of_pass

    def noted(self: KeptTokens, dispatcher: Any) -> Any:
        found, again = genuine(self, dispatcher)
        if found is not None and not again:
            kept.append(found)
        return found, again

    with mock.patch.object(KeptTokens, "of_pass", noted):
        _, output = forward(block, context, 1)
        assert len(kept) == 2
        rows = weakref.ref(kept[0]["received"][0][0])
        kept.clear()
        assert rows() is not None
        del output
        assert rows() is None
        own, output = forward(block, context, 1)
        rows = weakref.ref(kept[0]["received"][0][0])
        kept.clear()
        output.sum().backward()
    assert own.grad is not None
    assert rows() is None
    assert dispatcher._kept is None


PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PAIRED = "--overlap-moe-expert-parallel-comm"
HOPS = "--moe-token-dispatcher-type flex --moe-ranks-per-node 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{WHOLE} --mtp-num-layers 1 --hidden-dropout 0.1"),
        (4, f"{PP} {WHOLE} --overlap-grad-reduce --overlap-param-gather"),
        (4, f"{VPP} --moe-layer-recompute {HOPS}"),
        (4, f"{PP} {WHOLE} --pipeline-schedule zb-v"),
        (4, f"{VPP} {WHOLE} {PAIRED} --delay-wgrad-compute"),
        (2, f"{WHOLE} {PAIRED} {HOPS} --num-layers 3 --hidden-dropout 0.1"),
    ],
)
def test_schedules_exchange_a_third_less_for_the_same_losses(
    ranks: int, words: str, tmp_path: Path
) -> None:
    flags = [*FLAGS, *words.split()]
    calls = multiprocessing.Value("i", 0)
    start = torch.distributed.all_to_all_single

    def started(*args: Any, **kwargs: Any) -> Any:
        with calls.get_lock():
            calls.value += 1
        return start(*args, **kwargs)

    found = []
    for more in ([], ["--moe-keep-dispatched-tokens"]):
        calls.value = 0
        with mock.patch.object(torch.distributed, "all_to_all_single", started):
            losses = curve([*flags, *more], tmp_path / f"run{len(more)}", ranks)
        found.append((losses, calls.value))
    (twice, often), (once, seldom) = found
    assert once == twice
    assert len(once) == 2
    assert 3 * seldom == 2 * often > 0
