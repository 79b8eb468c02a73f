"""Recurrences over a sequence whose slices are on several context-parallel ranks.

A rank holds two slices of the sequence (see `layers.context_parallel`), which mixers treat as a
batch of twice as many, shorter sequences: the first slice of each sample, then the second slice of
each. A slice turns the state before it into the state after it by ``transition * state + final``,
where ``final`` is its state from a start of zero. The ranks gather the transitions and the final
states of all slices, whose size does not depend on the length of the sequence, and each computes
the states before its own slices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.context_parallel import slices_of

Apply = Callable[[Tensor, Tensor], Tensor]
"""Takes the transition and the state of one slice, both ``[b, ...]``; returns their product."""


def slices(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return a rank's tokens ``[s/cp, b, ...]`` as sequences, ``[2 * b, s / (2 * cp), ...]``.

    On one rank the result is ``[b, s, ...]``.
    """
    if group.size() == 1:
        return x.transpose(0, 1)
    return torch.cat(x.chunk(2), dim=1).transpose(0, 1)


def joined(x: Tensor, group: ProcessGroup) -> Tensor:
    """Invert `slices`: ``[2 * b, s / (2 * cp), ...]`` to ``[s/cp, b, ...]``."""
    if group.size() == 1:
        return x.transpose(0, 1)
    return torch.cat(x.transpose(0, 1).chunk(2, dim=1))


def scaled(transition: Tensor, state: Tensor) -> Tensor:
    """Multiply a state by a transition that has its first axes only, or all of them."""
    trailing = state.dim() - transition.dim()
    return transition.view(*transition.shape, *[1] * trailing) * state


def initial_states(
    transition: Tensor, final: Tensor, group: ProcessGroup, apply: Apply = scaled
) -> Tensor:
    """Return the state before each of this rank's slices, ``[2 * b, ...]``, as ``final``.

    The ranks send one message of the size of the transitions and states of two slices. On one rank
    the result is zeros.

    Args:
        transition: ``[2 * b, ...]``; zero where a document begins within the slice.
        final: the state after each slice if the state before it is zero, ``[2 * b, ...]``.
        apply: multiplies a transition by a state; `scaled` is right for scalars and channels, and
            `torch.matmul` for matrices.
    """
    if group.size() == 1:
        return torch.zeros_like(final)
    sizes = [transition[0].numel(), final[0].numel()]
    message = torch.cat((transition.flatten(1), final.flatten(1)), dim=1)
    early, late = slices_of(group.rank(), group.size())
    state = torch.zeros_like(final.chunk(2)[0])
    before = [state]
    for summary in _of_all_slices(message, group)[:late]:
        factors, added = torch.split(summary, sizes, dim=1)
        state = apply(factors.view(-1, *transition.shape[1:]), state) + added.view_as(state)
        before.append(state)
    return torch.cat((before[early], before[late]))


def inputs_before(x: Tensor, width: int, group: ProcessGroup) -> Tensor:
    """Return the ``width`` inputs before each of this rank's slices, ``[2 * b, width, c]``.

    Those before the first slice are zeros. ``x`` is ``[2 * b, s / (2 * cp), c]``.
    """
    if group.size() == 1 or not width:
        return x.new_zeros(x.size(0), width, *x.shape[2:])
    ends = _of_all_slices(x[:, -width:], group)
    outside = torch.zeros_like(ends[0][:, :1]).expand(-1, width, *x.shape[2:])

    def before(index: int) -> Tensor:
        # Slices may be shorter than the width.
        return torch.cat((outside, *ends[:index]), dim=1)[:, -width:]

    return torch.cat([before(index) for index in slices_of(group.rank(), group.size())])


def documents_of_slices(documents: Tensor, group: ProcessGroup) -> Tensor:
    """Return the documents of this rank's slices, ``[2 * b, s / (2 * cp)]``.

    ``documents`` is the document index of each position of the whole sequences, ``[b, s]``.
    """
    if group.size() == 1:
        return documents
    parts = documents.chunk(2 * group.size(), dim=1)
    return torch.cat([parts[index] for index in slices_of(group.rank(), group.size())])


def documents_before(documents: Tensor, width: int, group: ProcessGroup) -> Tensor:
    """Return the documents of `inputs_before`, ``[2 * b, width]``.

    Positions before the sequence have the index -1. ``documents`` is as in `documents_of_slices`.
    """
    known = F.pad(documents, (width, 0), value=-1)
    if group.size() == 1:
        return known[:, :width]
    length = documents.size(1) // (2 * group.size())
    indices = slices_of(group.rank(), group.size())
    return torch.cat([known[:, index * length :][:, :width] for index in indices])


def segments_of_slices(documents: Tensor, group: ProcessGroup) -> Tensor:
    """Return how many documents have begun in a slice up to each position, as int32.

    A position with 0 belongs to the document that the slice before left off, so that the state
    before the slice is its own; positions with equal numbers are in one document. The result is
    ``[2 * b, s / (2 * cp)]``; ``documents`` is as in `documents_of_slices`.
    """
    own = documents_of_slices(documents, group)
    last = torch.cat((documents_before(documents, 1, group), own[:, :-1]), dim=1)
    return (own != last).cumsum(dim=1, dtype=torch.int32)


def _of_all_slices(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Gather ``[2 * b, ...]`` of all ranks; return ``[b, ...]`` of each slice in sequence order.

    The gradients of all ranks are added.
    """
    gathered = gather_from_sequence_parallel_region(
        x.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    size = group.size()
    parts = gathered.chunk(2 * size)
    by_slice = {
        index: parts[2 * rank + half]
        for rank in range(size)
        for half, index in enumerate(slices_of(rank, size))
    }
    return [by_slice[index] for index in range(2 * size)]
