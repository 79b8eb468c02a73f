"""The distributed optimizer's state is saved without communication, as it is on all ranks."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.optimizer_boxes import (
    _shards,
    boxes,
    in_boxes,
    sharded_optimizer_state,
)
from megatron_ext.checkpoint.state import content_metadata, sharded_state
from megatron_ext.errors import CheckpointError
from tests.checkpoint.tiny import build, manager, save, whole_tensors
from tests.ranks import ranks


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 3, 1, 2)])
def test_boxes_hold_a_range_of_elements_in_order(shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    numbers = np.arange(total).reshape(shape)
    for start, end in itertools.combinations_with_replacement(range(total + 1), 2):
        found = list(boxes(shape, start, end))
        places = [tuple(slice(a, a + n) for a, n in zip(*box, strict=True)) for box in found]
        elements = [numbers[place].flatten() for place in places]
        assert np.concatenate([*elements, np.zeros(0)]).tolist() == list(range(start, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)


@ranks(tp=2, dp=2)
def test_state_in_boxes_is_the_state_that_megatron_core_gathers(
    context: Any, tmp_path: Path
) -> None:
    tiny = build(context, precision="bf16")
    tiny.step()
    path = save(manager(context, tmp_path), tiny, 1, context)
    found = whole_tensors(path, tmp_path / f"{context.rank}.pt")
    metadata = content_metadata(tiny.optimizer, reshardable=True)
    cut = {**metadata, "dp_cp_group": context.pgs.dp_cp}
    state = sharded_state(tiny.model, None, metadata=cut, is_loading=False)
    gathered = tiny.optimizer.sharded_state_dict(state, metadata=cut)["param_state"]
    compared = 0
    for kinds in gathered.values():
        for entry in kinds.values():
            shards = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            for shard in shards:
                own = found[shard.key][shard.global_slice()]
                assert own.dtype == torch.float32 and torch.equal(own, shard.data), shard.key
                compared += 1
    assert compared > 50


def test_a_weight_that_is_stored_in_another_order_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))

    def build(key: str, data: torch.Tensor, *_: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data.t().contiguous())

    with pytest.raises(CheckpointError, match="state of `w` cannot be saved .* stored in another"):
        _shards(ShardedTensorFactory("w", weight, build, torch.cat))


def test_a_range_is_cut_into_tensors_with_the_places_of_the_weight() -> None:
    """Layers that are saved as one tensor have an axis more, and vocabularies may be padded."""
    whole = torch.arange(24.0, dtype=torch.bfloat16).view(4, 6)
    entry = ShardedTensor.from_rank_offsets(
        "w", whole, (0, 1, 3), (1, 1, 2), replica_id=(0, 1, 5), prepend_axis_num=1,
        allow_shape_mismatch=True,
    )  # fmt: skip
    found = in_boxes(entry, "ema", whole.view(-1)[4:17], 4)
    full = torch.full(entry.global_shape, -1.0)
    for part in found:
        assert (part.key, part.dtype, part.replica_id) == ("ema.w", torch.float32, (0, 1, 0))
        assert part.allow_shape_mismatch and part.data.shape == part.local_shape
        assert len(part.local_shape) == len(entry.global_shape) == 3
        place = tuple(
            slice(a, a + n) for a, n in zip(part.global_offset, part.local_shape, strict=True)
        )
        full[place] = part.data
    assert (entry.global_shape, entry.global_offset) == ((3, 8, 6), (1, 4, 0))
    assert full[1, 4:].flatten()[4:17].tolist() == list(range(4, 17))
    assert (full >= 0).sum() == 13


class _Optimizer:
    """One optimizer of a chain, which is not distributed."""

    def sharded_state_dict(self, _: Any, is_loading: bool, *, metadata: Any) -> dict[str, Any]:
        assert not is_loading
        return {"of": metadata}


@pytest.mark.parametrize("count", [1, 2])
def test_the_optimizers_of_a_chain_agree_on_their_steps_first(count: int) -> None:
    done = list[str]()
    chain: Any = SimpleNamespace(
        chained_optimizers=[_Optimizer() for _ in range(count)],
        _synchronize_steps=lambda: done.append("agreed"),
    )
    state = sharded_optimizer_state(chain, {}, {"a": 1}, is_loading=False)
    assert state == ({"of": {"a": 1}} if count == 1 else {n: {"of": {"a": 1}} for n in range(2)})
    assert done == ["agreed"] * (count - 1)


def test_a_view_that_is_not_contiguous_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 4))

    def build(key: str, data: torch.Tensor, *_: Any) -> ShardedTensor:
        return ShardedTensor("w", data[:, ::2], data.dtype, (2, 2), (2, 2), (0, 0), (1, 1))

    with pytest.raises(CheckpointError, match="stored in another order"):
        _shards(ShardedTensorFactory("w", weight, build, torch.cat))
