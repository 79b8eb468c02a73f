"""Rows written by hand."""

import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_ext.data.loader import StepDataset
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview.collect import Numbered, _columns, _Replica, _Start
from megatron_ext.inspect.preview.main import Options, Page, _notes, _show, parse_run
from megatron_ext.inspect.preview.rows import Provenance, Row, Step, documents_of, target_exists
from megatron_ext.inspect.preview.summary import (
    _turn_ends,
    cells,
    sentences,
    summarize,
    warnings_of,
)
from megatron_ext.inspect.preview.text import (
    SpanSplitter,
    Terminal,
    describe,
    describe_row,
    grade,
    visible,
)
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.task import TEXT
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer, NullTokenizer
from megatron_ext.text.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_ext.text.tokenizers.models import SentencePieceTokenizer
from tests.text import tiny
from tests.text.sft.tiny import tokenizer
from tests.training_runs import SAME_WEIGHTS, SMALL, config_of, mock_data


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
    said = "1 conversations have no trained token (the first: sample 1, number 2 of a.jsonl)"
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
    # What padding attends to is no fault, on whichever side of it.
    padded = dataclasses.replace(packed([GOOD], 6), reaches=np.arange(6) > 0)
    assert not found(splitter, padded)
    joined = dataclasses.replace(packed([GOOD, GOOD], 8), reaches=np.arange(8) > 0)
    (sentence,) = found(splitter, joined)
    assert "crosses into another document" in sentence


def test_rows_and_documents_are_described_by_their_numbers() -> None:
    row = packed([([5, 6, 7], [0, 1]), ([8, 3, 4, 2], [0, 0.5, 1])], 8, cut=0)
    row = dataclasses.replace(row, dp_rank=3, microbatch=1, number=4)
    assert describe_row(row) == (
        "data-parallel rank 3 · micro-batch 2 · row 5 · 5 of 8 positions filled, 3 padding"
    )
    row.sample_provenance[1] = Provenance(1, "b.jsonl", None, 6)
    first, second = documents_of(row, EOD)
    assert describe(first) == (
        "document 1 · sample 0, number 1 of a.jsonl · columns 0–1, positions 0–1 "
        "· 1 of 2 trained, weight 1"
    )
    assert describe(second) == (
        "document 2 · sample 1, b.jsonl · columns 2–4, positions 0–2 · 2 of 3 trained, weight 1.5 "
        "· 6 tokens cut off"
    )
    _, last = documents_of(stream([5, EOD, 7], [1, 0.5]), EOD)
    assert describe(last) == "document 2 · sample 4, corpus · 1 of 1 trained, weight 0.5"


def direct(documents: Sequence[int], weights: Sequence[float]) -> Row:
    """Fill a row with whole documents that have no samples of their own."""
    row = stream(range(10, 11 + len(documents)), weights)
    return dataclasses.replace(row, documents=np.array(documents))


def test_documents_of_packed_rows_begin_where_their_number_changes() -> None:
    """The last label belongs to the last document if the row is full and the label has a weight."""
    full = direct([0, 0, 0, 1, 1], [1, 1, 1, 1, 0.5])
    first, second = documents_of(full, EOD)
    assert (first.start, first.end, first.ids.tolist()) == (0, 3, [10, 11, 12])
    assert (second.start, second.end, second.ids.tolist()) == (3, 5, [13, 14, 15])
    np.testing.assert_array_equal(first.weights, [NAN, 1, 1])
    assert second.weights.tolist() == [1, 1, 0.5]
    assert not full.is_padding.any()
    ended = direct([0, 0, 0, 1, 1], [1, 1, 1, 1, 0])
    assert [one.ids.tolist() for one in documents_of(ended, EOD)] == [[10, 11, 12], [13, 14]]
    padded = direct([0, 1, 1, -1, -1], [1, 1, 1, 1, 0.5])
    assert [one.ids.tolist() for one in documents_of(padded, EOD)] == [[10], [11, 12]]
    assert padded.is_padding.tolist() == [False] * 3 + [True] * 2
    assert summarize([step_of(padded)], EOD).padding == 2


