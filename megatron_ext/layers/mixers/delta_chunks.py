"""The matrices by which a chunk of tokens acts on the state of the gated delta rule.

`delta_rule` states the rule. For one head and l tokens, let G be the sums of the log decays up to
each token, and D the decays ``exp(G_i - G_j)`` from token j to a token i that is not before it.
With the state S before the chunk, its outputs O and the state S' after it are (arXiv:2412.06464,
section 3.3)::

    U = (I + diag(beta) N)^-1 diag(beta) (V - K_read S)      N = K K^T * D, below the diagonal
    O = Q_read S + P U                                       P = Q K^T * D
    S' = kept S + K_written^T U

Queries and keys that read the state are decayed from the start of the chunk, keys that write it are
decayed to its end. The rows of U are what the tokens write to the state. A decay that differs
between channels is part of the sums ``K K^T * D`` and ``Q K^T * D`` over the channels.

Shapes: c chunks, m heads (of several sequences), l tokens, k channels of a key. No exponent here is
above zero, so that nothing overflows, however strong the decay is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Gradients:
    """Gradients of the fields of `Chunks`; ``system`` is that of ``diag(beta) N``.

    ``queries`` and ``scores`` are None if no output needs a gradient. ``beta`` is that part of its
    gradient which does not come from ``system``.
    """

    queries: Tensor | None
    keys_read: Tensor
    keys_written: Tensor
    kept: Tensor
    scores: Tensor | None
    system: Tensor
    beta: Tensor


class Masks:
    """Factors, one or zero, that keep the documents of some chunks apart.

    Args:
        segments: the index of the document of each token, ``[c, b, l]``; that of the state before
            the first chunk is zero.
        before: index of the document of the state before each chunk, ``[c, b, 1]``.
        heads: number of heads of each sequence, so that m is ``b * heads``.

    Attributes:
        read: 1 if a token is in the document of the state before its chunk, ``[c, m, l, 1]``.
        written: 1 if it is in the document of the last token of its chunk, ``[c, m, l, 1]``.
        kept: 1 if no document begins in the chunk, ``[c, m, 1, 1]``.
        same: 1 if two tokens are in one document, the second not after the first, ``[c, m, l, l]``.
    """

    def __init__(self, segments: Tensor, before: Tensor, heads: int, dtype: torch.dtype) -> None:
        last = segments[..., -1:]

        def by_head(mask: Tensor) -> Tensor:
            chunks, batch, *shape = mask.shape
            wide = mask.to(dtype)[:, :, None].expand(chunks, batch, heads, *shape)
            return wide.flatten(1, 2)

        self.read = by_head(segments == before)[..., None]
        self.written = by_head(segments == last)[..., None]
        self.kept = by_head(last == before)[..., None]
        self.same = by_head((segments[..., :, None] == segments[..., None, :]).tril())


class Chunks:
    """The matrices of c chunks of m heads, see the equations of this module.

    Subclasses set the fields from queries, keys and decays, and turn gradients of the fields into
    gradients of these. The gradient of a token's log decay is a sum over what that decays, such as
    pairs of a token before it and one that is not. A difference of sums over all pairs would lose
    its digits where decays are strong.

    Attributes:
        queries: Q_read, ``[c, m, l, k]``; None if no outputs are wanted.
        keys_read, keys_written: ``[c, m, l, k]``.
        kept: ``[c, m, 1 or k, 1]``.
        scores: P, ``[c, m, l, l]``; None if no outputs are wanted.
        products: N, ``[c, m, l, l]``.
        beta: ``[c, m, l]``.
        inverse: ``(I + diag(beta) N)^-1``, ``[c, m, l, l]``.
    """

    queries: Tensor | None
    keys_read: Tensor
    keys_written: Tensor
    kept: Tensor
    scores: Tensor | None
    products: Tensor
    beta: Tensor

    def solve(self, beta: Tensor) -> None:
        """Set ``beta`` and ``inverse``."""
        self.beta = beta
        self.inverse = inverse_of_unit_lower(beta[..., None] * self.products)

    def from_system(self, gradients: Gradients) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``products`` and of ``beta``."""
        system = gradients.system.tril_(-1)
        beta = gradients.beta + (system * self.products).sum(-1)
        return self.beta[..., None] * system, beta

    def backward(self, gradients: Gradients) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys, log decays and beta."""
        raise NotImplementedError


class HeadDecayChunks(Chunks):
    """`Chunks` of a decay for each head and token; heads in a row may share queries and keys.

    Args:
        queries, keys: ``[c, n, l, k]`` of n heads, where m is a multiple of n.
        decays: log decays, ``[c, m, l]``.
        beta: ``[c, m, l]``.
        masks: None if all tokens are in the document of the state.
    """

    def __init__(
        self,
        queries: Tensor | None,
        keys: Tensor,
        decays: Tensor,
        beta: Tensor,
        masks: Masks | None,
    ) -> None:
        self.shared_queries = queries
        self.shared_keys = keys
        dtype = keys.dtype
        # Differences of float32 sums would have too few digits after a strong decay.
        sums = decays.double().cumsum(-1)
        later = (sums[..., :, None] - sums[..., None, :]).clamp_(max=0)
        decay = later.to(dtype).exp_()
        self.read = sums.to(dtype).exp()[..., None]
        self.written = (sums[..., -1:] - sums).to(dtype).exp_()[..., None]
        self.kept = self.read[..., -1:, :]
        if masks is None:
            self.decay = decay.tril_()
        else:
            self.decay = decay * masks.same
            self.kept = self.kept * masks.kept
            self.read = self.read * masks.read
            self.written = self.written * masks.written
        self.keys_read = (self._by_head(keys) * self._grouped(self.read)).flatten(1, 2)
        self.keys_written = (self._by_head(keys) * self._grouped(self.written)).flatten(1, 2)
        transposed = keys.transpose(-1, -2)
        products = self._by_head(keys @ transposed) * self._grouped(self.decay)
        self.products = products.flatten(1, 2).tril_(-1)
        self.queries = None
        self.scores = None
        if queries is not None:
            self.queries = (self._by_head(queries) * self._grouped(self.read)).flatten(1, 2)
            scores = self._by_head(queries @ transposed) * self._grouped(self.decay)
            self.scores = scores.flatten(1, 2)
        self.solve(beta)

    def _by_head(self, shared: Tensor) -> Tensor:
        """Return ``[c, n, 1, ...]``, which broadcasts to the heads that share it."""
        return shared.unsqueeze(2)

    def _grouped(self, x: Tensor) -> Tensor:
        """Return ``[c, m, ...]`` as ``[c, n, m / n, ...]``."""
        return torch.unflatten(x, 1, (self.shared_keys.size(1), -1))

    def backward(self, gradients: Gradients) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys, log decays and beta."""
        products, beta = self.from_system(gradients)
        # What decays between two tokens, from the state and to the state would gain.
        paired = products * self.products
        read = (gradients.keys_read * self.keys_read).sum(-1)
        written = (gradients.keys_written * self.keys_written).sum(-1)
        keys = self._summed(gradients.keys_read * self.read)
        keys += self._summed(gradients.keys_written * self.written)
        between = self._summed(products * self.decay)
        keys += (between + between.transpose(-1, -2)) @ self.shared_keys
        queries = None
        if gradients.queries is not None:
            assert gradients.scores is not None and self.queries is not None
            assert self.scores is not None and self.shared_queries is not None
            paired += gradients.scores * self.scores
            read += (gradients.queries * self.queries).sum(-1)
            between = self._summed(gradients.scores * self.decay)
            queries = self._summed(gradients.queries * self.read)
            queries += between @ self.shared_keys
            keys += between.transpose(-1, -2) @ self.shared_queries
        ones = torch.ones_like(paired[0, 0])
        crossing = (paired @ ones.triu(1)).tril_().sum(-2)
        decays = crossing + read @ ones.tril() + written @ ones.triu(1)
        decays += (gradients.kept * self.kept)[..., 0]
        return queries, keys, decays, beta

    def _summed(self, x: Tensor) -> Tensor:
        """Sum ``[c, m, ...]`` over the heads that share queries and keys."""
        return self._grouped(x).sum(2)


