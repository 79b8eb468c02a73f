"""The recurrence of Mamba-2 in matrix form ("SSD", Dao and Gu, arXiv:2405.21060, section 6).

Names are those of the paper. A head has a state ``h`` of k x p numbers, which a token decays by a
scalar, and to which it adds an outer product of k and p numbers; the output reads the state::

    h_t = exp(dt_t a) h_(t-1) + dt_t b_t x_t^T        y_t = h_t^T c_t + d x_t

The heads of a group share b and c. A sequence is cut into chunks: within a chunk the outputs are
products of matrices, as in attention, and states are computed only where chunks meet. All
arithmetic is in float32 at least. Decays are sums of logarithms, of which only differences that
are not positive become exponents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.mixers.blocks import in_blocks

CHUNK = 64
"""Tokens of a chunk."""

BLOCK = 2**18
"""Number of decays between two tokens that a CPU computes at a time."""

BLOCK_ON_GPU = 2**28
"""The same number for a GPU."""


def time_steps(dt: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Return the length of each token's step, ``[..., n]``, in at least float32.

    Args:
        dt: ``[..., n]``, before ``bias`` of ``[n]`` is added.
        limits: the smallest and the largest result.
    """
    dtype = torch.promote_types(dt.dtype, torch.float32)
    steps = F.softplus(dt.to(dtype) + bias.to(dtype))
    low, high = limits
    return steps if low <= 0 and high == float("inf") else steps.clamp(low, high)