def test_targets_of_depths_stay_in_a_sample_and_out_of_the_padding() -> None:
    row = packed([([5, 6, 7, 8], [1] * 3), ([8, 3, 4, 2], [1] * 3)], 9)
    # Attention may run over all columns; what padding holds is no target.
    joined = dataclasses.replace(row, reaches=np.arange(9) > 0)
    for depth, there in ((1, [0, 1, 3, 4]), (2, [0, 3]), (3, []), (9, []), (12, [])):
        for one in (row, joined):
            assert np.flatnonzero(target_exists(one, depth)).tolist() == there
    cut = stream([5, 6, 7, 8, 9], [1] * 4)
    assert target_exists(cut, 1).tolist() == [True, True, True, False]


def test_totals_take_all_rows_into_account(splitter: SpanSplitter) -> None:
    long, short = ([8, 3, 4, 2], [0, 0.5, 1]), ([5, 6, 7], [0, 2])
    untrained = packed([([5, 6, 7, 8, 9], [0] * 4)], 8)
    found = summarize([step_of(packed([long, short], 8)), step_of(untrained)], EOD)
    assert found.lengths == (3, 5) and found.heaviest == 2
    assert (found.rows, found.empty_rows) == (2, 0)
    step = dataclasses.replace(step_of(untrained), iteration=7, mtp_weights=[1.5, 0.25])
    lines = sentences(found, [step])
    assert lines[1] == "documents of 3 to 5 tokens, as the rows cut them"
    assert lines[2] == (
        "step 7: N = 0 targets, D = 0 weight, 1 micro-batches on each rank; of the MTP depths 1.5, "
        "0.25"
    )
    row = packed([GOOD, GOOD], 8)
    row.sample_provenance.update({0: Provenance(0, "a", 1, 3), 1: Provenance(1, "b", 2, 5)})
    (sentence,) = warnings_of([step_of(row)], splitter, eod=0)
    assert sentence.startswith("2 conversations are cut to `--sft-max-length`, 8 tokens in all are")
    other = dataclasses.replace(untrained, dp_rank=2, microbatch=1, number=4)
    first = warnings_of([dataclasses.replace(step, rows=[other])], splitter, eod=0)[0]
    assert "(the first: step 7, rank 2, micro-batch 2, row 5);" in first
    (named,) = warnings_of([step_of(packed([([5, 6], [0]), GOOD], 8))], splitter, eod=0)
    assert "(the first: sample 0, number 1 of a.jsonl);" in named


def test_targets_of_depths_are_the_labels_that_follow(splitter: SpanSplitter) -> None:
    row = packed([([5, 6, 7, 8, 9], [1] * 4)], 4, depth_1=[(7, 1), (8, 1), (9, 1), (0, 0)])
    assert not any("multi-token" in sentence for sentence in found(splitter, row))
    wrong = packed([([5, 6, 7, 8, 9], [1] * 4)], 4, depth_1=[(7, 1), (7, 1), (9, 1), (0, 0)])
    assert any("multi-token" in sentence for sentence in found(splitter, wrong))


def test_weights_above_one_and_targets_of_depths_are_shown_in_place(tmp_path: Path) -> None:
    assert printed(tmp_path, weights=(0, 2, 1, 1)) == ["      0 │ ab⟦2|c⟧⟦d<|im_end|>⟧"]
    made, file = chatml(tmp_path), io.StringIO()
    ids = made.tokenize("abcd")
    row = packed([(ids[:3], [1, 1]), (ids, [1] * 3)], 5, depth_1=[
        (-1, 0), (-1, 0), (ids[2], 0), (ids[3], 0.5), (-1, 0),
    ])  # fmt: skip
    Terminal(Console(file=file, width=80), SpanSplitter(made), made.eod, 1.0).row(row)
    lines = [line.split("│ ")[1] for line in file.getvalue().splitlines() if "│" in line]
    assert lines == ["a⟦bc⟧", "∅∅∅", "a⟦bcd⟧", "c⟦0.5|d⟧∅∅"]