class ChannelDecayChunks(Chunks):
    """`Chunks` of a decay for each channel of a key (arXiv:2510.26692).

    Two tokens are compared at a point between them: the row token is decayed from that point, the
    column token to it. These points are the middles of blocks of 2, 4, 8, ... l tokens, each of
    which serves the pairs of a token in the second half of the block and one in the first. The
    decays from and to the middle are sums of log decays, never differences, and so exact.

    Args:
        queries, keys, decays: ``[c, m, l, k]``; l must be a power of two.
        beta: ``[c, m, l]``.
        masks: None if all tokens are in the document of the state.
    """

    def __init__(
        self,
        queries: Tensor | None,
        keys: Tensor,
        decays: Tensor,
        beta: Tensor,
        masks: Masks | None,
    ) -> None:
        self.raw_queries = queries
        self.raw_keys = keys
        self.masks = masks
        length = keys.size(-2)
        shape = (*keys.shape[:-1], length)
        products = keys.new_zeros(shape)
        scores = None if queries is None else keys.new_zeros(shape)
        if queries is not None and scores is not None:
            scores.diagonal(dim1=-2, dim2=-1).copy_((queries * keys).sum(-1))
        self.levels: list[tuple[Tensor, Tensor]] = []
        # The sums of log decays from the start of a token's block up to it, and from it to the end.
        started = decays.clone()
        ending = torch.zeros_like(decays)
        half = 1
        while half < length:
            began = _halves(started, half)
            ends = _halves(ending, half)
            rise = began[:, :, 1].exp()
            fall = ends[:, :, 0].exp()
            self.levels.append((rise, fall))
            columns = _halves(keys, half)[:, :, 0] * fall
            rows = _halves(keys, half)[:, :, 1] * rise
            _set_blocks(products, half, rows @ columns.transpose(-1, -2))
            if queries is not None and scores is not None:
                rows = _halves(queries, half)[:, :, 1] * rise
                _set_blocks(scores, half, rows @ columns.transpose(-1, -2))
            ends[:, :, 0] += began[:, :, 1, -1:]
            began[:, :, 1] += began[:, :, 0, -1:]
            half *= 2
        self.read = started.exp_()
        self.written = ending.exp_()
        self.kept = self.read[..., -1, :, None]
        if masks is not None:
            self.kept = self.kept * masks.kept
            self.read = self.read * masks.read
            self.written = self.written * masks.written
            products *= masks.same
            scores = None if scores is None else scores.mul_(masks.same)
        self.queries = None if queries is None else queries * self.read
        self.keys_read = keys * self.read
        self.keys_written = keys * self.written
        self.scores = scores
        self.products = products
        self.solve(beta)

    def backward(self, gradients: Gradients) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys, log decays and beta."""
        products, beta = self.from_system(gradients)
        scores = gradients.scores
        if self.masks is not None:
            products = products * self.masks.same
            scores = None if scores is None else scores * self.masks.same
        raw_queries = self.raw_queries
        raw_keys = self.raw_keys
        # Keys are rows of products and read the state, or are columns and are written to it.
        as_rows = gradients.keys_read * self.read
        as_columns = gradients.keys_written * self.written
        reading = as_rows * raw_keys
        queries = None
        if gradients.queries is not None:
            assert raw_queries is not None
            queries = gradients.queries * self.read
            reading += queries * raw_queries
        decays = _from(reading) + _before(as_columns * raw_keys)
        decays += (gradients.kept * self.kept).transpose(-1, -2)
        half = 1
        for rise, fall in self.levels:
            key_columns = _halves(raw_keys, half)[:, :, 0]
            key_rows = _halves(raw_keys, half)[:, :, 1]
            columns = key_columns * fall
            block = _blocks(products, half)
            to_columns = block.transpose(-1, -2) @ (key_rows * rise)
            to_rows = (block @ columns).mul_(rise)
            _halves(as_rows, half)[:, :, 1] += to_rows
            gained = to_rows * key_rows
            if queries is not None:
                assert scores is not None and raw_queries is not None
                query_rows = _halves(raw_queries, half)[:, :, 1]
                block = _blocks(scores, half)
                to_columns += block.transpose(-1, -2) @ (query_rows * rise)
                to_rows = (block @ columns).mul_(rise)
                _halves(queries, half)[:, :, 1] += to_rows
                gained += to_rows * query_rows
            to_columns *= fall
            _halves(as_columns, half)[:, :, 0] += to_columns
            of_halves = _halves(decays, half)
            of_halves[:, :, 1] += _from(gained)
            of_halves[:, :, 0] += _before(to_columns * key_columns)
            half *= 2
        keys = as_rows + as_columns
        if queries is not None:
            assert scores is not None and raw_queries is not None
            diagonal = scores.diagonal(dim1=-2, dim2=-1)[..., None]
            queries += diagonal * raw_keys
            keys += diagonal * raw_queries
        return queries, keys, decays, beta


def _from(x: Tensor) -> Tensor:
    """Return, for each token, the sum of ``[..., l, k]`` over it and the tokens after it."""
    return x.new_ones(x.size(-2), x.size(-2)).triu() @ x


def _before(x: Tensor) -> Tensor:
    """Return, for each token, the sum of ``[..., l, k]`` over the tokens before it."""
    return x.new_ones(x.size(-2), x.size(-2)).tril(-1) @ x


def inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Return ``(I + lower)^-1`` for ``[..., l, l]``, zero on and above the diagonal.

    The inverses of diagonal blocks are joined to those of blocks of twice the size, which needs few
    operations and stays as exact as substitution. l must be a power of two.
    """
    inverse = torch.zeros_like(lower)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    half = 1
    while half < lower.size(-1):
        first = _blocks(inverse, half, row=0, column=0)
        second = _blocks(inverse, half, row=1, column=1)
        _set_blocks(inverse, half, (second @ _blocks(lower, half) @ first).neg_())
        half *= 2
    return inverse


