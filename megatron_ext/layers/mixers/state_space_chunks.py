"""Products of matrices within the chunks of Mamba-2's recurrence, with their backward passes.

The names are those of `layers.mixers.state_space`. There are r chunks of q tokens, n heads of p
channels, and g groups whose states have k numbers for each channel; a group's heads are one matrix
of n / g * p columns. The backward pass computes what is within a chunk again, so that only the
inputs are kept. Some chunks are computed at a time, so that a CPU finds them in its cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 2**17
"""Number of decays between two tokens that a CPU computes at a time."""

BLOCK_ON_GPU = 2**28
"""The same number for a GPU."""


def blocks(x: Tensor, chunks: int) -> list[slice]:
    """Return the chunks of ``[..., q, n, p]``, of so many, that are computed at a time."""
    length, heads, _ = x.shape[-3:]
    size = BLOCK_ON_GPU if x.is_cuda else BLOCK
    count = max(1, size // (heads * length**2))
    return [slice(first, first + count) for first in range(0, chunks, count)]


class States(torch.autograd.Function):
    """The states before each chunk and after the last one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, to_end: Tensor, b: Tensor, decay: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states before chunks ``[batch, r, g, k, n / g * p]``, and the last state.

        Args:
            x: ``[batch, r, q, n, p]``.
            dt: length of the steps, ``[batch, r, q, n]``.
            to_end: decay from each token to the end of its chunk, ``[batch, r, q, n]``.
            b: ``[batch, r, q, g, k]``.
            decay: decay of each channel over a chunk, ``[batch, r, g, 1, n / g * p]``.
            first: the state before the first chunk, ``[batch, g, k, n / g * p]``.
        """
        ctx.set_materialize_grads(False)
        groups = b.size(3)
        before = first.new_empty(*x.shape[:2], *first.shape[1:])
        last = torch.empty_like(first)
        for sample, state in enumerate(first):
            for block in blocks(x, x.size(1)):
                own = sample, block
                values = x[own].to(first.dtype) * (dt[own] * to_end[own])[..., None]
                added = _by_group(b[own], first.dtype).mT @ _columns(values, groups)
                parts = before[own], added, decay[own]
                for kept, more, factor in zip(*parts, strict=True):
                    kept.copy_(state)
                    state = torch.addcmul(more, state, factor)
            last[sample] = state
        ctx.save_for_backward(x, dt, to_end, b, decay, before)
        return before, last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_last: Tensor | None) -> Any:
        x, dt, to_end, b, decay, before = ctx.saved_tensors
        dtype = to_end.dtype
        groups = b.size(3)
        inputs = (x, dt, to_end, b, decay)
        of_x, of_dt, of_end, of_b, of_decay = map(torch.empty_like, inputs)
        of_first = torch.zeros_like(before[:, 0]) if of_last is None else of_last.clone()
        for sample, later in enumerate(of_first):
            for block in reversed(blocks(x, x.size(1))):
                own = sample, block
                change = torch.empty_like(before[own])
                for i in reversed(range(len(change))):
                    chunk = sample, block.start + i
                    change[i] = later
                    of_decay[chunk] = (later * before[chunk]).sum(dim=-2, keepdim=True)
                    later *= decay[chunk]
                    if gradient is not None:
                        later += gradient[chunk]
                inputs_own = x[own].to(dtype)
                steps = dt[own]
                decays = to_end[own]
                factors = (steps * decays)[..., None]
                values = inputs_own * factors
                of_b[own] = (_columns(values, groups) @ change.mT).transpose(1, 2)
                of_values = _rows(_by_group(b[own], dtype) @ change, inputs_own)
                of_x[own] = of_values * factors
                of_factors = of_values.mul_(inputs_own).sum(dim=-1)
                of_dt[own] = of_factors * decays
                of_end[own] = of_factors * steps
        return of_x, of_dt, of_end, of_b, of_decay, of_first


class Outputs(torch.autograd.Function):
    """The outputs of each chunk, ``[r, q, n, p]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        logs: Tensor,
        from_start: Tensor,
        segments: Tensor | None,
        b: Tensor,
        c: Tensor,
        before: Tensor,
        d: Tensor | None,
    ) -> Tensor:
        """Return what the tokens of a chunk read of each other and of the state before it.

        Args:
            x: ``[r, q, n, p]``.
            dt: length of the steps, ``[r, q, n]``.
            logs: logarithm of the decay from the start of the chunk to each token, ``[r, q, n]``,
                in float64.
            from_start: the decay itself, zero after the start of a document.
            segments: number of the document of each token, ``[r, q]``; None for one document.
            b, c: ``[r, q, g, k]``.
            before: the state before each chunk, ``[r, g, k, n / g * p]``.
            d: ``[n]``, factor of ``x`` that is added to the outputs; None adds nothing.
        """
        ctx.save_for_backward(x, dt, logs, from_start, segments, b, c, before, d)
        dtype = from_start.dtype
        groups = b.size(2)
        outputs = torch.empty_like(x, memory_format=torch.contiguous_format)
        for block in blocks(x, len(x)):
            own = x[block].to(dtype)
            write = _by_group(b[block], dtype)
            read = _by_group(c[block], dtype)
            weights = _decays(logs[block], None if segments is None else segments[block], dtype)
            _over_heads(weights, groups).mul_((read @ write.mT)[:, :, None])
            values = own * dt[block][..., None]
            y = _rows(read @ before[block], own) * from_start[block][..., None]
            y += (weights @ values.transpose(1, 2)).transpose(1, 2)
            if d is not None:
                y.addcmul_(own, d.to(dtype)[:, None])
            outputs[block] = y
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, dt, logs, from_start, segments, b, c, before, d = ctx.saved_tensors
        dtype = from_start.dtype
        groups = b.size(2)
        inputs = (x, dt, logs, from_start, b, c, before)
        of_x, of_dt, of_logs, of_start, of_b, of_c, of_before = map(torch.empty_like, inputs)
        of_d = None if d is None else torch.zeros_like(d, dtype=dtype)
        for block in blocks(x, len(x)):
            own = x[block].to(dtype)
            change = gradient[block].to(dtype)
            steps = dt[block][..., None]
            start = from_start[block][..., None]
            write = _by_group(b[block], dtype)
            read = _by_group(c[block], dtype)
            state = before[block]
            decays = _decays(logs[block], None if segments is None else segments[block], dtype)
            scores = (read @ write.mT)[:, :, None]
            values = (own * steps).transpose(1, 2)
            by_head = change.transpose(1, 2)
            of_weights = by_head @ values.mT
            of_weights *= decays
            of_scores = _over_heads(of_weights, groups).sum(dim=2)
            # The same numbers are summed over rows and columns. In float64 they cancel exactly
            # where a large decay lies between two tokens.
            _over_heads(of_weights, groups).mul_(scores)
            rows, columns = (of_weights.sum(dim=axis, dtype=torch.float64) for axis in (-1, -2))
            of_logs[block] = (rows - columns).transpose(1, 2)
            _over_heads(decays, groups).mul_(scores)
            of_values = (decays.mT @ by_head).transpose(1, 2)
            read_change = _columns(change * start, groups)
            of_c[block] = (of_scores @ write + read_change @ state.mT).transpose(1, 2)
            of_b[block] = (of_scores.mT @ read).transpose(1, 2)
            of_before[block] = read.mT @ read_change
            of_start[block] = _rows(read @ state, own).mul_(change).sum(dim=-1)
            of_dt[block] = (of_values * own).sum(dim=-1)
            of_values = of_values * steps
            if d is not None and of_d is not None:
                of_values.addcmul_(change, d.to(dtype)[:, None])
                of_d += (change * own).sum(dim=(0, 1, 3))
            of_x[block] = of_values
        of_d = None if d is None or of_d is None else of_d.to(d.dtype)
        return of_x, of_dt, of_logs, of_start, None, of_b, of_c, of_before, of_d


