"""Documents of rows written by hand: which token has which weight."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.inspect.preview.rows import documents_of
from megatron_ext.inspect.preview.summary import cells, summarize
from tests.inspect.preview.rows import packed, step_of, stream

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
    assert second.provenance is not None
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


def test_a_stream_may_end_with_the_first_token_of_a_document() -> None:
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
