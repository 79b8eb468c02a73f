"""Rows written by hand."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_ext.inspect.preview.rows import Provenance, Row, Step, documents_of
from megatron_ext.inspect.preview.summary import cells, summarize, warnings_of
from megatron_ext.inspect.preview.text import SpanSplitter, Terminal, grade, visible
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer, NullTokenizer
from megatron_ext.text.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_ext.text.tokenizers.models import SentencePieceTokenizer
from tests.text import tiny
from tests.text.sft.tiny import tokenizer


def packed(
    conversations: Sequence[tuple[Sequence[int], Sequence[float]]],
    size: int,
    *,
    depth_1: Sequence[tuple[int, float]] | None = None,
    cut: int = 0,
) -> Row:
    """Pack conversations, each of n + 1 ids and the weights of its n labels; then pad with id 9."""
    tokens, labels, weights, positions, samples = [], [], [], [], []
    for number, (ids, weighs) in enumerate(conversations):
        assert len(ids) == len(weighs) + 1
        tokens += list(ids[:-1])
        labels += list(ids[1:])
        weights += list(weighs)
        positions += range(len(weighs))
        samples += [number] * len(weighs)
    missing = size - len(tokens)
    starts = np.array([*positions, *[0] * missing]) == 0
    mtp = [] if depth_1 is None else [depth_1]
    return Row(
        dp_rank=0,
        microbatch=0,
        number=0,
        tokens=np.array([*tokens, *[9] * missing]),
        labels=np.array([*labels, *[9] * missing]),
        positions=np.array([*positions, *[0] * missing]),
        weights=np.array([*weights, *[0] * missing], dtype=np.float32),
        samples=np.array([*samples, *[-1] * missing]),
        reaches=~starts,
        mtp_labels=np.array([[label for label, _ in d] for d in mtp]).reshape(len(mtp), size),
        mtp_weights=np.array([[w for _, w in d] for d in mtp], np.float32).reshape(len(mtp), size),
        provenance=None,
        sample_provenance={
            i: Provenance(i, "a.jsonl", i + 1, cut) for i in range(len(conversations))
        },
    )


def stream(ids: Sequence[int], weights: Sequence[float]) -> Row:
    """Cut a row of n positions from n + 1 ids."""
    one = packed([(ids, weights)], len(weights))
    provenance = {"provenance": Provenance(4, "corpus"), "sample_provenance": {}}
    return dataclasses.replace(one, samples=None, **provenance)


def step_of(*rows: Row) -> Step:
    targets = sum(int(np.count_nonzero(row.weights)) for row in rows)
    weight = sum(float(row.weights.sum()) for row in rows)
    return Step(1, 0, len(rows), list(rows), targets, weight, [], [np.arange(rows[0].size)])


NAN = float("nan")
EOD = 0


def test_packed_conversations_have_a_token_more_than_positions() -> None:
    row = packed([([5, 6, 7], [0, 1]), ([8, 3, 4, 2], [0, 0.5, 1])], 8)
    first, second = documents_of(row, EOD)
    assert first.ids.tolist() == [5, 6, 7]
    np.testing.assert_array_equal(first.weights, [NAN, 0, 1])
    assert first.positions.tolist() == [0, 1, -1]
    assert second.ids.tolist() == [8, 3, 4, 2]
    np.testing.assert_array_equal(second.weights, [NAN, 0, 0.5, 1])
    assert second.positions.tolist() == [0, 1, 2, -1]
    assert (second.start, second.end, second.trained) == (2, 5, 2)
    assert (second.provenance.source, second.provenance.number) == ("a.jsonl", 2)


def test_a_stream_predicts_the_first_token_of_a_document_from_the_end_of_the_one_before() -> None:
    row = stream([5, 6, EOD, 7, 8], [1, 1, 0, 1])
    first, second = documents_of(row, EOD)
    assert first.ids.tolist() == [5, 6, EOD]
    np.testing.assert_array_equal(first.weights, [NAN, 1, 1])
    assert first.positions.tolist() == [0, 1, 2]
    assert second.ids.tolist() == [7, 8]
    assert second.weights.tolist() == [0, 1]
    assert second.positions.tolist() == [3, -1]
    # A stream may end with the first token of a document.
    first, second = documents_of(stream([5, EOD, 7], [1, 0.5]), EOD)
    assert (first.ids.tolist(), first.positions.tolist()) == ([5, EOD], [0, 1])
    assert (second.ids.tolist(), second.weights.tolist()) == ([7], [0.5])
    assert second.positions.tolist() == [-1]


def test_mtp_targets_stay_in_their_conversation() -> None:
    depth_1 = [(7, 1), (0, 0), (4, 0.5), (2, 1), (0, 0), (0, 0)]
    row = packed([([5, 6, 7], [0, 1]), ([8, 3, 4, 2], [0, 0.5, 1])], 6, depth_1=depth_1)
    first, second = documents_of(row, EOD)
    ids, weights = first.mtp_targets(1)
    assert (ids.tolist(), weights.tolist()) == ([7, -1, -1], [1, 0, 0])
    ids, weights = second.mtp_targets(1)
    assert (ids.tolist(), weights.tolist()) == ([4, 2, -1, -1], [0.5, 1, 0, 0])


def test_totals_by_hand() -> None:
    row = packed([([5, 6, 7], [0, 1]), ([8, 3, 4, 2], [0, 0.5, 1])], 8)
    empty = packed([], 8)
    found = summarize([step_of(row, empty, stream([5, 6, EOD, 7, 8, 9, 9, 9, 9], [1] * 8))], EOD)
    assert (found.rows, found.empty_rows, found.positions, found.padding) == (3, 1, 24, 3 + 8)
    assert found.filled == pytest.approx(13 / 24)
    assert cells(found.by_source["a.jsonl"]) == ["2", "3", "2", "60.0", "2.5"]
    assert cells(found.by_source["corpus"]) == ["2", "8", "0", "100.0", "8"]
    assert cells(found.whole) == ["4", "11", "2", "84.6", "10.5"]
    assert found.lengths == (3, 6)
    assert found.whole.targets + found.padding == found.positions


def chatml(path: Path) -> HuggingFaceTokenizer:
    loaded: Any = tokenizer("chatml")
    named = {"eos_token": "<|im_end|>"}
    return HuggingFaceTokenizer("HuggingFaceTokenizer", str(path), loaded.backend_tokenizer, named)


def test_bytes_of_one_character_are_one_span(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    ids = made.tokenize("aö🎉\n<|im_end|>")
    assert len(ids) == 1 + 2 + 4 + 1 + 1
    found = SpanSplitter(made).split(ids, [NAN, 0, 0, 1, 1, 1, 1, 0.5, 1])
    assert [(p.text, p.first, p.count) for p in found] == [
        ("a", 0, 1), ("ö", 1, 2), ("🎉", 3, 4), ("↵", 7, 1), ("<|im_end|>", 8, 1),
    ]  # fmt: skip
    assert [p.weight for p in found[1:]] == [0, 1, 0.5, 1]
    assert [p.is_special for p in found] == [False] * 4 + [True]


def test_bytes_that_make_no_character_or_weigh_apart_are_shown_by_ids(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    one, two = made.tokenize("ö")
    found = SpanSplitter(made).split([one, two], [0, 1])
    assert [p.text for p in found] == [f"⟨{one}⟩", f"⟨{two}⟩"]
    (a,) = made.tokenize("a")
    end = made.eos
    assert [p.text for p in SpanSplitter(made).split([one, a, one, end, one], [1] * 5)] == [
        f"⟨{one}⟩", "a", f"⟨{one}⟩", "<|im_end|>", f"⟨{one}⟩",
    ]  # fmt: skip


def test_sentencepiece_keeps_spaces_between_words() -> None:
    made = SentencePieceTokenizer("SentencePieceTokenizer", str(tiny.sentencepiece_model()))
    ids = made.tokenize("Bada gizo 中 kelu.")
    found = SpanSplitter(made).split(ids, [1.0] * len(ids))
    assert "".join(p.text for p in found) == "Bada gizo 中 kelu."
    assert sum(p.count for p in found) == len(ids)


def test_ids_without_text() -> None:
    null = SpanSplitter(NullTokenizer(10)).split([3, 7, 10], [1, 1, 1])
    assert [(p.text, p.is_special) for p in null] == [("3", False), (" 7", False), ("10", True)]
    by_byte = SpanSplitter(ByteLevelTokenizer(512)).split([104, 300, 105, 9999], [1] * 4)
    assert [p.text for p in by_byte] == ["h", "⟨300⟩", "i", "⟨9999⟩"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb", "a↵⇥b"),
        ("\x1b[31m\r\x7f\x85", "\\x1b[31m\\x0d\\x7f\\x85"),
        ("a\u200bb\u202ec\u2028", "a\\u{200b}b\\u{202e}c\\u{2028}"),
        ("<b>&é中 ", "<b>&é中 "),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def printed(
    folder: Path, text: str = "abcd<|im_end|>", weights: Any = (0, 0.25, 1, 1), **how: Any
) -> list[str]:
    """Return the token lines of a text with its weights on a console."""
    made, file = chatml(folder), io.StringIO()
    console = Console(file=file, **{"width": 80, **how})
    row = packed([(made.tokenize(text), weights)], len(weights) + 2)
    Terminal(console, SpanSplitter(made), made.eod, 1.0).row(row)
    return [line for line in file.getvalue().splitlines() if "│" in line]


def test_colours_follow_the_weight(tmp_path: Path) -> None:
    how = {"force_terminal": True, "color_system": "truecolor", "no_color": False}
    (text,) = printed(tmp_path, **how)
    low = "\x1b[38;2;177;183;64m"  # shade 2 of 8: a seventh of the way from yellow to green
    full = "38;2;40;200;90m"
    assert text.endswith(
        f"\x1b[2;4ma\x1b[0m\x1b[2mb\x1b[0m{low}c\x1b[0m\x1b[{full}d\x1b[0m"
        f"\x1b[1;{full}<|im_end|>\x1b[0m"
    )


def test_marks_stand_in_for_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(tmp_path) == ["      0 │ ab⟦0.25|c⟧⟦d<|im_end|>⟧"]
    monkeypatch.setenv("NO_COLOR", "1")
    (text,) = printed(tmp_path, force_terminal=True)
    assert "38;2" not in text and "⟦0.25|" in text


def test_lines_are_cut_at_the_width_and_begin_with_their_position(tmp_path: Path) -> None:
    lines = printed(tmp_path, "x" * 45, [0] * 44, width=30)
    assert lines == [f"      0 │ {'x' * 20}", f"     20 │ {'x' * 20}", f"     40 │ {'x' * 5}"]


@pytest.mark.parametrize(
    ("weight", "heaviest", "shade"),
    [(0, 1, 0), (float("nan"), 1, 0), (1e-9, 1, 1), (0.25, 1, 2), (0.5, 0.5, 8), (2, 1, 8)],
)
def test_shades(weight: float, heaviest: float, shade: int) -> None:
    assert grade(weight, heaviest) == shade


GOOD = ([65, 66, 67, 256], [0.0, 1, 1])  # 256 is <|im_end|>, 257 <|im_start|>


@pytest.fixture
def splitter(tmp_path: Path) -> SpanSplitter:
    return SpanSplitter(chatml(tmp_path))


def found(splitter: SpanSplitter, *rows: Row) -> list[str]:
    return warnings_of([step_of(*rows)], splitter, eod=0)


def test_good_rows_raise_no_suspicion(splitter: SpanSplitter) -> None:
    assert not found(splitter, packed([GOOD, GOOD], 8), packed([], 8))
    assert not found(splitter, stream([5, 6, 0, 7, 8], [1, 1, 1, 1]))


def test_a_conversation_without_trained_tokens(splitter: SpanSplitter) -> None:
    (sentence,) = found(splitter, packed([GOOD, ([5, 6, 7], [0, 0])], 8))
    said = "1 conversations have no trained token (the first: a.jsonl, sample 1, conversation 2)"
    assert sentence.startswith(said)


def test_a_row_without_trained_tokens(splitter: SpanSplitter) -> None:
    sentences = found(splitter, packed([([5, 6, 7], [0, 0])], 8), packed([GOOD], 8))
    said = "1 rows train no token at all (the first: step 1, rank 0, micro-batch 1, row 1)"
    assert sentences[0].startswith(said)
    (alone,) = found(splitter, stream([5, 6, 7], [0, 0]))
    assert "train no token at all" in alone


def test_a_mask_of_ones(splitter: SpanSplitter) -> None:
    ones = ([65, 66, 256], [1.0, 1])
    (whole,) = found(splitter, packed([ones, ones], 8))
    assert whole.startswith("every token of all 2 conversations is trained, prompts included;")
    (some,) = found(splitter, packed([ones, GOOD], 8))
    assert some.startswith("1 conversations are trained from end to end")


def test_an_end_of_turn_that_is_not_trained(splitter: SpanSplitter) -> None:
    bad = ([65, 66, 67, 256, 198], [0.0, 1, 0, 0])
    (sentence,) = found(splitter, packed([bad], 8))
    assert sentence.startswith("<|im_end|> (256) follows what is trained, but is never trained")
    assert not found(splitter, packed([bad, GOOD], 8))
    # The start of the next turn is no end of a turn.
    assert not found(splitter, packed([([65, 66, 256, 198, 257, 65], [0.0, 1, 1, 0, 0])], 8))


def test_conversations_that_were_cut(splitter: SpanSplitter) -> None:
    (sentence,) = found(splitter, packed([GOOD, GOOD], 8, cut=3))
    said = "2 conversations are cut to `--sft-max-length`, 6 tokens in all are lost"
    assert sentence.startswith(said)


def test_targets_and_attention_that_cross_documents(splitter: SpanSplitter) -> None:
    inside = [(67, 1.0), (256, 1.0), (0, 0), (0, 0)]
    assert not found(splitter, packed([GOOD], 4, depth_1=inside))
    beyond = [(67, 1.0), (256, 1.0), (9, 1.0), (0, 0)]
    (sentence,) = found(splitter, packed([GOOD], 4, depth_1=beyond))
    assert "crosses into another document" in sentence
    joined = dataclasses.replace(packed([GOOD, GOOD], 8), reaches=np.arange(8) > 0)
    (sentence,) = found(splitter, joined)
    assert "crosses into another document" in sentence
