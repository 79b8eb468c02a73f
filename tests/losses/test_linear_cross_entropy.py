"""Cross-entropy of a vocabulary-parallel head in blocks, against torch's over whole logits."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers import onednn
from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.losses import logit_blocks
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.losses.logit_blocks import Head
from tests.losses.dense_cross_entropy import (
    ALONE,
    BLOCK_SIZES,
    TOLERANCE,
    B,
    H,
    Inputs,
    S,
    V,
    Watch,
    assert_close,
    dense,
    error,
    inputs,
    leaves,
    weighted,
    weighted_sum,
)
from tests.ranks import ParallelContext, ranks


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    sizes: list[int] = []
    genuine = torch.distributed.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return genuine(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", counting)
        yield sizes


def check_bias(group: Any, **options: Any) -> None:
    """Check loss and gradients with a bias against torch's over whole logits in float64."""
    hidden, weight, labels, weights = inputs()
    bias = torch.randn(V, generator=torch.Generator().manual_seed(2))
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    h, w, b = (
        x.clone().requires_grad_()
        for x in (hidden, weight.chunk(size)[rank], bias.chunk(size)[rank])
    )
    given = {"tp_group": group, "sequence_parallel": False, "block_size": 7, "bias": b, **options}
    total = weighted_sum((h, w, labels, weights), **given)
    found = torch.autograd.grad(total, (h, w, b))
    h, w, b = (x.double().requires_grad_() for x in (hidden, weight, bias))
    logits = torch.einsum("sbh,vh->bsv", h, w) + b
    smoothing = options.get("label_smoothing", 0.0)
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing
    )
    want = (losses * weights).sum()
    truth = torch.autograd.grad(want, (h, w, b))
    assert error(total.detach(), want.detach()) <= TOLERANCE
    mine = (truth[0], truth[1].chunk(size)[rank], truth[2].chunk(size)[rank])
    assert all(error(x, y) <= TOLERANCE for x, y in zip(found, mine, strict=True))


@ranks(tp=2)
def test_a_head_with_a_bias_equals_dense(context: ParallelContext) -> None:
    for smoothing in (0.0, 0.2):
        check_bias(None, label_smoothing=smoothing)
    check_bias(context.pgs.tp)


@pytest.mark.parametrize("block_size", [*BLOCK_SIZES, None])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0, 0), (0.1, 0), (0, 1e-2), (0.3, 0.1)])
def test_equals_dense(block_size: int | None, smoothing: float, z_loss: float) -> None:
    given = {"label_smoothing": smoothing, "z_loss_coefficient": z_loss}
    found = weighted(leaves(inputs()), block_size=block_size, **given, **ALONE)
    assert_close(found, dense(inputs(), **given))


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_soft_cap_of_the_logits_equals_dense(on_a_gpu: bool) -> None:
    given = {"softcap": 1.5, "label_smoothing": 0.1, "z_loss_coefficient": 1e-2}
    with compiled_on_cpu("eager") if on_a_gpu else nullcontext():
        found = weighted(leaves(inputs()), block_size=7, **given, **ALONE)
    assert_close(found, dense(inputs(), **given))
    assert error(dense(inputs())[0], found[0]) > 0.1


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (9, 2), (4096, 512), (100_000, 1024)])
def test_a_default_block_is_an_eighth_of_the_tokens(tokens: int, rows: int) -> None:
    assert Head(None, None, False).rows(tokens) == rows


def rank_inputs(context: ParallelContext, sequence_parallel: bool) -> Inputs:
    hidden, weight, labels, weights = inputs()
    if sequence_parallel:
        hidden = hidden.chunk(2)[context.tp_rank]
    return leaves((hidden, weight.chunk(2)[context.tp_rank], labels, weights))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_equals_dense_on_two_ranks(context: ParallelContext, sequence_parallel: bool) -> None:
    for block_size in BLOCK_SIZES:
        for given in ({}, {"label_smoothing": 0.1, "z_loss_coefficient": 1e-2, "softcap": 2.0}):
            losses, of_hidden, of_weight = dense(inputs(), **given)
            if sequence_parallel:
                of_hidden = of_hidden.chunk(2)[context.tp_rank]
            found = weighted(
                rank_inputs(context, sequence_parallel),
                block_size=block_size,
                tp_group=context.pgs.tp,
                sequence_parallel=sequence_parallel,
                **given,
            )
            assert_close(found, (losses, of_hidden, of_weight.chunk(2)[context.tp_rank]))


