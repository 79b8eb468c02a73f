"""The length of texts, with a model that counts in the place of a real one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.text.generation.decode import Completion, Decoder, Request
from megatron_ext.text.generation.forward import NewTokens
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.tokenizers.base import NullTokenizer

POSITIONS, VOCABULARY = 8, 50


class Counting:
    """Forward passes of a model of 8 positions that writes the token after the last one.

    Attributes:
        positions: of all tokens that it has seen, in their order.
    """

    decides = True
    max_length = POSITIONS
    short_length = None
    device = torch.device("cpu")
    context = SimpleNamespace(pgs=SimpleNamespace(mp=SimpleNamespace(size=lambda: 1)))

    def __init__(self) -> None:
        self.positions: list[int] = []

    @contextmanager
    def ready(self, slots: int, length: int) -> Iterator[None]:
        assert length <= POSITIONS
        yield

    def any_left(self, own: bool) -> bool:
        return own

    def next_logits(self, texts: Sequence[NewTokens]) -> dict[int, torch.Tensor]:
        logits = {}
        for text in texts:
            start = text.segment.start
            self.positions += range(start, start + len(text.ids))
            following = torch.tensor([(text.ids[-1] + 1) % VOCABULARY])
            logits[text.segment.slot] = torch.zeros(VOCABULARY).scatter(0, following, 1.0)
        return logits


def completion_of(length: int, *, new: int, ends: Sequence[int] = ()) -> tuple[Completion, int]:
    """Return the completion of a prompt of a length, and the last position that the model saw."""
    forward: Any = Counting()
    decoder = Decoder(forward, NullTokenizer(VOCABULARY - 1), ends, batch_size=2)
    request = Request(0, tuple(range(length)), Sampling(max_new_tokens=new))
    (completion,) = decoder.complete([request])
    return completion, max(forward.positions)


@pytest.mark.parametrize("length", [1, 5, POSITIONS - 1])
@pytest.mark.parametrize("new", [1, 2, 100])
def test_a_text_has_at_most_as_many_tokens_as_the_model_has_positions(
    length: int, new: int
) -> None:
    completion, last = completion_of(length, new=new)
    assert completion.ids == tuple(range(length, min(length + new, POSITIONS)))
    assert completion.finish_reason == "length"
    # The last token is chosen, but not read.
    assert last == length + len(completion.ids) - 2


def test_an_end_token_at_the_last_position_ends_the_text() -> None:
    completion, _ = completion_of(5, new=100, ends=[POSITIONS - 1])
    assert (completion.ids, completion.finish_reason) == ((5, 6, 7), "eos")
    assert completion.text == " 5 6"
