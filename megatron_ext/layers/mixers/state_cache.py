"""A cache of the states of a recurrent mixer, for models that generate text token by token.

A sequence needs the last inputs of the mixer's short convolution and the state of its recurrence,
whose sizes do not depend on the length of the sequence. `layers.kv_cache` describes a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.layers.kv_cache import KeyValueCache

States = tuple[Tensor, ...]
"""The tensors by which a mixer remembers sequences, each ``[b, ...]``."""
Recur = Callable[[Tensor, States | None], tuple[Tensor, States]]
"""Takes inputs ``[b, s, c]`` and the states before them, or None for the beginning of sequences.

It returns outputs ``[b, s, d]`` and the states after them."""


class StateCache:
    """The states of one recurrent mixer, by slot of the cache."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._states: States = ()

    def run(self, inputs: Tensor, recur: Recur) -> Tensor:
        """Run a recurrence over the new tokens of a pass; return its outputs ``[T, 1, d]``.

        The sequences with one new token run together, the others one by one.

        Args:
            inputs: ``[T, 1, c]``.
            recur: runs the recurrence over whole sequences of equal length.
        """
        tokens = self._cache.tokens
        outputs: list[Tensor] = []
        first = 0
        started = [segment.start > 0 for segment in tokens.segments[: tokens.singles]]
        if tokens.singles and all(started):
            slots = [segment.slot for segment in tokens.segments[: tokens.singles]]
            output, states = recur(inputs[: tokens.singles], self._of(slots))
            self._store(slots, states)
            outputs.append(output)
            first = tokens.singles
        begin = first
        for segment in tokens.segments[first:]:
            own = inputs[begin : begin + segment.length].transpose(0, 1)
            output, states = recur(own, self._of([segment.slot]) if segment.start else None)
            self._store([segment.slot], states)
            outputs.append(output.transpose(0, 1))
            begin += segment.length
        if begin < tokens.length:
            padding = inputs[begin:].transpose(0, 1)
            outputs.append(recur(padding, None)[0].transpose(0, 1))
        return torch.cat(outputs)

    def _of(self, slots: Sequence[int]) -> States:
        """Return the states of these sequences, ``[slots, ...]`` each."""
        return tuple(state[list(slots)] for state in self._states)

    def _store(self, slots: Sequence[int], states: States) -> None:
        count = self._cache.num_slots
        if not count:
            return
        if not self._states:
            self._states = tuple(state.new_zeros(count, *state.shape[1:]) for state in states)
        for stored, state in zip(self._states, states, strict=True):
            stored[list(slots)] = state
