"""The cache of keys and values: what it stores, for whom, and which rotary angles a token gets."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.kv_cache import KeyValueCache, LayerCache, PackedTokens, Segment

CPU = torch.device("cpu")
N, G, D, DV = 4, 2, 8, 6
SLOTS, MOST = 4, 12


def attention(window: tuple[int, int] | None) -> Any:
    """Return a function like `DotProductAttention.attend_locally`, of plain arithmetic."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first_query: int | None
    ) -> Tensor:
        key, value = (x.repeat_interleave(N // G, dim=2) for x in (key, value))
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * D**-0.5
        if mask is None:
            assert first_query is not None
            mask = hidden(len(key), window)[first_query:][None, None]
        scores = scores.masked_fill(mask, -torch.inf)
        return torch.einsum("bnqk,kbnd->qbnd", scores.softmax(-1), value)

    return attend


def hidden(length: int, window: tuple[int, int] | None) -> Tensor:
    """Return a mask ``[k, k]``, True for keys after a query, or before its window."""
    position = torch.arange(length)
    left = MOST if window is None else window[0]
    return (position > position[:, None]) | (position < position[:, None] - left)


class Texts:
    """Texts that grow in the slots of a cache, with the queries, keys and values of all tokens."""

    def __init__(self, window: tuple[int, int] | None = None) -> None:
        generator = torch.Generator().manual_seed(2)
        shapes = (N, D), (G, D), (G, DV)
        self.qkv = [
            torch.randn(SLOTS, MOST, *shape, generator=generator, dtype=torch.float64)
            for shape in shapes
        ]
        self.lengths = [0] * SLOTS
        self.cache = KeyValueCache(SLOTS, MOST)
        self.window = window
        self.layer = LayerCache(self.cache, window)
        self.other = LayerCache(self.cache)

    def step(self, new: dict[int, int], padding: int = 0) -> None:
        """Add new tokens by slot in one pass; compare with attention to the whole texts."""
        given = [Segment(slot, self.lengths[slot], count) for slot, count in new.items()]
        total = sum(new.values()) + padding
        tokens = self.cache.tokens = PackedTokens(given, total, CPU)
        parts = [(x.slot, slice(x.start, x.end)) for x in tokens.segments]
        packed = []
        for x in self.qkv:
            own = [x[slot, span] for slot, span in parts]
            packed.append(torch.cat([*own, torch.full((padding, *x.shape[2:]), torch.nan)]))
        given_qkv = [x.unsqueeze(1) for x in packed]
        # Another layer of the same pass may have no window.
        whole = self.other.attend(*given_qkv, attention(None))
        found = self.layer.attend(*given_qkv, attention(self.window))
        if self.window is None:
            assert torch.equal(found, whole)
        assert found.shape == (total, 1, N, DV)
        first = 0
        for slot, span in parts:
            query, key, value = (x[slot, : span.stop].unsqueeze(1) for x in self.qkv)
            mask = hidden(span.stop, self.window)[None, None]
            want = attention(None)(query, key, value, mask, None)[span]
            torch.testing.assert_close(found[first : first + len(want)], want)
            first += len(want)
            self.lengths[slot] = span.stop
        assert not found[first:].any()


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3], [1, 2], [3, 2], [0, 2, 1, 3], [1, 0, 3, 2], [2], [0, 3]]
)
def test_texts_attend_to_all_that_they_have_stored(order: list[int]) -> None:
    """Slots may come in any order, adjacent or not; the longest text fills the cache."""
    texts = Texts()
    texts.step({0: 5, 1: 1, 2: 9, 3: 2}, padding=3)
    for _ in range(3):
        texts.step(dict.fromkeys(order, 1), padding=1)
    assert max(texts.lengths[slot] for slot in order) <= MOST


def test_a_pass_may_begin_texts_beside_those_that_go_on() -> None:
    texts = Texts()
    texts.step({2: 4, 0: 1})
    texts.step({1: 3, 0: 1, 3: 1, 2: 2}, padding=2)
    # Slot 1 is taken by another text, which must see nothing of the one before.
    texts.lengths[1] = 0
    texts.step({2: 1, 1: 2})
    texts.step({1: 1, 2: 1, 0: 1})


