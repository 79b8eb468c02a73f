"""A cache of keys and values, for models that generate text token by token.

A forward pass takes the new tokens of several sequences, concatenated without gaps to one sequence
of T tokens, ``[T, 1, h]``. A new sequence brings its whole prompt; a continued one brings its
newest token. Only two modules must know where a sequence begins: the rotary embedding, which
rotates each token by its own position, and attention, which keeps sequences apart. All other layers
run as in training, so the result of a sequence does not depend on the lengths of the others.

Keys are stored as attention gets them, after norms and rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Window = Sequence[int] | None


@dataclass(frozen=True)
class Segment:
    """The new tokens of one sequence.

    Attributes:
        slot: index of the sequence in the cache.
        start: position of the first new token, equal to the number of cached tokens.
        length: number of new tokens.
    """

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Return the length of the sequence with its new tokens."""
        return self.start + self.length


class PackedTokens:
    """The layout of a forward pass: the new tokens of several sequences, and padding after them.

    Attributes:
        segments: the sequences in the order of their tokens; sequences with one new token come
            first.
        length: number of tokens T, including padding.
        positions: position of each token in its sequence, ``[T]``; 0 for padding.
    """

    def __init__(self, segments: Sequence[Segment], length: int, device: torch.device) -> None:
        self.segments = sorted(segments, key=lambda segment: segment.length > 1)
        self.singles = sum(segment.length == 1 for segment in segments)
        self.length = length
        self.device = device
        self.num_tokens = sum(segment.length for segment in segments)
        parts = [torch.arange(segment.start, segment.end) for segment in self.segments]
        padding = torch.zeros(length - self.num_tokens, dtype=torch.int64)
        self.positions = torch.cat([*parts, padding]).to(device)
        self._kept: dict[Hashable, Any] = {}

    @property
    def lengths(self) -> Tensor:
        """Return, for each token, the length of its sequence including new tokens, ``[T]``."""
        counts = torch.tensor([segment.length for segment in self.segments])
        ends = torch.tensor([segment.end for segment in self.segments])
        padding = torch.zeros(self.length - self.num_tokens, dtype=torch.int64)
        return torch.cat([ends.repeat_interleave(counts), padding]).to(self.device)

    @property
    def last_tokens(self) -> Tensor:
        """Return the index of the last new token of each segment, ``[segments]``."""
        lengths = torch.tensor([segment.length for segment in self.segments], device=self.device)
        return lengths.cumsum(0) - 1

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value cached under ``key``; ``make`` computes it once in a pass."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[no-any-return]

    def slots(self) -> Tensor:
        """Return the cache slots of the sequences with one new token, as an index ``[singles]``."""
        slots = [segment.slot for segment in self.segments[: self.singles]]
        return torch.tensor(slots, device=self.device)

    def places(self) -> Tensor | slice:
        """Return the cache slots of the sequences with one new token, as an index of the cache.

        This is a slice if the slots are adjacent and in order, so that the cache is not copied;
        otherwise it is the tensor of `slots`.
        """
        slots = [segment.slot for segment in self.segments[: self.singles]]
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return self.kept("slots", self.slots)

    def mask(self, window: Window) -> Tensor:
        """Return the mask for sequences with one new token, ``[singles, 1, 1, k]``.

        k is the length of the longest one. The mask is True for keys after the token, and for those
        more than ``window[0]`` positions before it; None or a negative number hides no earlier key.
        """
        longest = max(segment.end for segment in self.segments[: self.singles])
        keys = torch.arange(longest, device=self.device)
        position = self.positions[: self.singles, None, None, None]
        forbidden = keys > position
        if window is not None and window[0] >= 0:
            forbidden = forbidden | (keys < position - window[0])
        return forbidden


Attend = Callable[..., Tensor]


