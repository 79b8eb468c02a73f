"""The gated delta rule: a memory of keys and values that forgets, and corrects what it holds.

The state S ``[k, v]`` of a head maps keys to values. A token with query q, key k, value v, log
decay g and rate beta does (gated DeltaNet, arXiv:2412.06464)::

    S = exp(g) S                        g is a number, or one for each channel of the key
    S = S + k (beta (v - S^T k))^T
    o = S^T q / sqrt(size of a key)

With a log decay for each channel this is Kimi Delta Attention (arXiv:2510.26692). Queries and keys
are those of unit length; callers normalize them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.layers.mixers.delta_scan import Scan, Sizes, sizes_for, working_dtype


class DeltaRule:
    """The rule over some sequences, in the two phases that context parallelism needs.

    Args:
        queries, keys: ``[b, s, n, k]``.
        values: ``[b, s, h, v]``; h is a multiple of n, and heads in a row share queries and keys.
        decays: log decays, none above zero: ``[b, s, h]``, or ``[b, s, h, k]`` for one of each
            channel.
        beta: ``[b, s, h]``.
        segments: the index of the document of each token, ``[b, s]``, where 0 is the document of
            the initial state (see `state_passing.segments_of_slices`); None is all zeros.
        sizes: how to cut the sequences; None is what is fast.

    States are in float32, or in float64 if the inputs are.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decays: Tensor,
        beta: Tensor,
        *,
        segments: Tensor | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.values = values
        self.decays = decays
        self.beta = beta
        self.segments = segments
        self.sizes = sizes or sizes_for(keys.size(1), keys.size(-1), keys.device)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return what the sequences do to a state S before them: ``transition @ S + final``.

        The transition is ``[b, h, k, k]``, and zero where a document begins; final is ``[b, h, k,
        v]``.
        """
        size = self.keys.size(-1)
        state = self._state(self.values.size(-1) + size)
        state[..., -size:].diagonal(dim1=-2, dim2=-1).fill_(1)
        _, after = self._scan(None, state)
        final, transition = torch.split(after, [self.values.size(-1), size], dim=-1)
        return transition, final

    def outputs(self, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[b, s, h, v]``, as the values, and the final state ``[b, h, k, v]``.

        The initial state is ``[b, h, k, v]``; None is zero.
        """
        state = self._state(self.values.size(-1)) if initial_state is None else initial_state
        return self._scan(self.queries, state)

    def _state(self, width: int) -> Tensor:
        batch, _, heads, _ = self.values.shape
        shape = (batch, heads, self.keys.size(-1), width)
        return self.keys.new_zeros(shape, dtype=working_dtype(self.keys.dtype))

    def _scan(self, queries: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = Scan.apply(  # type: ignore[no-untyped-call]
            queries,
            self.keys,
            self.values,
            self.decays,
            self.beta,
            state,
            self.segments,
            self.sizes,
        )
        return result


def step(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of one token of each sequence, ``[b, h, v]``, and the states after it.

    Args:
        state: ``[b, h, k, v]``.
        queries, keys: ``[b, n, k]``.
        values: ``[b, h, v]``.
        decays: ``[b, h]`` or ``[b, h, k]``.
        beta: ``[b, h]``.
    """
    group = values.size(1) // keys.size(1)
    dtype = state.dtype
    query = queries.to(dtype).repeat_interleave(group, dim=1) * keys.size(-1) ** -0.5
    key = keys.to(dtype).repeat_interleave(group, dim=1)
    factors = decays.to(dtype).exp()
    state = state * (factors[..., None] if factors.dim() == 3 else factors[..., None, None])
    held = (key.unsqueeze(-2) @ state).squeeze(-2)
    change = (values.to(dtype) - held) * beta.to(dtype)[..., None]
    state = torch.addcmul(state, key[..., None], change.unsqueeze(-2))
    output = (query.unsqueeze(-2) @ state).squeeze(-2)
    return output.to(values.dtype), state
