"""Repeated spans are found with their lengths and places, and none crosses a document's end."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.extras.quality import spans
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.extras.quality.spans import RepeatedSpans, repeated_spans
from tests.extras.quality.made import Tokens, write

pytest.importorskip("pydivsufsort", reason="repeated spans need pydivsufsort")


def _found(folder: Path, texts: list[Tokens], max_tokens: int = 10**9) -> RepeatedSpans:
    documents = Documents([write(folder / "d", texts)])
    return repeated_spans(documents, np.arange(len(texts)), documents.lengths(), max_tokens)


def test_a_planted_span_is_found_with_its_places(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 60_000, 300).tolist() for _ in range(30)]
    planted, short = (random.integers(0, 60_000, n).tolist() for n in (77, 52))
    for document, token in ((3, 10), (12, 223), (29, 0)):
        texts[document][token : token + 77] = planted
    for document, token in ((3, 200), (5, 0)):
        texts[document][token : token + 52] = short
    found = _found(tmp_path, texts)
    first, second, *rest = found.longest
    assert first.tokens.tolist() == planted
    assert sorted(first.places) == [(3, 10), (12, 223), (29, 0)]
    assert second.tokens.tolist() == short and sorted(second.places) == [(3, 200), (5, 0)]
    assert all(len(span.tokens) < 5 for span in rest)
    assert (found.documents, found.tokens) == (30, 9000)
    assert found.repeated == 3 * 77 + 2 * 52


def _repeats(texts: list[Tokens], length: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return all runs of a length that occur more than once, with their places."""
    runs: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, text in enumerate(texts):
        for at in range(len(text) - length + 1):
            runs.setdefault(tuple(text[at : at + length]), []).append((number, at))
    return {run: places for run, places in runs.items() if len(places) > 1}


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_span_and_what_lies_in_long_ones_are_those_of_a_search(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LONG", 5)
    random = np.random.default_rng(seed)
    texts = [random.integers(0, 3, random.integers(1, 30)).tolist() for _ in range(12)]
    found = _found(tmp_path, texts)
    longest = found.longest[0]
    length = len(longest.tokens)
    assert not _repeats(texts, length + 1)
    assert _repeats(texts, length)[tuple(longest.tokens.tolist())] == sorted(longest.places)
    covered = {
        (number, at + k)
        for places in _repeats(texts, 5).values()
        for number, at in places
        for k in range(5)
    }
    assert found.repeated == len(covered)


def test_the_bound_of_the_sample_holds(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    texts = [random.integers(0, 60_000, 50).tolist() for _ in range(100)]
    found = _found(tmp_path, texts, 1020)
    assert (found.documents, found.tokens) == (20, 1000)
    assert _found(tmp_path, texts, 10) == RepeatedSpans(0, 0)
    assert _found(tmp_path, [[], []]) == RepeatedSpans(0, 0)
