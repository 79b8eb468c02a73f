"""The distributed optimizer's state is saved without communication, as it is on all ranks."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.optimizer_boxes import _shards, boxes
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
