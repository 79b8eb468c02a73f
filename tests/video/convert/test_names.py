"""Names and shapes are those of the built model, and of diffusers' own converter."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import WanTransformer3DModel

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.wan import SIZES
from megatron_ext.video.convert.names import Naming, from_wan, shapes, to_wan, wan_names
from tests.ranks import ranks
from tests.video.convert.models import TINY, bare, options_of, original_names


@ranks()
def test_shapes_are_those_of_the_model(context: ParallelContext) -> None:
    built = {name: tuple(p.shape) for name, p in bare(context, TINY).named_parameters()}
    assert built == shapes(TINY)


@pytest.mark.parametrize("name", ["tiny", "1.3b", "14b"])
def test_names_and_shapes_are_those_of_diffusers(name: str) -> None:
    sizes = SIZES[name]
    with torch.device("meta"):
        state = WanTransformer3DModel(**options_of(sizes)).state_dict()
    original = original_names(sizes.num_blocks)
    found: dict[str, tuple[int, ...]] = {}
    for ours, shape in shapes(sizes).items():
        names = wan_names(ours, Naming.DIFFUSERS)
        assert wan_names(ours, Naming.ORIGINAL) == tuple(original[name] for name in names)
        parts = to_wan(ours, torch.empty(shape, device="meta"), sizes)
        found |= {name: tuple(part.shape) for name, part in zip(names, parts, strict=True)}
    assert found == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert sum(map(math.prod, found.values())) == sizes.num_parameters


def test_the_way_back_is_the_inverse() -> None:
    for name, shape in shapes(TINY).items():
        tensor = torch.randn(shape)
        assert torch.equal(from_wan(name, to_wan(name, tensor, TINY), TINY), tensor), name
