"""Suspicions about rows written by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.inspect.preview.rows import Row
from megatron_ext.inspect.preview.summary import warnings_of
from megatron_ext.inspect.preview.text import SpanSplitter
from tests.inspect.preview.rows import packed, step_of, stream
from tests.inspect.preview.test_spans import chatml

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
    assert sentence.startswith(
        "1 conversations have no trained token (the first: a.jsonl, sample 1, conversation 2)"
    )


def test_a_row_without_trained_tokens(splitter: SpanSplitter) -> None:
    sentences = found(splitter, packed([([5, 6, 7], [0, 0])], 8), packed([GOOD], 8))
    assert sentences[0].startswith(
        "1 rows train no token at all (the first: step 1, rank 0, micro-batch 1, row 1)"
    )
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


def test_the_start_of_the_next_turn_is_no_end_of_turn(splitter: SpanSplitter) -> None:
    """ChatML trains the newline after the end of a turn."""
    assert not found(splitter, packed([([65, 66, 256, 198, 257, 65], [0.0, 1, 1, 0, 0])], 8))


def test_conversations_that_were_cut(splitter: SpanSplitter) -> None:
    (sentence,) = found(splitter, packed([GOOD, GOOD], 8, cut=3))
    assert sentence.startswith(
        "2 conversations are cut to `--sft-max-length`, 6 tokens in all are lost"
    )


def test_targets_and_attention_that_cross_documents(splitter: SpanSplitter) -> None:
    inside = [(67, 1.0), (256, 1.0), (0, 0), (0, 0)]
    assert not found(splitter, packed([GOOD], 4, depth_1=inside))
    beyond = [(67, 1.0), (256, 1.0), (9, 1.0), (0, 0)]
    (sentence,) = found(splitter, packed([GOOD], 4, depth_1=beyond))
    assert "crosses into another document" in sentence
    row = packed([GOOD, GOOD], 8)
    joined = dataclasses.replace(row, reaches=np.arange(8) > 0)
    (sentence,) = found(splitter, joined)
    assert "crosses into another document" in sentence
