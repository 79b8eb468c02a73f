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

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.mixers.state_space_chunks import Outputs, States

CHUNK = 64
"""Tokens of a chunk."""


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
        self.batch, self.length, heads, self.head_dim = x.shape
        self.columns = heads // b.size(2) * self.head_dim
        self.chunk = min(chunk, self.length)
        self.x, self.b, self.c = (self._in_chunks(each) for each in (x, b, c))
        self.dt = self._in_chunks(dt.to(self.dtype))
        self.d = d
        self.segments = None if segments is None else self._segments_in_chunks(segments)
        # Sums in float64, so that decays between neighbours are exact after large ones, too.
        self.logs = (self.dt * a.to(self.dtype)).double().cumsum(dim=1)
        self.from_start = self.logs.to(self.dtype).exp()
        self.to_end = (self.logs[:, -1:] - self.logs).to(self.dtype).exp()
        if self.segments is not None:
            self.from_start = self.from_start * (self.segments == 0)[..., None]
            self.to_end = self.to_end * (self.segments == self.segments[:, -1:])[..., None]

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return the factor of the state before the sequences, and the state after them without it.

        The factor is ``[batch, n]``, zero where a document begins; the state ``[batch, n, k, p]``.
        """
        # The sum of the logarithms of all chunks, and zero where one of the chunks forgets.
        whole = self._by_sample(self.logs[:, -1]).sum(dim=1).to(self.dtype).exp()
        if self.segments is not None:
            keeps = self._by_sample(self.segments[:, -1] == 0).all(dim=1)
            whole = whole * keeps[:, None]
        return whole, self._by_head(self._states(None)[1])

    def outputs(self, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[batch, s, n, p]``, and the state after them ``[batch, n, k, p]``.

        ``initial_state``, as the state, is the one before the sequences; None is zeros.
        """
        before, last = self._states(initial_state)
        y: Tensor = Outputs.apply(  # type: ignore[no-untyped-call]
            self.x, self.dt, self.logs, self.from_start, self.segments,
            self.b, self.c, before.flatten(0, 1), self.d,
        )  # fmt: skip
        return self._by_sample(y).flatten(1, 2)[:, : self.length], self._by_head(last)

    def _states(self, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk ``[batch, chunks, ...]``, and after the last one.

        A state is ``[g, k, n / g * p]``: the heads of a group are columns of one matrix.
        """
        groups, width = self.b.shape[2:]
        if initial_state is None:
            first = self.dt.new_zeros(self.batch, groups, width, self.columns)
        else:
            by_group = torch.unflatten(initial_state.to(self.dtype), 1, (groups, -1))
            first = by_group.transpose(2, 3).flatten(3)
        over_chunks = self.from_start[:, -1].repeat_interleave(self.head_dim, dim=-1)
        decay = over_chunks.view(-1, groups, 1, self.columns)
        parts = map(self._by_sample, (self.x, self.dt, self.to_end, self.b, decay))
        before, last = States.apply(*parts, first)  # type: ignore[no-untyped-call]
        return before, last

    def _by_head(self, state: Tensor) -> Tensor:
        """Return ``[batch, n, k, p]`` of a state ``[batch, g, k, n / g * p]``."""
        by_channel = torch.unflatten(state, 3, (-1, self.head_dim))
        return by_channel.transpose(2, 3).flatten(1, 2)

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