@ranks(tp=2)
def test_collectives_of_blocks(context: ParallelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    values = rank_inputs(context, False)
    with counted(monkeypatch) as sizes:
        weighted(values, block_size=20, tp_group=context.pgs.tp, sequence_parallel=False)
    of_hidden = S * B * H
    assert sizes == [20, 40, 20, 40, 8, 16, of_hidden]


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_ignored_tokens_are_exactly_zero(on_a_gpu: bool) -> None:
    values = leaves(inputs())
    with compiled_on_cpu("eager") if on_a_gpu else nullcontext():
        losses, of_hidden, _ = weighted(
            values, block_size=7, label_smoothing=0.1, z_loss_coefficient=0.1, **ALONE
        )
    ignored = values[2] == -100
    assert torch.count_nonzero(losses[ignored]) == 0
    assert torch.count_nonzero(of_hidden[ignored.t()]) == 0
    assert torch.count_nonzero(of_hidden.sum(-1)[~ignored.t()]) == (~ignored).sum() - 1


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_all_masked_is_zero_and_connected(weight: float) -> None:
    hidden, head, labels, weights = leaves(inputs())
    values = (hidden, head, torch.full_like(labels, -100), torch.full_like(weights, weight))
    found = weighted(values, block_size=7, label_smoothing=0.1, **ALONE)
    for tensor in found:
        assert tensor is not None and torch.count_nonzero(tensor) == 0


def test_frozen_head_takes_no_weight_gradient() -> None:
    truth = dense(inputs())
    peaks = []
    for frozen in (False, True):
        values = leaves(inputs())
        values[1].requires_grad_(not frozen)
        with Watch() as watch:
            losses, of_hidden, of_weight = weighted(values, block_size=1, **ALONE)
        peaks.append(watch.peak)
        assert error(losses, truth[0]) <= TOLERANCE and error(of_hidden, truth[1]) <= TOLERANCE
    assert of_weight is None
    assert peaks[0] - peaks[1] >= V * H * 4


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_main_grad_accumulates(kind: torch.dtype, tolerance: float) -> None:
    values = leaves(inputs())
    buffer = torch.zeros(V, H, dtype=kind)
    values[1].main_grad = buffer  # type: ignore[attr-defined]
    for _ in range(2):
        _, _, of_weight = weighted(
            values, block_size=7, gradient_accumulation_fusion=True, scale=3.0, **ALONE
        )
        # This takes no memory, and megatron-core's hooks do not add it.
        assert of_weight is not None and not of_weight.any() and of_weight.stride() == (0, 0)
        assert values[1].grad_added_to_main_grad  # type: ignore[attr-defined]
    truth = dense(inputs())[2]
    assert error(buffer, 6 * truth) <= tolerance


def test_main_grad_is_left_alone_unless_asked_and_a_frozen_trunk_trains_the_head() -> None:
    values = leaves(inputs())
    values[0].requires_grad_(False)
    values[1].main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]
    _, of_hidden, of_weight = weighted(values, block_size=7, **ALONE)
    assert of_hidden is None
    assert error(of_weight, dense(inputs())[2]) <= TOLERANCE
    assert torch.count_nonzero(values[1].main_grad) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
def test_loss_scale_leaves_gradients(kind: torch.dtype, tolerance: float) -> None:
    plain = weighted(leaves(inputs(), kind), block_size=7, **ALONE)
    scaled = weighted(leaves(inputs(), kind), block_size=7, scale=1024.0, **ALONE)
    for one, other in zip(plain[1:], scaled[1:], strict=True):
        assert one is not None and other is not None and one.dtype == kind
        assert error(other.double() / 1024, one.double()) <= tolerance


def test_small_token_weights_survive_float16() -> None:
    hidden, weight, labels, weights = inputs()
    tiny = (hidden, weight, labels, weights * 1e-9)
    found = weighted(leaves(tiny, torch.float16), block_size=7, scale=1e9, **ALONE)
    assert error(found[1], dense(inputs())[1]) <= 1e-2
    assert error(found[2], dense(inputs())[2]) <= 1e-2


def test_weights_may_all_be_negative() -> None:
    hidden, weight, labels, weights = inputs()
    negative = (hidden, weight, labels, -weights.abs())
    assert_close(weighted(leaves(negative), block_size=7, **ALONE), dense(negative))