def _halves(x: Tensor, half: int) -> Tensor:
    """View ``[c, m, l, k]`` as ``[c * m, l / (2 * half), 2, half, k]``."""
    return x.view(-1, x.size(-2) // (2 * half), 2, half, x.size(-1))


def _diagonal_blocks(x: Tensor, half: int, row: int, column: int) -> Tensor:
    """View parts of ``[..., l, l]``, ``[b, half, half, l / (2 * half)]`` with all other axes in b.

    Of each diagonal block of size ``2 * half``, it is the quarter in the given half of the rows and
    of the columns.
    """
    blocks = x.size(-1) // (2 * half)
    parts = x.view(-1, blocks, 2, half, blocks, 2, half)
    return parts[:, :, row, :, :, column].diagonal(dim1=1, dim2=3)


def _blocks(x: Tensor, half: int, *, row: int = 1, column: int = 0) -> Tensor:
    """Return the parts of `_diagonal_blocks` as ``[b, l / (2 * half), half, half]``."""
    return _diagonal_blocks(x, half, row, column).permute(0, 3, 1, 2).contiguous()


def _set_blocks(x: Tensor, half: int, values: Tensor) -> None:
    """Set the parts of ``x`` that `_blocks` returns."""
    _diagonal_blocks(x, half, 1, 0).copy_(values.permute(0, 2, 3, 1))