@pytest.mark.parametrize("left", [0, 2, 4, MOST])
def test_a_layer_with_a_window_keeps_as_many_tokens_as_it_sees(left: int) -> None:
    texts = Texts((left, 0))
    texts.step({0: 3, 1: 1, 2: 7})
    for _ in range(2):
        texts.step({0: 1, 1: 1, 2: 1})
    # Tokens may go on several at once, as many as the window has or more, beside others.
    texts.step({1: 5, 0: 1, 2: 2}, padding=1)
    # Slot 2 is taken by another text, which must see nothing of the one before.
    texts.lengths[2] = 0
    texts.step({2: 1, 0: 3})
    texts.step({2: 1, 0: 1, 1: 1})
    kept = min(left + 1, MOST)
    assert texts.layer.keys.stored.shape == (SLOTS, kept, G, D)
    assert texts.layer.values.stored.shape == (SLOTS, kept, G, DV)


def test_without_slots_texts_attend_to_themselves_and_nothing_is_stored() -> None:
    texts = Texts()
    texts.cache = KeyValueCache(0, MOST)
    texts.layer, texts.other = LayerCache(texts.cache), LayerCache(texts.cache)
    texts.step({0: 3, 1: 1, 2: MOST}, padding=1)
    assert not texts.layer.keys.stored.numel()


def packed(*segments: tuple[int, int, int], padding: int = 0) -> PackedTokens:
    total = sum(length for _, _, length in segments) + padding
    return PackedTokens([Segment(*x) for x in segments], total, CPU)


def test_single_tokens_come_first_and_padding_has_no_length() -> None:
    tokens = packed((0, 0, 3), (1, 6, 1), (2, 2, 2), (3, 0, 1), padding=2)
    assert [x.slot for x in tokens.segments] == [1, 3, 0, 2] and tokens.singles == 2
    assert tokens.positions.tolist() == [6, 0, 0, 1, 2, 2, 3, 0, 0]
    assert tokens.lengths.tolist() == [7, 1, 3, 3, 3, 4, 4, 0, 0]
    assert tokens.last_tokens.tolist() == [0, 1, 4, 6]


class LongRope:
    """A rotary embedding whose angles tell position and kind: 1 for long, 0 for short ones."""

    def __init__(self, short_length: int | None) -> None:
        self.short_length = short_length

    def forward(self, length: int) -> Tensor:
        positions = torch.arange(float(length))
        is_long = torch.full((length,), float(length > (self.short_length or length)))
        return torch.stack([positions, is_long], dim=1).view(length, 1, 1, 2)


def angles(short: int | None, tokens: PackedTokens, *, as_tuple: bool = False) -> Any:
    cache = KeyValueCache(2, MOST)
    cache.tokens = tokens
    module: Any = LongRope(short)
    (length, other) = cache.all_positions(module, (3, "other"))
    assert (length, other) == (MOST, "other")
    output = module.forward(length)
    return cache.token_angles(module, None, (output, 0.7) if as_tuple else output)


def test_each_text_has_the_angles_of_its_own_length() -> None:
    """A text is long only beyond the original length, its newest tokens included."""
    segments = (0, 7, 1), (1, 8, 1), (2, 0, 9)
    found = angles(8, packed(*segments, padding=1))[:, 0, 0].tolist()
    assert found == [[7, 0], [8, 1], *([x, 1] for x in range(9)), [0, 0]]
    assert angles(8, packed((0, 0, 8)))[:, 0, 0, 1].tolist() == [0] * 8
    for short in (None, MOST):
        alike = angles(short, packed(*segments, padding=1))[:, 0, 0].tolist()
        assert alike == [[x, 0] for x, _ in found]
    own, factor = angles(8, packed(*segments, padding=1), as_tuple=True)
    assert own[:, 0, 0].tolist() == found and factor == 0.7
