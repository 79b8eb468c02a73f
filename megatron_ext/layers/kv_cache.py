"""Caches of keys and values, for models that generate text token by token.

A forward pass takes the new tokens of several sequences, concatenated without gaps to one sequence
of T tokens, ``[T, 1, h]``. A new sequence brings its whole prompt; a continued one brings its
newest token. Only two modules must know where a sequence begins: the rotary embedding, which
rotates each token by its own position, and attention, which keeps sequences apart. All other layers
run as in training, so the result of a sequence does not depend on the lengths of the others.

Keys are stored as attention gets them, after norms and rotary embedding. A cache is allocated once,
for its longest sequence, and written in place. A layer with a window keeps only the tokens that its
next query can see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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
        singles: number of sequences with one new token.
        length: number of tokens T, including padding.
        positions: position of each token in its sequence, ``[T]``; 0 for padding.
    """

    def __init__(self, segments: Sequence[Segment], length: int, device: torch.device) -> None:
        self.segments = sorted(segments, key=lambda segment: segment.length > 1)
        self.singles = sum(segment.length == 1 for segment in segments)
        self.length = length
        self.device = device
        self.num_tokens = sum(segment.length for segment in segments)
        positions = [p for segment in self.segments for p in range(segment.start, segment.end)]
        self.positions = self._index(positions + [0] * (length - self.num_tokens))
        ends = [segment.end for segment in self.segments[: self.singles]]
        self._shortest = min(ends, default=0)
        self._longest = max(ends, default=0)
        self._kept: dict[Hashable, Any] = {}

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    @property
    def only_singles(self) -> bool:
        """Tell whether each token is the only new one of its sequence, and none is padding."""
        return self.singles == self.length

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

    def rows(self, capacity: int) -> tuple[Tensor | None, Tensor]:
        """Return (tokens, rows): which new tokens a cache stores, and in which of its rows.

        Rows are those of `TokenRows` with ``capacity`` tokens in a slot. The tokens are indices
        ``[r]`` in the order of the pass; None stands for all T.
        """
        return self.kept(("rows", capacity), lambda: self._rows(capacity))

    def _rows(self, capacity: int) -> tuple[Tensor | None, Tensor]:
        tokens = list[int]()
        rows = list[int]()
        first = 0
        for segment in self.segments:
            begin = max(segment.start, segment.end - capacity)
            tokens += range(first + begin - segment.start, first + segment.length)
            row = segment.slot * capacity
            rows += [row + p % capacity for p in range(begin, segment.end)]
            first += segment.length
        return None if len(tokens) == self.length else self._index(tokens), self._index(rows)

    def places(self) -> Tensor | slice:
        """Return the cache slots of the sequences with one new token, as an index of the cache.

        This is a slice if the slots are adjacent and in order, so that the cache is not copied;
        otherwise it is a tensor ``[singles]``.
        """
        return self.kept("places", self._places)

    def _places(self) -> Tensor | slice:
        slots = [segment.slot for segment in self.segments[: self.singles]]
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return self._index(slots)

    def num_keys(self, capacity: int) -> int:
        """Return k, the most keys that a sequence with one new token attends to.

        ``capacity`` is that of the layer's `TokenRows`.
        """
        return min(self._longest, capacity)

    def forbidden(self, capacity: int) -> Tensor:
        """Return the mask for sequences with one new token, ``[singles, 1, 1, k]``.

        The mask is True for the rows of a slot without a token of the sequence. A row of a layer
        with a window holds a token that the query may see, or none.
        """

        def mask() -> Tensor:
            keys = torch.arange(self.num_keys(capacity), device=self.device)
            return keys > self.positions[: self.singles, None, None, None]

        return self.kept(("forbidden", capacity), mask)

    def allowed(self, capacity: int) -> Tensor | None:
        """Return the negation of `forbidden`; None if it forbids nothing."""
        if self._shortest >= self.num_keys(capacity):
            return None
        return self.kept(("allowed", capacity), lambda: ~self.forbidden(capacity))


