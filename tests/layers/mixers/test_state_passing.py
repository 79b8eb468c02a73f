"""States and inputs that go from slice to slice of a sequence, against one rank's."""

import torch
from torch import Tensor

from megatron_ext.layers.context_parallel import slices_of
from megatron_ext.layers.mixers import state_passing
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.ranks import ranks

BATCH = 2


def own_rows(by_slice: Tensor, context: ParallelContext) -> Tensor:
    """Return this rank's rows ``[2 * b, ...]`` of ``[slices, b, ...]``."""
    cp = context.pgs.cp
    return torch.cat([by_slice[index] for index in slices_of(cp.rank(), cp.size())])


@ranks()
def test_on_one_rank_a_sequence_is_one_slice(context: ParallelContext) -> None:
    cp = context.pgs.cp
    x = torch.randn(6, BATCH, 3)
    rows = state_passing.slices(x, cp)
    assert torch.equal(rows, x.transpose(0, 1))
    assert torch.equal(state_passing.joined(rows, cp), x)
    states = state_passing.initial_states(torch.rand(BATCH, 4), torch.rand(BATCH, 4, 3, 5), cp)
    assert states.shape == (BATCH, 4, 3, 5) and not states.any()
    assert not state_passing.inputs_before(rows, 3, cp).any()
    documents = plain.document_indices(6, [[2], [5]])
    assert torch.equal(state_passing.documents_of_slices(documents, cp), documents)
    assert state_passing.documents_before(documents, 3, cp).tolist() == [[-1] * 3] * BATCH
    segments = state_passing.segments_of_slices(documents, cp)
    assert segments.tolist() == [[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2]]


@ranks(cp=2)
def test_slices_are_sequences_of_a_larger_batch(context: ParallelContext) -> None:
    cp = context.pgs.cp
    x = torch.arange(8 * BATCH).view(8, BATCH)
    own = plain.zigzag(x, cp.rank(), cp.size())
    rows = state_passing.slices(own, cp)
    by_slice = torch.stack([part.T for part in x.chunk(2 * cp.size())])
    assert torch.equal(rows, own_rows(by_slice, context))
    assert torch.equal(state_passing.joined(rows, cp), own)


def states_equal_a_scan(context: ParallelContext, matrices: bool) -> None:
    cp = context.pgs.cp
    size = 2 * cp.size()
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(size, BATCH, *shape, generator=generator, dtype=torch.float64)

    transitions = (drawn(3, 4, 4) if matrices else drawn(3)).requires_grad_()
    finals = drawn(3, 4, 2).requires_grad_()
    change = drawn(3, 4, 2)
    apply = torch.matmul if matrices else state_passing.scaled
    states = [torch.zeros_like(finals[0])]
    for transition, final in zip(transitions, finals, strict=True):
        factors = transition if matrices else transition[..., None, None]
        states.append((factors @ states[-1] if matrices else factors * states[-1]) + final)
    want = torch.stack(states[:-1])
    theirs = torch.autograd.grad(want, (transitions, finals), change)

    given = [own_rows(full, context).detach().requires_grad_() for full in (transitions, finals)]
    got = state_passing.initial_states(given[0], given[1], cp, apply)
    torch.testing.assert_close(got, own_rows(want, context), rtol=0, atol=1e-12)
    ours = torch.autograd.grad(got, given, own_rows(change, context))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, own_rows(other, context), rtol=0, atol=1e-12)


@ranks(cp=2)
def test_states_of_two_ranks_equal_a_scan(context: ParallelContext) -> None:
    states_equal_a_scan(context, matrices=False)
    states_equal_a_scan(context, matrices=True)


@ranks(cp=4)
def test_states_of_four_ranks_equal_a_scan(context: ParallelContext) -> None:
    states_equal_a_scan(context, matrices=False)
    states_equal_a_scan(context, matrices=True)


@ranks(cp=2)
def test_inputs_before_a_slice_may_be_of_several_slices(context: ParallelContext) -> None:
    cp = context.pgs.cp
    x = torch.randn(BATCH, 8, 3, generator=torch.Generator().manual_seed(6)).requires_grad_()
    documents = plain.document_indices(8, [[4, 7], [1, 5]])
    by_slice = torch.stack(x.chunk(4, dim=1))
    rows = own_rows(by_slice, context).detach().requires_grad_()
    for width in (0, 1, 3, 5):
        padded = torch.cat((x.new_zeros(BATCH, width, 3), x), dim=1)
        starts = range(0, 8, 2)
        want = own_rows(torch.stack([padded[:, i : i + width] for i in starts]), context)
        got = state_passing.inputs_before(rows, width, cp)
        assert torch.equal(got, want)
        outside = torch.full((BATCH, width), -1)
        known = torch.cat((outside, documents), dim=1)
        theirs = own_rows(torch.stack([known[:, i : i + width] for i in starts]), context)
        assert torch.equal(state_passing.documents_before(documents, width, cp).long(), theirs)
        if width:
            (mine,) = torch.autograd.grad(got.square().sum(), rows)
            later = torch.stack([padded[:, i : i + width] for i in starts])
            (other,) = torch.autograd.grad(later.square().sum(), x)
            assert torch.equal(mine, own_rows(torch.stack(other.chunk(4, dim=1)), context))


@ranks(cp=2)
def test_segments_count_the_documents_that_begin_in_a_slice(context: ParallelContext) -> None:
    cp = context.pgs.cp
    documents = plain.document_indices(8, [[4, 7], [1, 5]])
    got = state_passing.segments_of_slices(documents, cp)
    # Sample 0 begins documents at positions 0, 4 and 7; sample 1 at 0, 1 and 5.
    by_slice = torch.tensor(
        [[[1, 1], [1, 2]], [[0, 0], [0, 0]], [[1, 1], [0, 1]], [[0, 1], [0, 0]]], dtype=torch.int32
    )
    assert torch.equal(got, own_rows(by_slice, context))
    parts = torch.stack(documents.chunk(4, dim=1))
    own = state_passing.documents_of_slices(documents, cp)
    assert torch.equal(own, own_rows(parts, context))
