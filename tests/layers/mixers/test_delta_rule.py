"""The chunked gated delta rule against its recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.mixers.delta_rule import DeltaRule, step
from megatron_ext.layers.mixers.delta_scan import Sizes
from tests.layers import plain
from tests.layers.mixers.delta_plain import drawn, recurrence, relative

SHAPES: list[tuple[int, int, int, int, int, int, float, list[list[int]]]] = [
    # sequences, tokens, heads of keys and of values, sizes of both, strength of decays, documents
    (1, 1, 1, 1, 16, 16, 1.0, []),
    (3, 1, 1, 2, 16, 32, 1.0, [[], [0], []]),
    (1, 2, 1, 1, 16, 16, 1.0, []),
    (2, 31, 2, 2, 16, 16, 0.1, []),
    (1, 32, 1, 3, 32, 16, 1.0, []),
    (1, 33, 1, 1, 16, 64, 1.0, []),
    (2, 130, 2, 4, 16, 32, 1.0, []),
    (1, 257, 1, 1, 16, 16, 0.01, []),
    (1, 300, 2, 2, 32, 32, 0.05, [[100, 101, 102, 299]]),
    (2, 64, 1, 2, 64, 16, 1.0, [list(range(64)), [1, 2, 63]]),
    (1, 97, 1, 1, 128, 128, 0.5, [[32, 64, 96]]),
    (1, 65, 2, 4, 128, 128, 0.5, []),
    (1, 40, 1, 1, 256, 256, 0.5, [[7]]),
    (1, 70, 1, 2, 256, 16, 1.0, []),
    (1, 129, 2, 2, 32, 32, 100.0, []),
    (1, 129, 2, 2, 32, 32, 1000.0, [[0, 50]]),
    (2, 200, 1, 1, 16, 256, 20.0, [[3, 30], []]),
    (5, 17, 3, 3, 16, 16, 1.0, []),
    (1, 512, 1, 1, 16, 16, 0.001, []),
    (1, 150, 1, 8, 48, 24, 1.0, [[149]]),
]


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: tuple[int, ...], by_channel: bool) -> None:
    *sizes, strength, ends = shape
    segments = plain.document_indices(sizes[1], ends) if ends else None  # type: ignore[arg-type]
    leaves = drawn(*sizes, by_channel=by_channel, strength=strength)
    truth = [leaf.double().requires_grad_() for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    want = recurrence(*truth[:5], state=truth[5], segments=segments)
    got = DeltaRule(*leaves[:5], segments=segments).outputs(leaves[5])
    generator = torch.Generator().manual_seed(2)
    changes = [torch.randn(x.shape, generator=generator) for x in want]
    theirs = torch.autograd.grad(want, truth, [x.double() for x in changes])
    ours = torch.autograd.grad(got, leaves, changes)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == torch.float32 and relative(mine, other) < 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine, other) < 1e-5


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_equal_keys_and_full_rates_stay_exact(by_channel: bool) -> None:
    """Each token then overwrites all that the others wrote, the worst case of the inverse."""
    queries, keys, values, decays, _, state = drawn(1, 100, 1, 1, 16, 16, by_channel=by_channel)
    keys = keys[:, :1].expand_as(keys)
    beta = torch.ones(1, 100, 1)
    given = (queries, keys, values, 1e-3 * decays, beta)
    want, _ = recurrence(*(x.double() for x in given), state=state.double())
    got, _ = DeltaRule(*given).outputs(state)
    assert relative(got, want) < 1e-6


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("strength", [0.05, 1.0, 20.0])
def test_rates_of_decay_have_exact_gradients(strength: float, by_channel: bool) -> None:
    """The gradient of their logarithm adds up gradients times decays, the strong ones most."""
    *leaves, state = drawn(1, 200, 1, 2, 16, 16, by_channel=by_channel, strength=strength)
    rates = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype) for x in leaves]
        rate = torch.zeros(2, dtype=dtype, requires_grad=True)
        factor = rate.exp()[:, None] if by_channel else rate.exp()
        inputs[3] = inputs[3] * factor
        if dtype == torch.float64:
            out, _ = recurrence(*inputs, state=state.double())
        else:
            out, _ = DeltaRule(*inputs).outputs(state)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        rates.append(rate.grad)
    assert relative(rates[1], rates[0]) < 3e-6  # type: ignore[arg-type]


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_backward_passes_equal_differences(by_channel: bool) -> None:
    given = drawn(2, 11, 2, 4, 4, 3, by_channel=by_channel, strength=2.0)
    leaves = [leaf.double().requires_grad_() for leaf in given]
    segments = plain.document_indices(11, [[3, 4, 9], [0, 8]])
    sizes = Sizes(chunk=4, segment=2, heads=3)

    def outputs(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return DeltaRule(*inputs[:5], segments=segments, sizes=sizes).outputs(inputs[5])

    def summary(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return DeltaRule(*inputs, segments=segments, sizes=sizes).summary()

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(summary, leaves[:5], fast_mode=True)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_a_sequence_in_two_parts_equals_the_whole(by_channel: bool) -> None:
    *leaves, state = (
        x.double() for x in drawn(2, 90, 1, 2, 16, 24, by_channel=by_channel, strength=0.2)
    )
    rows: list[list[list[int]]] = [[[], []], [[20], [70]], [[50], [49, 51]]]
    for ends in rows:
        documents = plain.document_indices(90, ends)
        whole, final = DeltaRule(*leaves, segments=documents).outputs(state)
        first = DeltaRule(*(x[:, :50] for x in leaves), segments=documents[:, :50])
        rest = documents[:, 50:] - documents[:, 49:50]
        second = DeltaRule(*(x[:, 50:] for x in leaves), segments=rest)
        transition, added = first.summary()
        middle = transition @ state + added
        begun = documents[:, 49] > 0
        assert not transition[begun].any()
        early, same = first.outputs(state)
        late, last = second.outputs(middle)
        torch.testing.assert_close(same, middle, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat((early, late), 1), whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(last, final, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_documents_know_nothing_of_each_other(by_channel: bool) -> None:
    leaves = drawn(1, 90, 1, 2, 16, 16, by_channel=by_channel, strength=0.2)[:5]
    own = slice(37, 70)
    segments = plain.document_indices(90, [[own.start, own.stop]])

    def run(inputs: list[Tensor]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = DeltaRule(*inputs, segments=segments).outputs()
        gradients = torch.autograd.grad(out[:, own].square().sum(), inputs)
        for gradient in gradients:
            assert not gradient[:, : own.start].any() and not gradient[:, own.stop :].any()
        return [out[:, own], *(gradient[:, own] for gradient in gradients)]

    packed = run(leaves)
    others = drawn(1, 90, 1, 2, 16, 16, by_channel=by_channel, strength=50.0, seed=9)[:5]
    for x, other in zip(others, leaves, strict=True):
        x[:, own] = other[:, own]
    for one, two in zip(packed, run(others), strict=True):
        assert torch.equal(one, two)
    alone = [x[:, own].detach().requires_grad_() for x in leaves]
    out, _ = DeltaRule(*alone).outputs()
    gradients = torch.autograd.grad(out.square().sum(), alone)
    assert relative(packed[0], out.double()) < 1e-6
    for one, two in zip(packed[1:], gradients, strict=True):
        assert relative(one, two.double()) < 1e-5


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_a_step_is_one_token(by_channel: bool) -> None:
    *leaves, state = drawn(2, 40, 2, 4, 16, 24, by_channel=by_channel)
    whole, final = DeltaRule(*leaves).outputs(state)
    early, current = DeltaRule(*(x[:, :35] for x in leaves)).outputs(state)
    got = [early]
    for token in range(35, 40):
        out, current = step(current, *(x[:, token] for x in leaves))
        got.append(out[:, None])
    assert relative(torch.cat(got, 1), whole.double()) < 1e-6
    assert relative(current, final.double()) < 1e-6


def test_half_precision_is_computed_in_single() -> None:
    leaves = [x.bfloat16() for x in drawn(1, 50, 1, 2, 16, 16, by_channel=False)[:5]]
    out, final = DeltaRule(*leaves).outputs()
    want, same = DeltaRule(*(x.float() for x in leaves)).outputs()
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert torch.equal(out, want.bfloat16()) and torch.equal(final, same)