class LayerCache:
    """The keys and values of one attention layer: ``[slots, g, k, d]`` for k positions.

    Keys and values may differ in d. Memory is allocated when the first tokens are stored.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self.keys = self.values = torch.empty(0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attend: Attend, window: Window
    ) -> Tensor:
        """Store the new keys and values, and return the attention ``[T, 1, n, d]`` of the queries.

        Args:
            query: ``[T, 1, n, d]``.
            key, value: ``[T, 1, g, d]``.
            attend: attends within one sequence or a batch of sequences, like
                `DotProductAttention._attend`.
            window: how many earlier and later positions a query sees; None for all earlier ones.
        """
        tokens = self._cache.tokens
        if self._cache.num_slots:
            self._store(tokens, key, value)
        outputs = []
        first = 0
        singles = tokens.singles if self._cache.num_slots else 0
        if singles:
            slots = tokens.kept("places", tokens.places)
            which = "mask", None if window is None else tuple(window)
            mask = tokens.kept(which, lambda: tokens.mask(window))
            keys, values = (
                x[slots, :, : mask.size(-1)].permute(2, 0, 1, 3) for x in (self.keys, self.values)
            )
            queries = query[:singles].transpose(0, 1)
            attended = attend(queries, keys, values, mask, first_query=None)
            outputs = [attended.transpose(0, 1)]
            first = singles
        for segment in tokens.segments[singles:]:
            own = slice(first, first + segment.length)
            keys = key[own]
            values = value[own]
            if segment.start:
                keys, values = (
                    x[segment.slot, :, : segment.end].transpose(0, 1).unsqueeze(1)
                    for x in (self.keys, self.values)
                )
            outputs.append(attend(query[own], keys, values, None, first_query=segment.start))
            first += segment.length
        if first < tokens.length:
            padding = tokens.length - first
            outputs.append(query.new_zeros(padding, 1, query.size(2), value.size(3)))
        return torch.cat(outputs)

    def _store(self, tokens: PackedTokens, key: Tensor, value: Tensor) -> None:
        if not self.keys.numel():
            places = self._cache.num_slots, key.size(2), self._cache.max_length
            self.keys = key.new_zeros(*places, key.size(3))
            self.values = value.new_zeros(*places, value.size(3))
        singles = tokens.singles
        for stored, new in ((self.keys, key), (self.values, value)):
            if singles:
                slots = tokens.kept("slots", tokens.slots)
                stored[slots, :, tokens.positions[:singles]] = new[:singles, 0]
            first = singles
            for segment in tokens.segments[singles:]:
                own = new[first : first + segment.length, 0].transpose(0, 1)
                stored[segment.slot, :, segment.start : segment.end] = own
                first += segment.length


class KeyValueCache:
    """The caches of all attention layers of a rank, for sequences of at most ``max_length`` tokens.

    Args:
        num_slots: number of sequences that the cache can hold. With 0 nothing is stored, and each
            pass takes whole sequences.

    Attributes:
        tokens: the layout of the next forward pass; set it before the pass.
    """

    tokens: PackedTokens

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length

    def all_positions(self, _module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace a rotary embedding's first argument, the sequence length, by ``max_length``.

        This is a forward pre-hook of a rotary embedding, which then returns the angles of all
        positions; the forward hook `token_angles` selects those of the tokens.
        """
        return self.max_length, *arguments[1:]

    def token_angles(self, module: Any, _arguments: Any, output: Any) -> Any:
        """Return the rotary angles ``[T, 1, k, d]`` of the tokens of this pass.

        k is 2 if layers with a window have their own angles, else 1. This is a forward hook of a
        rotary embedding. ``output`` holds the angles of all positions. If it is a tuple, the angles
        are its first element, and the others are returned unchanged.
        """
        angles, *rest = output if isinstance(output, tuple) else (output,)
        # All layers of a pass share this tensor, and the tables computed from it.
        own = self.tokens.kept(id(module), lambda: self._angles(module, angles))
        return (own, *rest) if isinstance(output, tuple) else own

    def _angles(self, module: Any, angles: Tensor) -> Tensor:
        """Select the angles of this pass's tokens, by position, from the angles of all positions.

        LongRoPE has separate angles for short sequences. Each token gets the angles for the length
        of its sequence, including the new tokens.
        """
        tokens = self.tokens
        short = getattr(module, "short_length", None)
        own = angles[tokens.positions]
        if short is None or short >= self.max_length:
            return own
        short_angles = module.forward(short)[tokens.positions.clamp(max=short - 1)]
        is_long = (tokens.lengths > short)[:, None, None, None]
        return torch.where(is_long, own, short_angles)
