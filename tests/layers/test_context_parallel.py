"""Context parallelism: every kind, layout and mask against one process's plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.test_attention import ENDS, build, config
from tests.ranks import on_ranks, ranks

S, B, N, D = 16, 2, 8, 4
KINDS = ["p2p", "all_gather", "a2a"]
MASKS = ["causal", "documents", "window", "documents and window"]


def full_qkv(groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(S, B, n, D) for n in (N, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def forbidden_by(mask: str) -> Tensor:
    forbidden = plain.documents(S, ENDS) if "documents" in mask else plain.causal(S, B)
    if "window" in mask:
        distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
        forbidden = forbidden | (distance > 3)
    return forbidden


def check(context: ParallelContext, kind: str, mask: str, groups: int, dtype: torch.dtype) -> None:
    """Check output and gradients of this rank's heads and part of the sequence."""
    tp, cp = context.pgs.tp, context.pgs.cp
    full = [x.requires_grad_() for x in full_qkv(groups, dtype)]
    truth = plain.attention(*(x.double() for x in full), forbidden_by(mask))
    cotangent = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = [truth, *torch.autograd.grad(truth, full, cotangent)]

    def own(tensor: Tensor) -> Tensor:
        """Return this rank's heads and positions of ``[s, b, heads(, d)]``."""
        return plain.zigzag(tensor.chunk(tp.size(), dim=2)[tp.rank()], cp.rank(), cp.size())

    transformer_config = config(
        hidden_size=N * D,
        num_attention_heads=N,
        num_query_groups=groups,
        context_parallel_size=cp.size(),
        tensor_model_parallel_size=tp.size(),
        window_size=(3, 0) if "window" in mask else None,
    )
    module = build(DotProductAttention, transformer_config, context, cp_comm_type=kind)
    local = [own(x.detach()).requires_grad_() for x in full]
    rows = None
    if "documents" in mask:
        batch = {"attention_mask": plain.documents(S, ENDS)[:, None]}
        rows = get_batch_on_this_cp_rank(batch, cp_group=cp)["attention_mask"]
    out = module(*local, rows)
    out.backward(own(cotangent).to(dtype))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for got, want in zip([out, *(x.grad for x in local)], wanted, strict=True):
        error = (got.double() - own(want).double()).abs().max() / want.abs().max()
        assert error <= tolerance, f"{kind} {mask} {groups} {dtype}: {error:.2e}"


def check_all(context: ParallelContext, kind: str, group_sizes: list[int]) -> None:
    for mask in MASKS:
        for groups in group_sizes:
            for dtype in (torch.float32, torch.float64):
                check(context, kind, mask, groups, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "group_sizes"),
    [
        # One group makes a2a repeat the keys, as they cannot be dealt out.
        ({"cp": 2}, [8, 2, 1]),
        ({"cp": 4}, [8, 4, 2]),
        ({"tp": 2, "cp": 2}, [8, 4, 2]),
    ],
)
def test_equals_plain_arithmetic(layout: dict[str, int], group_sizes: list[int], kind: str) -> None:
    on_ranks(check_all, layout, kind=kind, group_sizes=group_sizes)


@ranks(cp=2)
def test_the_slices_are_megatron_cores(context: ParallelContext) -> None:
    cp = context.pgs.cp
    tokens = torch.arange(2 * S).view(2, S)
    theirs = get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=cp)["tokens"]
    assert torch.equal(theirs, plain.zigzag(tokens, cp.rank(), 2, dim=1))


@ranks(cp=2)
def test_dropout_keeps_the_mean(context: ParallelContext) -> None:
    """Kept probabilities are scaled up, so the mean over many draws is the undropped result."""
    cp = context.pgs.cp
    transformer_config = config(
        hidden_size=N * D, num_attention_heads=N, context_parallel_size=2, attention_dropout=0.2
    )
    local = [plain.zigzag(x, cp.rank(), 2) for x in full_qkv(N, torch.float32)]
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="all_gather")
    mean = torch.stack([module(*local, None) for _ in range(400)]).mean(0)
    undropped = module.eval()(*local, None)
    assert not torch.equal(module.train()(*local, None), undropped)
    assert (mean - undropped).abs().mean() < 0.03 * undropped.abs().mean() + 0.02


@ranks(cp=2)
def test_what_it_cannot_do_it_says(context: ParallelContext) -> None:
    transformer_config = config(context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"`--cp-comm-type` \(a2a\+p2p\) must be p2p, all_gather"):
        build(DotProductAttention, transformer_config, context, cp_comm_type="a2a+p2p")
    module = build(DotProductAttention, transformer_config, context, cp_comm_type="a2a")
    odd = [torch.zeros(S // 2, B, 3, D)] * 3
    with pytest.raises(ConfigError, match=r"heads of a tensor-parallel rank \(3\) to be divisible"):
        module(*odd, None)
