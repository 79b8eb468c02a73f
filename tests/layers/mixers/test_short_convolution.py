"""The short convolution against sums in float64, and what it sees of other documents."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.mixers.short_convolution import short_convolution
from tests.layers import plain


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor) -> Tensor:
    """Return the convolution of ``[b, s, c]``, position by position."""
    out = torch.zeros_like(x)
    width = weight.size(1)
    for b, s, tap in itertools.product(range(x.size(0)), range(x.size(1)), range(width)):
        source = s - (width - 1 - tap)
        if source >= 0 and documents[b, source] == documents[b, s]:
            out[b, s] = out[b, s] + x[b, source] * weight[:, tap]
    return out if bias is None else out + bias


@pytest.mark.parametrize(
    ("batch", "length", "channels", "width", "ends"),
    [
        (2, 11, 5, 4, [[1, 2, 7], [3]]),
        (1, 1, 3, 4, [[]]),
        (1, 2, 1, 4, [[1]]),
        (2, 6, 4, 1, [[2], []]),
        (1, 9, 2, 2, [[1, 2, 3, 4, 5, 6, 7, 8]]),
    ],
)
def test_equals_sums_over_the_positions_of_a_document(
    batch: int, length: int, channels: int, width: int, ends: list[list[int]]
) -> None:
    torch.manual_seed(length)
    documents = plain.document_indices(length, ends)
    for biased in (False, True):
        leaves = [torch.randn(batch, length, channels), torch.randn(channels, width)]
        leaves += [torch.randn(channels)] * biased
        truth = [leaf.double().requires_grad_() for leaf in leaves]
        for leaf in leaves:
            leaf.requires_grad_()
        want = summed(truth[0], truth[1], truth[2] if biased else None, documents)
        got = short_convolution(leaves[0], leaves[1], leaves[2] if biased else None, documents)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
        change = torch.randn(want.shape, dtype=torch.float64)
        theirs = torch.autograd.grad(want, truth, change)
        ours = torch.autograd.grad(got, leaves, change.float())
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=0, atol=1e-5)


def test_equals_torch_with_one_document() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    want = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(short_convolution(x, weight, bias), want)


def test_continues_from_the_inputs_before() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(2, 12, 3), torch.randn(3, 4)
    documents = plain.document_indices(12, [[6, 9], []])
    whole = short_convolution(x, weight, None, documents)
    part = short_convolution(x[:, 7:], weight, None, documents[:, 7:], x[:, 4:7], documents[:, 4:7])
    assert torch.equal(part, whole[:, 7:])
    assert torch.equal(
        short_convolution(x[:, 7:], weight, None, None, x[:, 4:7]),
        short_convolution(x, weight)[:, 7:],
    )


def test_another_document_changes_nothing() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(1, 8, 3), torch.randn(3, 4)
    documents = plain.document_indices(8, [[5]])
    other = x.clone()
    other[:, :5] = 1e30
    got = [short_convolution(each, weight, None, documents)[:, 5:] for each in (x, other)]
    assert torch.equal(*got)


def test_half_precision_is_summed_in_single() -> None:
    torch.manual_seed(4)
    x = torch.randn(1, 16, 4, dtype=torch.bfloat16)
    weight = torch.randn(4, 4, dtype=torch.bfloat16)
    got = short_convolution(x, weight)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, short_convolution(x.float(), weight.float()).bfloat16())
