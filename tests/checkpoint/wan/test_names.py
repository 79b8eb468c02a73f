"""Names and shapes against the built model, and against diffusers' own converter."""

from __future__ import annotations

import torch

from megatron_ext.checkpoint.wan.names import Naming, from_wan, shapes, to_wan, wan_names
from megatron_ext.layout import ParallelContext
from tests.checkpoint.wan.models import TINY, bare, network, original_names
from tests.ranks import ranks


@ranks()
def test_shapes_are_those_of_the_model(context: ParallelContext) -> None:
    built = {name: tuple(p.shape) for name, p in bare(context, TINY).named_parameters()}
    assert built == shapes(TINY)


def test_names_and_shapes_are_those_of_diffusers() -> None:
    state = network().state_dict()
    original = original_names(TINY.num_blocks)
    found = {}
    for ours, shape in shapes(TINY).items():
        names = wan_names(ours, Naming.DIFFUSERS)
        assert wan_names(ours, Naming.ORIGINAL) == tuple(original[name] for name in names)
        parts = to_wan(ours, torch.empty(shape), TINY)
        found |= {name: tuple(part.shape) for name, part in zip(names, parts, strict=True)}
    assert found == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_the_way_back_is_the_inverse() -> None:
    for name, shape in shapes(TINY).items():
        tensor = torch.randn(shape)
        assert torch.equal(from_wan(name, to_wan(name, tensor, TINY), TINY), tensor), name