class StateSpace:
    """The recurrence over sequences; the states before them may be given after the inputs.

    Args:
        x: ``[batch, s, n, p]``.
        dt: length of each token's step, ``[batch, s, n]``, see `time_steps`.
        a: ``[n]``, negative.
        b, c: ``[batch, s, g, k]``; each group belongs to n / g heads in turn.
        d: ``[n]``; None leaves out this term.
        segments: how many documents have begun up to each position, ``[batch, s]``. Positions with
            0 continue the state before the sequence (see `state_passing.segments_of_slices`). None
            means that all of them do.
        chunk: tokens of a chunk.
    """

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        segments: Tensor | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.batch, self.length, self.heads, self.head_dim = x.shape
        self.chunk = min(chunk, self.length)
        self.x, self.dt, self.b, self.c = (self._in_chunks(each) for each in (x, dt, b, c))
        self.d = d
        self.segments = None if segments is None else self._segments_in_chunks(segments)
        # Sums in float64, so that decays between neighbours are exact after large ones, too.
        self.logs = (self.dt.to(self.dtype) * a.to(self.dtype)).double().cumsum(dim=1)
        self.from_start = self.logs.to(self.dtype).exp()
        to_end = (self.logs[:, -1:] - self.logs).to(self.dtype).exp()
        if self.segments is not None:
            self.from_start = self.from_start * (self.segments == 0)[..., None]
            to_end = to_end * (self.segments == self.segments[:, -1:])[..., None]
        added = in_blocks(_added, self._rows_of_a_block(), self.x, self.dt, to_end, self.b)
        self.added = self._by_sample(added)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return the factor of the state before the sequences, and the state after them without it.

        The factor is ``[batch, n]``, zero where a document begins; the state ``[batch, n, k, p]``.
        """
        # The sum of the logarithms of all chunks, and zero where one of the chunks forgets.
        whole = self._by_sample(self.logs[:, -1]).sum(dim=1).to(self.dtype).exp()
        if self.segments is not None:
            keeps = self._by_sample(self.segments[:, -1] == 0).all(dim=1)
            whole = whole * keeps[:, None]
        return whole, self._by_head(self._states(None)[:, -1])

    def outputs(self, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[batch, s, n, p]``, and the state after them ``[batch, n, k, p]``.

        ``initial_state``, as the state, is the one before the sequences; None is zeros.
        """
        states = self._states(initial_state)
        before = states[:, :-1].flatten(0, 1)
        y = in_blocks(
            _outputs, self._rows_of_a_block(), self.x, self.dt, self.logs, self.from_start,
            self.segments, self.b, self.c, before, self.d, shared=1,
        )  # fmt: skip
        y = self._by_sample(y).flatten(1, 2)[:, : self.length]
        return y, self._by_head(states[:, -1])

    def _states(self, initial_state: Tensor | None) -> Tensor:
        """Return the states before each chunk and after the last, ``[batch, chunks + 1, ...]``.

        A state is ``[g, k, n / g, p]``, so that the heads of a group are one matrix.
        """
        _, chunks, groups, width, per_group, size = self.added.shape
        decay = self.from_start[:, -1].view(self.batch, chunks, groups, 1, per_group, 1)
        if initial_state is None:
            first = self.added.new_zeros(self.batch, *self.added.shape[2:])
        else:
            by_group = initial_state.to(self.dtype).view(self.batch, groups, -1, width, size)
            first = by_group.transpose(2, 3)
        states: Tensor = _Scan.apply(self.added, decay, first)  # type: ignore[no-untyped-call]
        return states

    def _by_head(self, state: Tensor) -> Tensor:
        """Return ``[batch, n, k, p]`` of a state ``[batch, g, k, n / g, p]``."""
        return state.transpose(2, 3).flatten(1, 2)

    def _in_chunks(self, x: Tensor) -> Tensor:
        """Return ``[batch, s, ...]`` as ``[batch * chunks, chunk, ...]``, with zeros at the end."""
        missing = -self.length % self.chunk
        if missing:
            x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing))
        return torch.unflatten(x, 1, (-1, self.chunk)).flatten(0, 1)

    def _by_sample(self, x: Tensor) -> Tensor:
        """Return ``[batch * chunks, ...]`` as ``[batch, chunks, ...]``."""
        return torch.unflatten(x, 0, (self.batch, -1))

    def _segments_in_chunks(self, segments: Tensor) -> Tensor:
        """Return ``[batch * chunks, chunk]``, counted from the position before each chunk."""
        missing = -self.length % self.chunk
        if missing:
            segments = torch.cat((segments, segments[:, -1:].expand(-1, missing)), dim=1)
        counts = torch.unflatten(segments, 1, (-1, self.chunk))
        before = torch.cat((torch.zeros_like(counts[:, :1, :1]), counts[:, :-1, -1:]), dim=1)
        return (counts - before).flatten(0, 1)

    def _rows_of_a_block(self) -> int:
        size = BLOCK_ON_GPU if self.x.is_cuda else BLOCK
        return max(1, size // (self.heads * self.chunk**2))


def _added(x: Tensor, dt: Tensor, to_end: Tensor, b: Tensor) -> Tensor:
    """Return what chunks add to the state, ``[r, g, k, n / g, p]`` for r chunks of q tokens.

    ``x`` is ``[r, q, n, p]``, ``dt`` and ``to_end`` are ``[r, q, n]``, and ``b`` is ``[r, q, g,
    k]``.
    """
    groups = b.size(2)
    values = x.to(to_end.dtype) * (dt * to_end)[..., None]
    by_group = torch.unflatten(values, 2, (groups, -1)).flatten(3).transpose(1, 2)
    added = b.to(to_end.dtype).permute(0, 2, 3, 1) @ by_group
    return torch.unflatten(added, 3, (-1, x.size(3)))


def _outputs(
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
    """Return the outputs of chunks, ``[r, q, n, p]``.

    Args:
        x, dt, b: as in `_added`; ``c`` is as ``b``.
        logs: logarithm of the decay from the start of the chunk to each token, ``[r, q, n]``, in
            float64.
        from_start: the decay itself, zero after the start of a document.
        segments: ``[r, q]``, or None.
        before: the state before each chunk, ``[r, g, k, n / g, p]``.
        d: ``[n]``, or None.
    """
    groups = b.size(2)
    dtype = from_start.dtype
    read = c.to(dtype).transpose(1, 2)
    scores = read @ b.to(dtype).permute(0, 2, 3, 1)
    between: Tensor = _Decays.apply(logs, segments, dtype)  # type: ignore[no-untyped-call]
    decays = torch.unflatten(between, 1, (groups, -1))
    inputs = x.to(dtype)
    values = (inputs * dt[..., None]).transpose(1, 2)
    within = (decays * scores[:, :, None]).flatten(1, 2) @ values
    earlier = torch.unflatten(read @ before.flatten(3), 3, (-1, x.size(3)))
    earlier = earlier.transpose(1, 2).flatten(2, 3) * from_start[..., None]
    y = within.transpose(1, 2) + earlier
    if d is not None:
        y = y + inputs * d.to(dtype)[:, None]
    return y.to(x.dtype)


class _Decays(torch.autograd.Function):
    """Decays ``[r, n, q, q]`` from the second to the first of two tokens of a chunk.

    They are zero towards earlier tokens and other documents. A difference of two logarithms is that
    of their leading digits and that of the rest. In the backward pass, sums in float64 of the same
    numbers over rows and columns cancel exactly where a large decay lies between tokens.
    """

    @staticmethod
    def forward(ctx: Any, logs: Tensor, segments: Tensor | None, dtype: torch.dtype) -> Tensor:
        logs = logs.transpose(1, 2)
        leading = logs.to(dtype)
        rest = (logs - leading).to(dtype)
        decays = leading[..., :, None] - leading[..., None, :]
        if dtype != logs.dtype:
            decays += rest[..., :, None]
            decays -= rest[..., None, :]
        length = logs.size(2)
        hidden = torch.ones(length, length, dtype=torch.bool, device=logs.device).triu(1)
        if segments is not None:
            hidden = hidden | (segments[:, None, :, None] != segments[:, None, None, :])
        decays.masked_fill_(hidden, float("-inf")).exp_()
        ctx.save_for_backward(decays)
        return decays

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (decays,) = ctx.saved_tensors
        change = gradient * decays
        rows = change.sum(dim=-1, dtype=torch.float64)
        columns = change.sum(dim=-2, dtype=torch.float64)
        return (rows - columns).transpose(1, 2), None, None


class _Scan(torch.autograd.Function):
    """States from the first and from what is added to a state times a decay, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        """Return ``[batch, chunks + 1, ...]``; ``added`` and ``decay`` have one entry less."""
        batch, chunks, *shape = added.shape
        states = added.new_empty(batch, chunks + 1, *shape)
        states[:, 0] = first
        for i in range(chunks):
            torch.addcmul(added[:, i], states[:, i], decay[:, i], out=states[:, i + 1])
        ctx.save_for_backward(states, decay)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        states, decay = ctx.saved_tensors
        change = torch.empty_like(gradient[:, 1:])
        of_decay = torch.empty_like(decay)
        later = gradient[:, -1]
        kept = [axis for axis in range(1, decay.dim() - 1) if decay.size(axis + 1) == 1]
        for i in reversed(range(decay.size(1))):
            change[:, i] = later
            of_decay[:, i] = (later * states[:, i]).sum(dim=kept, keepdim=True)
            later = torch.addcmul(gradient[:, i], later, decay[:, i])
        return change, of_decay, later


def step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[batch, n, p]`` of one token, and the state after it.

    Args:
        x: ``[batch, n, p]``.
        dt: ``[batch, n]``.
        a, d: ``[n]``; ``d`` may be None.
        b, c: ``[batch, g, k]``.
        state: ``[batch, n, k, p]``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    repeats = x.size(1) // b.size(1)
    inputs = x.to(dtype)
    write, read = (each.to(dtype).repeat_interleave(repeats, dim=1) for each in (b, c))
    steps = dt.to(dtype)
    decay = (steps * a.to(dtype)).exp()
    added = write[..., None] * (inputs * steps[..., None])[:, :, None]
    state = torch.addcmul(added, state.to(dtype), decay[..., None, None])
    y = (read[:, :, None] @ state)[:, :, 0]
    if d is not None:
        y = y + inputs * d.to(dtype)[:, None]
    return y.to(x.dtype), state