class TokenRows:
    """A tensor for each token of the sequences in a cache, ``[slots, c, ...]``.

    The token at position p of a sequence is in row ``p % c`` of its slot. So a layer with a window
    keeps, of each sequence, the last c tokens. Memory is allocated when the first tokens are
    stored.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.stored = torch.empty(0)

    def store(self, new: Tensor, tokens: PackedTokens) -> None:
        """Store a tensor for each new token, ``[T, ...]``."""
        if not self.stored.numel():
            self.stored = new.new_zeros(self.num_slots, self.capacity, *new.shape[1:])
        chosen, rows = tokens.rows(self.capacity)
        new = new if chosen is None else new[chosen]
        self.stored.flatten(0, 1).index_copy_(0, rows, new)

    def of_singles(self, tokens: PackedTokens) -> Tensor:
        """Return ``[singles, k, ...]`` for the sequences with one new token.

        k is `PackedTokens.num_keys`.
        """
        return self.stored[tokens.places(), : tokens.num_keys(self.capacity)]

    def before(self, segment: Segment) -> Tensor:
        """Return a copy ``[e, ...]`` of the cached tokens before a segment, by position."""
        positions = range(max(0, segment.start - self.capacity), segment.start)
        return self.stored[segment.slot, [p % self.capacity for p in positions]]


Attend = Callable[..., Tensor]


class LayerCache:
    """The keys ``[slots, c, g, d]`` and values of one attention layer, which may differ in d.

    Args:
        window: how many earlier and later positions a query sees; None for all earlier ones.
    """

    def __init__(self, cache: KeyValueCache, window: Window = None) -> None:
        self._cache = cache
        capacity = cache.capacity(window)
        self.capacity = capacity
        self.keys = TokenRows(cache.num_slots, capacity)
        self.values = TokenRows(cache.num_slots, capacity)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """Store the new keys and values, and return the attention ``[T, 1, n, d]`` of the queries.

        Args:
            query: ``[T, 1, n, d]``.
            key, value: ``[T, 1, g, d]``.
            attend: attends within one sequence or a batch of sequences, like
                `DotProductAttention.attend_locally`.
        """
        tokens = self._cache.tokens
        if not self._cache.num_slots:
            return attend_in_segments(tokens, [], query, key, value, attend)
        # A window's rows are overwritten when new tokens are stored.
        earlier = {
            segment.slot: (self.keys.before(segment), self.values.before(segment))
            for segment in tokens.segments[tokens.singles :]
            if segment.start
        }
        self.store(key[:, 0], value[:, 0])
        done = list[Tensor]()
        if tokens.singles:
            keys, values = (x.transpose(0, 1) for x in self.of_singles())
            queries = query[: tokens.singles].transpose(0, 1)
            mask = tokens.forbidden(self.capacity)
            done = [attend(queries, keys, values, mask, first_query=None).transpose(0, 1)]
        return attend_in_segments(tokens, done, query, key, value, attend, earlier)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Store the new keys and values, ``[T, g, d]``."""
        self.keys.store(key, self._cache.tokens)
        self.values.store(value, self._cache.tokens)

    def of_singles(self) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[singles, k, g, d]`` of the sequences with one new token."""
        tokens = self._cache.tokens
        return self.keys.of_singles(tokens), self.values.of_singles(tokens)


def attend_in_segments(
    tokens: PackedTokens,
    done: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
    earlier: Mapping[int, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Attend within one sequence after the other; return the attention ``[T, 1, n, d]`` of a pass.

    Args:
        done: the attention ``[singles, 1, n, d]`` of the sequences with one new token, if it has
            been computed.
        query, key, value, attend: as for `LayerCache.attend`.
        earlier: keys and values ``[e, g, d]``, by slot, of the cached tokens before a segment.
    """
    outputs = list(done)
    first = sum(map(len, done))
    for segment in tokens.segments[first:]:
        own = slice(first, first + segment.length)
        keys = key[own]
        values = value[own]
        before = (earlier or {}).get(segment.slot)
        if before is not None:
            keys = torch.cat([before[0].unsqueeze(1), keys])
            values = torch.cat([before[1].unsqueeze(1), values])
        first_query = len(keys) - segment.length
        outputs.append(attend(query[own], keys, values, None, first_query=first_query))
        first += segment.length
    if first < tokens.length:
        outputs.append(query.new_zeros(tokens.length - first, 1, query.size(2), value.size(3)))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class KeyValueCache:
    """The state that the caches of all attention layers of a rank share.

    Sequences have at most ``max_length`` tokens.

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

    def capacity(self, window: Window) -> int:
        """Return how many tokens of a sequence a layer with this window keeps.

        A query sees its own token and ``window[0]`` earlier ones, or all if that is negative.
        """
        if window is None or window[0] < 0:
            return self.max_length
        return min(self.max_length, window[0] + 1)

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
