"""The exchange of tokens that gives way to another micro-batch's pass."""

from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megatron_ext.layers.expert_exchange import exchange
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.turns import Turns
from tests.ranks import ranks


@pytest.mark.parametrize("equal", [True, False])
@ranks(dp=2, ep=2)
def test_parts_and_gradients_are_those_of_cores_all_to_all(
    context: ParallelContext, equal: bool
) -> None:
    group = context.pgs.ep
    rank = group.rank()
    # Rank 0 sends 1 and 3 rows and gets 1 and 2; rank 1 sends 2 and 0 and gets 3 and 0.
    sends = [[1, 3], [2, 0]][rank]
    gets = [[1, 2], [3, 0]][rank]
    splits = (None, None) if equal else (gets, sends)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4 if equal else sum(sends), 3, generator=generator)
    probs = torch.randn(len(x), generator=generator)
    found = []
    for ours in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, probs)]
        if ours:
            parts = exchange(Turns(), group, leaves, *splits)
        else:
            parts = tuple(all_to_all(group, leaf, *splits) for leaf in leaves)
        (parts[0].pow(3).sum() + parts[1].pow(2).sum()).backward()
        found.append([*parts, *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("early", [False, True])
@ranks(dp=2, ep=2)
def test_each_all_to_all_is_under_way_while_the_other_pass_computes(
    context: ParallelContext, early: bool
) -> None:
    """Two layers of attention, dispatch, experts and combine, forward beside backward."""
    turns = Turns(releases_early=early)
    said: list[str] = []
    start = torch.distributed.all_to_all_single
    backward = False

    def name(operation: str) -> str:
        return operation + "'" if backward else operation

    def all_to_all_single(*args: object, **kwargs: object) -> object:
        work = start(*args, **kwargs)
        if not len(args[0]):  # type: ignore[arg-type]
            return work
        own = name("")
        said.append(f"start{own}")

        class Work:
            def wait(self) -> None:
                work.wait()
                said.append(f"wait{own}")

        return Work()

    def computes(x: Tensor, operation: str) -> Tensor:
        said.append(name(operation))
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda _: said.append(operation + "'"))
        return y

    def forward() -> Tensor:
        x = torch.ones(4, 1, requires_grad=True)
        for _ in range(2):
            y = computes(x, "attention")
            x, _ = exchange(turns, context.pgs.ep, [y, y[:0]], None, None)
            (x,) = exchange(turns, context.pgs.ep, [computes(x, "experts")], None, None)
        return x

    def took_turn(own: bool) -> None:
        nonlocal backward
        backward = not own

    output = forward()
    said.clear()
    with mock.patch.object(torch.distributed, "all_to_all_single", all_to_all_single):
        turns.run(output.sum().backward, forward, took_turn=took_turn)
    if early:
        first = "start' {}attention start wait' experts' start' wait' attention' wait experts start"
        assert " ".join(said) == f"{first.format('')} {first.format('wait ')} wait"
        return
    layer = "start' {}attention start wait' experts' start' wait experts start wait' attention' "
    assert " ".join(said) == (layer.format("") + layer.format("wait ") + "wait").strip()