def test_context_parallel_ranks_keep_a_slice_of_each_half() -> None:
    assert [x.tolist() for x in _columns(6, 1)] == [[0, 1, 2, 3, 4, 5]]
    assert [x.tolist() for x in _columns(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    thirds = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [x.tolist() for x in _columns(12, 3)] == thirds


def test_a_page_notes_what_its_rows_do_not_show() -> None:
    config = config_of([*SMALL])
    # Conversations never see each other.
    tuned = config.with_section(dataclasses.replace(config.section(SftConfig), sft=True))
    apart = config_of([*SMALL, "--reset-attention-mask"])
    assert _notes(tuned, _columns(6, 1)) == _notes(apart, _columns(6, 1)) == []
    assert _notes(tuned, _columns(12, 3)) == [
        "context-parallel rank 0 keeps columns 0–1 and 10–11 of each row",
        "context-parallel rank 1 keeps columns 2–3 and 8–9 of each row",
        "context-parallel rank 2 keeps columns 4–5 and 6–7 of each row",
    ]
    means = config_of([*SMALL, "--no-calculate-per-token-loss", "--loss", "mine.py:f"])
    crossed, mean, mine = _notes(means, _columns(6, 1))
    assert crossed.startswith("attention and multi-token targets run through the ends of documents")
    assert mean.startswith("the loss is the mean of the micro-batches' own means")
    assert mine.startswith("the weights are those of `--loss` (mine.py:f)")


def rendered(folder: Path, row: Row, columns: list[Any]) -> list[dict[str, str]]:
    """Return the tokens of a page of one row: classes, ids, position, tooltip and text."""
    made = chatml(folder)
    step = dataclasses.replace(step_of(row), cp_columns=columns)
    summary = summarize([step], made.eod)
    page = Page(SpanSplitter(made), made.eod, 1.0)
    text = page.render("t", [(step, [row])], summary, notes=[], warnings=[])
    pattern = (
        r'(?:<span class="n">(?P<number>\d+) </span>)?<span class="(?P<kind>t[^"]*)" '
        r'data-ids="(?P<ids>[^"]*)" data-weight="[^"]*" data-position="(?P<position>[^"]*)" '
        r'title="(?P<title>[^"]*)">(?P<text>[^<]*)</span>'
    )
    return [found.groupdict(default="") for found in re.finditer(pattern, text)]


def test_the_page_tells_which_context_parallel_rank_reads_a_token(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    row = packed([(made.tokenize("abcdefgh!"), [1] * 8)], 8)
    tokens = rendered(tmp_path, row, _columns(8, 2))
    ranks = [re.findall(r"context-parallel rank (\d)", token["title"]) for token in tokens]
    assert ranks == [[rank] for rank in "00111100"] + [[]]
    cut = [place for place, token in enumerate(tokens) if "cut" in token["kind"].split()]
    assert cut == [2, 6]
    alone = rendered(tmp_path, row, _columns(8, 1))
    assert not any("rank" in token["title"] or "cut" in token["kind"] for token in alone)
    assert [token["position"] for token in alone] == [*"01234567", ""]


def test_the_page_tells_the_targets_of_each_depth(tmp_path: Path) -> None:
    """The last token is only predicted, so that no depth predicts from it."""
    row = packed([([65, 66, 67, 0], [1] * 3)], 3)
    row = dataclasses.replace(
        row,
        mtp_labels=np.array([[67, 0, 9], [0, 9, 9]]),
        mtp_weights=np.array([[1, 0.5, 0], [0.25, 0, 0]], np.float32),
    )
    told = [
        [line.partition(": ")[2] for line in token["title"].split("&#10;") if "MTP" in line]
        for token in rendered(tmp_path, row, _columns(3, 1))
    ]
    splitter = SpanSplitter(chatml(tmp_path))
    two, none = (f"“{splitter.text_of(token)}” ({token}), weight" for token in (67, 0))
    assert told == [[f"{two} 1", f"{none} 0.25"], [f"{none} 0.5", "∅"], ["∅", "∅"], []]


def test_samples_of_a_preview_are_numbered_and_packed_as_their_dataset_says() -> None:
    class Packed(StepDataset):
        packs_documents = True

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"token": 10 * index}

    for packs in (True, False):
        dataset = Packed()
        dataset.packs_documents = packs
        numbered = Numbered(dataset)
        assert numbered.packs_documents is packs
        assert numbered[3] == {"token": 30, "sample": 3}


def test_position_ids_begin_lines_and_stand_at_intervals(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    text = "x" * 100 + "\n" + "y" * 10 + "\n\n" + "z" * 70
    ids = made.tokenize(text)
    row = packed([(ids, [1] * (len(ids) - 1))], len(ids) - 1)
    numbers = [int(x["number"]) for x in rendered(tmp_path, row, []) if x["number"]]
    assert numbers == [0, 64, 101, 112, 113, 177]


def shown(folder: Path, reduction: str, **options: Any) -> tuple[list[str], str]:
    """Return the lines of a console and the page of a step of two ranks."""
    made, file = chatml(folder), io.StringIO()
    rows = []
    for rank in range(2):
        for number in range(3):
            row = packed([] if number == 1 else [([65, 66, 67], [0, 0.5])], 4)
            rows.append(dataclasses.replace(row, dp_rank=rank, number=number))
    console = Console(file=file, width=100, no_color=True)
    asked = Options(step=5, html=folder / "page.html", **options)
    step = dataclasses.replace(step_of(*rows), iteration=5, consumed=8)
    said = _show([step], ["a note"], ["of the data"], asked, made, console, reduction)
    assert said[0] == "of the data"
    return file.getvalue().splitlines(), (folder / "page.html").read_text()


def test_rows_of_the_chosen_rank_are_shown_without_empty_ones(tmp_path: Path) -> None:
    lines, page = shown(tmp_path, "token", rank=1, max_rows=4)
    heads = [line for line in lines if line.startswith("data-parallel rank")]
    assert ["row" + head.partition(" · row")[2][:2] for head in heads] == ["row 1", "row 3"]
    assert all(head.startswith("data-parallel rank 1 · micro-batch 1 · ") for head in heads)
    assert lines[0] == "step 5, after 8 samples"
    assert "2 of 6 rows are shown" in lines and "a note" in lines
    assert "warning: of the data" in lines
    assert page.count('<section class="row">') == 2
    lines, _ = shown(tmp_path, "token", rank=0, max_rows=1)
    assert sum(line.startswith("data-parallel rank 0 ") for line in lines) == 1
    lines, _ = shown(tmp_path, "token", rank=0, max_rows=0)
    assert "0 of 6 rows are shown" in lines


def test_the_strongest_green_is_a_whole_token_or_the_heaviest_one(tmp_path: Path) -> None:
    """Weights of other reductions are told apart only by their ratios."""
    _, page = shown(tmp_path, "token")
    assert " up to 1; grey" in page and 'class="t w4"' in page.partition("<h2>")[2]
    _, page = shown(tmp_path, "sample")
    assert " up to 0.5; grey" in page and 'class="t w8"' in page.partition("<h2>")[2]


def test_the_number_of_ranks_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SAME_WEIGHTS, *mock_data(), "--train-iters", "1"]
    with pytest.raises(ConfigError, match=r"`--rank` \(1\) must be one of the 1 data-par"):
        parse_run(TEXT, words, Options(rank=1), "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse_run(TEXT, words, Options(rank=1), "cpu").config.parallel.world_size == 2
    assert parse_run(TEXT, words, Options(rank=3, world_size=4), "cpu")
    with pytest.raises(ConfigError, match=r"`--rank` \(2\) must be one of the 2 data-par"):
        parse_run(TEXT, words, Options(rank=2), "cpu")


def test_a_step_of_a_plan_has_the_plan_s_number_of_micro_batches() -> None:
    """Iterations are counted from 1, the steps of a plan from 0."""
    replica: Any = object.__new__(_Replica)
    replica._source = SimpleNamespace(plan=SimpleNamespace(num_microbatches=[3, 5, 7].__getitem__))
    starts = [_Start(iteration, 0, 9) for iteration in (1, 2, 3)]
    assert [replica.num_microbatches(start) for start in starts] == [3, 5, 7]
    replica._source = SimpleNamespace(plan=None)
    assert replica.num_microbatches(starts[0]) == 9


@pytest.mark.parametrize(
    ("ids", "trained", "warns"),
    [
        ([5, 6, 91, 92, 7], "yyynn", False),  # the end of the turn is the last trained token
        ([91, 5, 6, 92, 7], "yyynn", False),  # the third last trained token
        ([91, 5, 6, 8, 92], "yyyyn", True),  # the fourth last is too far away
        ([5, 6, 8, 92, 7], "yyynn", True),
    ],
)
def test_an_end_of_turn_is_looked_for_among_the_last_trained_tokens(
    ids: list[int], trained: str, warns: bool
) -> None:
    """Tokens from 90 on are special; 92 follows what is trained."""
    document: Any = SimpleNamespace(
        ids=np.array(ids), targets=np.array([x == "y" for x in trained], float), provenance=None,
        number=1, row=SimpleNamespace(sample=0, replica=0, number=1),
    )  # fmt: skip
    splitter: Any = SimpleNamespace(is_special=lambda token: token >= 90, text_of=str)
    told = list(_turn_ends([document], splitter))
    assert bool(told) == warns
    assert not warns or told[0].startswith("92 (92) follows what is trained")
