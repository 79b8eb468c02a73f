"""Lengths, frequencies, special tokens, characters and languages, against numpy and by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.extras.quality import figures
from megatron_ext.extras.quality.documents import Documents
from megatron_ext.extras.quality.figures import (
    TokenCounts,
    is_special,
    language_classifier,
    length_bins,
    text_figures,
    token_figures,
)
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer, Tokenizer
from tests.extras.quality.made import write
from tests.text import tiny


def test_the_histogram_of_lengths_is_numpys() -> None:
    random = np.random.default_rng(0)
    lengths = np.concatenate(
        [[0, 1, 2, 3, 4, 1 << 40, (1 << 40) - 1], random.integers(0, 999, 500)]
    )
    bins = length_bins(lengths)
    edges = [first for first, *_ in bins] + [bins[-1][1] + 1]
    assert [count for *_, count in bins] == np.histogram(lengths, edges)[0].tolist()
    assert [(first, last) for first, last, _ in bins[:4]] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert all(last + 1 == after for (_, last, _), (after, *_) in zip(bins, bins[1:], strict=False))
    assert length_bins(lengths[:0]) == []


def test_tokens_are_counted_as_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_ID", 500)
    random = np.random.default_rng(1)
    parts = [random.integers(0, 400, 1000).astype(np.uint16)]
    parts += [random.integers(-5, high, 1000).astype(np.int32) for high in (100, 600)]
    counted = TokenCounts()
    for part in parts:
        counted.add(part)
    tokens = np.concatenate(parts)
    inside = tokens[(tokens >= 0) & (tokens < 500)]
    found = token_figures(counted, None)
    ids, counts = np.unique(inside, return_counts=True)
    assert (found.distinct, found.outside) == (len(ids), 3000 - len(inside))
    order = np.lexsort((ids, -counts))[:20]
    assert [(h.token, h.count) for h in found.head] == [(ids[i], counts[i]) for i in order]
    assert found.head[0].share == counts[order[0]] / 3000
    assert found.special is None and found.vocabulary is None


def _tokenizers() -> list[tuple[Tokenizer, set[int]]]:
    hugging_face = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tiny.hf_folder())
    )
    sentencepiece = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tiny.sentencepiece_model())
    )
    # In the model: 0 <unk>, 1 <s>, 2 </s>; a user-defined piece and bytes are texts.
    return [
        (build_tokenizer(hugging_face), {0, 1}),
        (build_tokenizer(sentencepiece), {1, 2}),
        (ByteLevelTokenizer(), {0, 1}),
    ]


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    for tokenizer, special in _tokenizers():
        found = {i for i in range(min(tokenizer.vocab_size, 600)) if is_special(tokenizer, i)}
        assert found == special, tokenizer.kind
    counted = TokenCounts()
    counted.add(np.array([0, 65, 0, 66, 600, 513], dtype=np.int32))
    figures = token_figures(counted, ByteLevelTokenizer(vocab_size=512))
    assert figures.special is not None
    assert [(s.token, s.count, s.text) for s in figures.special] == [(0, 2, "\0")]
    assert (figures.outside, figures.vocabulary, figures.distinct) == (2, 512, 5)


TEXTS = [
    "Plain text with\ttabs and\r\nlines, an é and a \U0001f600.",
    "ten \x1b\x1b odd",
    "a\x00" + "b" * 97,
    "a\x00" + "b" * 99,
    "cut \ufffd",
    "",
]


def test_documents_with_many_control_characters_are_found(tmp_path: Path) -> None:
    documents = Documents([write(tmp_path / "d", [list(text.encode()) for text in TEXTS])])
    found = text_figures(documents, ByteLevelTokenizer(), 100)
    # Bytes 0 and 1 are special tokens of this tokenizer, so they are no characters of a text.
    assert (found.documents, found.control, found.odd) == (6, 3, 2)
    assert [(odd.position, odd.share) for odd in found.worst] == [(1, 2 / 10), (4, 1 / 5)]
    assert found.characters == sum(len(text.replace("\0", "")) for text in TEXTS)
    assert text_figures(documents, ByteLevelTokenizer(), 2).documents == 2


def test_a_character_that_the_cut_divides_is_no_replacement_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_TEXT_TOKENS", 4)
    documents = Documents([write(tmp_path / "d", [list("aaaéé".encode())])])
    found = text_figures(documents, ByteLevelTokenizer(), 1)
    assert (found.characters, found.control) == (3, 0)


def test_languages_are_told(tmp_path: Path) -> None:
    pytest.importorskip("py3langid", reason="languages need py3langid")
    texts = {
        "de": "Der Hund läuft über die Straße und bellt, weil er eine Katze gesehen hat.",
        "fr": "Le chat est sur la table et il regarde les oiseaux qui chantent au jardin.",
        "en": "The river runs through the valley, and the people who live there are happy.",
        "too short": "3.14 = π",
    }
    classify = language_classifier()
    assert classify is not None
    assert {language: classify(text) for language, text in texts.items()} == {k: k for k in texts}
    many = [list(texts["de"].encode())] * 3 + [list(texts["en"].encode()), []]
    found = text_figures(Documents([write(tmp_path / "d", many)]), ByteLevelTokenizer(), 9)
    assert found.languages == {"de": 3, "en": 1}


def test_without_the_library_languages_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    documents = Documents([write(tmp_path / "d", [[65, 66]])])
    assert text_figures(documents, ByteLevelTokenizer(), 9).languages is None