def test_the_bias_of_a_16_bit_head_counts_and_its_gradient_is_rounded_once() -> None:
    """There is a block for each token, so rounding each of them would add up."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(512, 1, H, generator=generator).bfloat16()
    weight, bias = torch.randn(V, H, generator=generator), torch.randn(V, generator=generator)
    labels = torch.randint(0, V, (1, 512), generator=generator)
    weights = torch.rand(1, 512, generator=generator) + 0.5
    h, w, b = (x.bfloat16().requires_grad_() for x in (hidden, weight, 2 * bias))
    total = weighted_sum((h, w, labels, weights), bias=b, block_size=1, **ALONE)
    found = torch.autograd.grad(total, (h, w, b))
    exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
    logits = torch.einsum("sbh,vh->bvs", exact[0], exact[1]) + exact[2][:, None]
    want = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    assert error(total.detach(), want.detach()) <= 1e-3
    truth = torch.autograd.grad(want, exact)
    assert error(found[0], truth[0]) <= 2e-2 and error(found[1], truth[1]) <= 1e-2
    assert error(found[2], truth[2]) <= 3e-3


def weight_error(values: Inputs, num_blocks: int, into_main: bool) -> float:
    """Return the relative error (root mean square) of a bfloat16 head's gradient."""
    hidden, weight, labels, weights = leaves(values, torch.bfloat16)
    truth = dense((hidden, weight, labels, weights))[2]
    if into_main:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    _, _, found = weighted(
        (hidden, weight, labels, weights),
        block_size=labels.numel() // num_blocks,
        gradient_accumulation_fusion=into_main,
        **ALONE,
    )
    found = weight.main_grad if into_main else found  # type: ignore[attr-defined]
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("into_main", [False, True])
def test_error_of_bfloat16_heads_does_not_grow_with_blocks(into_main: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 1, 32, generator=generator)
    weight = torch.randn(64, 32, generator=generator) * 0.1
    labels = torch.randint(0, 64, (1, 512), generator=generator)
    values = (hidden, weight, labels, torch.rand(1, 512, generator=generator) + 0.5)
    whole, *cut = (weight_error(values, n, into_main) for n in (1, 8, 128))
    assert whole < 4e-3
    assert [0.9 * whole <= found <= 1.1 * whole for found in cut] == [True, True]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_and_nothing_waits(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary, tokens, block_size = 4096, 128, 16
    values = leaves(
        (
            torch.randn(tokens, 1, H, generator=generator),
            torch.randn(vocabulary, H, generator=generator),
            torch.randint(0, vocabulary, (1, tokens), generator=generator),
            torch.rand(1, tokens, generator=generator),
        ),
        kind,
    )
    values[1].requires_grad_(False)
    with Watch() as watch:
        weighted_sum(values, block_size=block_size, **ALONE).backward()
    one_block = block_size * vocabulary * 4
    allowed = 1.1 if kind == torch.float32 else 1.6
    assert one_block <= watch.peak <= allowed * one_block
    assert not watch.called & {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
    by_onednn = "mkldnn::_linear_pointwise" in watch.called
    assert by_onednn or "aten::mm.out" in watch.called


def test_onednn_computes_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "takes", lambda *_: True)
    monkeypatch.setattr(logit_blocks, "PIECE", 3 * H)
    values = inputs()
    assert_close(weighted(leaves(values), block_size=7, **ALONE), dense(values))


def test_second_backward_pass_is_refused() -> None:
    _, total = weighted_linear_cross_entropy(*leaves(inputs()), block_size=7, **ALONE)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()


def test_no_gradient_is_taken_under_no_grad() -> None:
    values = leaves(inputs())
    with torch.no_grad(), Watch() as watch:
        losses, total = weighted_linear_cross_entropy(*values, block_size=1, **ALONE)
    assert watch.peak < V * H * 4
    assert error(losses, dense(inputs())[0]) <= TOLERANCE
    torch.testing.assert_close(total, (values[3] * losses).sum())


def test_loss_equals_eager_in_float32_and_sharp_logits_stay_finite() -> None:
    hidden, weight, labels, weights = inputs()
    logits = torch.einsum("sbh,vh->bvs", hidden, weight)
    eager = F.cross_entropy(logits, labels, reduction="none")
    losses, _, _ = weighted(leaves(inputs()), block_size=7, **ALONE)
    assert error(losses, eager.double()) <= 1e-6
    sharp = (hidden * 1000, weight, labels, weights)
    assert_close(weighted(leaves(sharp), block_size=7, **ALONE), dense(sharp))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": 0}, r"`block_size` \(0\) must be at least 1 token"),
        ({"label_smoothing": 1.0}, r"`label_smoothing` \(1.0\) must be in \[0, 1\)"),
        ({"label_smoothing": -0.1}, r"`label_smoothing` \(-0.1\) must be in \[0, 1\)"),
        ({"softcap": 0.0}, r"`softcap` \(0.0\) must be above 0"),
        ({"z_loss_coefficient": -1.0}, r"`z_loss_coefficient` \(-1.0\) must be 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weighted(leaves(inputs()), **given, **ALONE)


def test_tensors_that_do_not_fit_are_refused() -> None:
    hidden, weight, labels, weights = leaves(inputs())
    with pytest.raises(ConfigError, match=r"head bias is torch.float32 of shape \(3,\), but it mu"):
        weighted_sum(inputs(), bias=torch.zeros(3), **ALONE)
    with pytest.raises(ConfigError, match=r"head bias is torch.bfloat16 of shape \(40,\), but it"):
        weighted_sum(inputs(), bias=torch.zeros(V, dtype=torch.bfloat16), **ALONE)
    with pytest.raises(ConfigError, match="hidden states are torch.bfloat16 and the head weight"):
        weighted((hidden.bfloat16(), weight, labels, weights), **ALONE)
    with pytest.raises(DataError, match=r"labels have shape \(24, 2\), .* \[b, s\] = \(2, 24\)"):
        weighted((hidden, weight, labels.t(), weights), **ALONE)
    with pytest.raises(DataError, match=r"token weights have shape \(24, 2\)"):
        weighted((hidden, weight, labels, weights.t()), **ALONE)