def _by_group(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[r, q, g, k]`` as ``[r, g, q, k]``."""
    return x.to(dtype).transpose(1, 2)


def _columns(x: Tensor, groups: int) -> Tensor:
    """Return ``[r, q, n, p]`` as one matrix for each group, ``[r, g, q, n / g * p]``."""
    return x.view(*x.shape[:2], groups, -1).transpose(1, 2)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """Invert `_columns`, for the shape of ``like``."""
    return x.transpose(1, 2).reshape(like.shape)


def _over_heads(x: Tensor, groups: int) -> Tensor:
    """Return ``[r, n, q, q]`` as ``[r, g, n / g, q, q]``."""
    return x.view(len(x), groups, -1, *x.shape[2:])


def _decays(logs: Tensor, segments: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the decays ``[r, n, q, q]`` from the second to the first of two tokens of a chunk.

    They are zero towards earlier tokens and other documents. A difference of two logarithms is the
    difference of their leading digits and that of the rest.
    """
    logs = logs.transpose(1, 2)
    leading = logs.to(dtype)
    decays = leading[..., :, None] - leading[..., None, :]
    if dtype != logs.dtype:
        rest = (logs - leading).to(dtype)
        decays += rest[..., :, None]
        decays -= rest[..., None, :]
    length = logs.size(2)
    seen = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    return decays.clamp_(max=0).exp_().mul_(seen.to(dtype))
