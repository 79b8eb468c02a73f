"""RMSNorm over heads that other ranks hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.pointwise import FullWidthRMSNorm
from tests.ranks import ranks
from tests.video.model.wan.problem import Problem, core_config


@ranks(tp=4)
def test_the_mean_is_that_of_all_heads_with_its_gradient(context: ParallelContext) -> None:
    """Output, gradient of the input and of the scales equal torch's RMSNorm over all 64."""
    rank, group = context.tp_rank, context.pgs.tp
    config = core_config(Problem(), context)
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, scales, upstream = randn(2, 6, 3, 4, 16), randn(2, 64), randn(2, 6, 3, 4, 16)
    norms = [FullWidthRMSNorm(config, group).double() for _ in range(2)]
    for norm, scale in zip(norms, scales, strict=True):
        norm.weight.data.copy_(scale.chunk(4)[rank])
    own = [part.chunk(4, dim=-2)[rank].clone().requires_grad_() for part in x]
    got = [norm(x) for norm, x in zip(norms, own, strict=True)]
    pairs = zip(got, upstream, strict=True)
    sum((y * u.chunk(4, dim=-2)[rank]).sum() for y, u in pairs).backward()  # type: ignore[union-attr]
    for index, norm in enumerate(norms):
        whole, weight = x[index].clone().requires_grad_(), scales[index].clone().requires_grad_()
        want = F.rms_norm(whole.flatten(-2), (64,), weight, eps=1e-6).view_as(whole)
        (want * upstream[index]).sum().backward()
        assert weight.grad is not None and whole.grad is not None
        cut = want.chunk(4, dim=-2)[rank], whole.grad.chunk(4, dim=-2)[rank], weight.grad.chunk(4)
        torch.testing.assert_close(got[index], cut[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(own[index].grad, cut[1], rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.weight.grad, cut[2][rank], rtol=0, atol=1e-12)
