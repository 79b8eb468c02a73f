"""Ids to text that can be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.inspect.preview.text import SpanSplitter, visible
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer, NullTokenizer
from megatron_ext.text.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_ext.text.tokenizers.models import SentencePieceTokenizer
from tests.text import tiny
from tests.text.sft.tiny import tokenizer

NAN = float("nan")


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


def test_bytes_that_weigh_differently_are_shown_apart_by_their_ids(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    one, two = made.tokenize("ö")
    found = SpanSplitter(made).split([one, two], [0, 1])
    assert [p.text for p in found] == [f"⟨{one}⟩", f"⟨{two}⟩"]


def test_bytes_that_make_no_character_are_shown_by_their_ids(tmp_path: Path) -> None:
    made = chatml(tmp_path)
    one, _ = made.tokenize("ö")
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
