"""Lengths, ends and pieces of texts, with a model that counts in the place of a real one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.text.generation import decode
from megatron_ext.text.generation.decode import Completion, Decoder, PartialText, Request
from megatron_ext.text.generation.forward import NewTokens
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer, NullTokenizer

POSITIONS, VOCABULARY = 8, 50


class Counting:
    """Forward passes of a model of 8 positions that writes the token after the last one.

    Attributes:
        positions: of all tokens that it has seen, in their order.
        passes: the prompts' or texts' new tokens in each forward pass.
    """

    decides = True
    max_length = POSITIONS
    short_length: int | None = None
    device = torch.device("cpu")
    context = SimpleNamespace(pgs=SimpleNamespace(mp=SimpleNamespace(size=lambda: 1)))

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.passes: list[list[tuple[int, ...]]] = []

    @contextmanager
    def ready(self, slots: int, length: int) -> Iterator[None]:
        assert length <= POSITIONS
        self.slots = range(slots)
        self.cache_length = length
        yield

    def any_left(self, own: bool) -> bool:
        return own

    def next_logits(self, texts: Sequence[NewTokens]) -> dict[int, torch.Tensor]:
        logits = {}
        self.passes.append([tuple(text.ids) for text in texts])
        for text in texts:
            assert text.segment.slot in self.slots
            start = text.segment.start
            assert start + len(text.ids) <= self.cache_length
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


def passes_of(lengths: Sequence[int], batch_size: int) -> list[list[tuple[int, ...]]]:
    """Return the new tokens of each forward pass over prompts that begin with 20, 21 and so on."""
    forward: Any = Counting()
    decoder = Decoder(forward, NullTokenizer(VOCABULARY - 1), (), batch_size=batch_size)
    one = Sampling(max_new_tokens=1)
    prompts = [(number, *[0] * (length - 1)) for number, length in enumerate(lengths, start=20)]
    requests = [Request(number, ids, one) for number, ids in enumerate(prompts)]
    completions = decoder.complete(requests)
    assert sorted(completion.number for completion in completions) == list(range(len(lengths)))
    return list(forward.passes)


def test_a_pass_takes_as_many_prompts_as_fit_and_a_longer_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "PROMPT_TOKENS", 5)
    admitted = passes_of([3, 2, 1, 4, 2, 3, 7, 1], batch_size=4)
    assert [[ids[0] for ids in one] for one in admitted] == [
        [20, 21],
        [22, 23],
        [24, 25],
        [26],
        [27],
    ]
    # Without the limit, the number of texts decides.
    monkeypatch.setattr(decode, "PROMPT_TOKENS", 100)
    assert [len(one) for one in passes_of([3, 2, 1, 4, 2], batch_size=3)] == [3, 2]


def test_a_text_past_the_short_length_is_run_again_from_its_beginning() -> None:
    """LongRoPE rotates all positions of a text differently when it exceeds the short length."""
    forward: Any = Counting()
    forward.short_length = 4
    decoder = Decoder(forward, NullTokenizer(VOCABULARY - 1), (), batch_size=2)
    decoder.complete([Request(0, (7, 8, 9), Sampling(max_new_tokens=4))])
    assert forward.passes == [[(7, 8, 9)], [(10,)], [(7, 8, 9, 10, 11)], [(12,)]]


def test_pieces_are_told_by_the_numbers_of_their_requests() -> None:
    """The second text takes the slot of the first; the requests begin at another number than 0."""
    forward: Any = Counting()
    decoder = Decoder(forward, NullTokenizer(VOCABULARY - 1), (), batch_size=1)
    requests = [Request(number, (number,), Sampling(max_new_tokens=2)) for number in (5, 9)]
    pieces: dict[int, str] = {}

    def collect(number: int, piece: str) -> None:
        pieces[number] = pieces.get(number, "") + piece

    completions = decoder.complete(requests, collect)
    assert pieces == {5: " 6 7", 9: " 10 11"}
    assert [(each.number, each.text) for each in completions] == [*pieces.items()]


def written(prompt: bytes, text: bytes, *stops: str) -> tuple[PartialText, list[str]]:
    """Return a text whose tokens are bytes, and its pieces; stop at its end."""
    sampling = Sampling(max_new_tokens=100, stop_strings=stops)
    writing = PartialText(Request(0, tuple(prompt), sampling), ByteLevelTokenizer(), ())
    ids = list(prompt)
    pieces = []
    for byte in text:
        logits = torch.zeros(512).scatter(0, torch.tensor([byte]), 1.0)
        ids.append(writing.choose(logits, ids))
        pieces.append(writing.further_text())
        if writing.reason:
            break
    return writing, pieces


def test_the_first_of_several_stop_strings_ends_a_text_and_the_beginning_of_any_is_held_back() -> (
    None
):
    writing, pieces = written(b"a", b"one two", "xyz", "wo", "ne tw")
    assert (writing.text, writing.reason) == ("o", "stop")
    # From "n" on, the text may become the third one.
    assert pieces == ["o", "", "", "", "", ""]
    assert written(b"a", b"two", "w", "tw")[0].text == ""


def test_a_stop_string_that_the_last_token_completes_is_the_reason_of_the_end() -> None:
    sampling = Sampling(max_new_tokens=3, stop_strings=("cd",))
    for text, reason in ((b"bcd", "stop"), (b"bce", "length")):
        writing = PartialText(Request(0, (97,), sampling), ByteLevelTokenizer(), ())
        ids = [97]
        for byte in text:
            logits = torch.zeros(512).scatter(0, torch.tensor([byte]), 1.0)
            ids.append(writing.choose(logits, ids))
        assert writing.reason == reason


def test_the_cache_has_room_for_the_longest_text() -> None:
    """The first text is short, the second has the longest prompt, the third most new tokens."""
    forward: Any = Counting()
    decoder = Decoder(forward, NullTokenizer(VOCABULARY - 1), (), batch_size=3)
    sizes = ((1, 1), (4, 2), (2, 5))
    requests = [
        Request(number, tuple(range(length)), Sampling(max_new_tokens=new))
        for number, (length, new) in enumerate(sizes)
    ]
    completions = decoder.complete(requests)
    assert {each.number: len(each.ids) for each in completions} == {0: 1, 1: 2, 2: 5}
    assert forward.cache_length == 7


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    writing, _ = written(b"ab\xc3", b"\xa9c")
    assert writing.text == "\ufffdc"
    assert written(b"ab\xc3\xa9", b"c")[0].text == "c"


def test_as_much_is_held_back_as_may_become_a_stop_string_or_a_character() -> None:
    """The longest beginning of a stop string at the end of a text is held back."""
    writing, pieces = written(b"x", b"aab", "aab")
    assert (writing.text, writing.reason, pieces) == ("", "stop", ["", "", ""])
    _, pieces = written(b"x", b"aaac", "aab")
    assert pieces == ["", "", "a", "aac"]
    writing, _ = written(b"x", b"ab")
    writing._text = "abc\ufffd\ufffd"
    assert writing.further_text() == "c"
    writing._text = "abcde"
    assert (writing.further_text(), writing.further_text()) == ("de", "")
