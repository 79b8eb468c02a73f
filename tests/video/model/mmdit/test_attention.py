"""Trading heads for sequence."""

from __future__ import annotations

import torch

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.attention import heads_to_sequence, sequence_to_heads
from tests.ranks import ranks


@ranks(cp=4)
def test_heads_are_traded_for_sequence_and_back(context: ParallelContext) -> None:
    group = context.pgs.cp
    full = torch.arange(8 * 2 * 8 * 3, dtype=torch.float32).view(8, 2, 8, 3)
    own = full.chunk(4)[group.rank()].clone().requires_grad_()
    traded = heads_to_sequence(own, group)
    assert torch.equal(traded, full.chunk(4, dim=2)[group.rank()])
    back = sequence_to_heads(traded, group)
    assert torch.equal(back, own)
    (back * full.chunk(4)[group.rank()]).sum().backward()
    assert torch.equal(own.grad, full.chunk(4)[group.rank()])  # type: ignore[arg-type]
