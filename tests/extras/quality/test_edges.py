"""The figures of datasets at their limits, and how lines and page show them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.quality import duplicates as duplicates_module
from megatron_ext.extras.quality import figures, spans
from megatron_ext.extras.quality.documents import Documents, _cuts
from megatron_ext.extras.quality.duplicates import bands_for, jaccard, near_leaders
from megatron_ext.extras.quality.figures import (
    UNCLEAR,
    Frequency,
    Texts,
    TokenCounts,
    Tokens,
    length_bins,
    text_figures,
    token_figures,
)
from megatron_ext.extras.quality.measure import (
    Duplicates,
    Excerpt,
    Place,
    Quality,
    QualityOptions,
    measure,
)
from megatron_ext.extras.quality.page import (
    _language_bars,
    _odd,
    _sentences,
    _short,
    _tiles,
    _token_bars,
    quality_page,
)
from megatron_ext.extras.quality.results import _batches, lines, percent, write_json
from megatron_ext.extras.quality.spans import RepeatedSpans, repeated_spans, suffix_library
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.extras.quality.made import write


def made_quality(**changes: Any) -> Quality:
    """Return figures, each of which is another number."""

    def group(count: int, text: str) -> Excerpt:
        return Excerpt(30, count, [Place("d/a", 7), Place("d/b", 3, 9)], text)

    exact = Duplicates(3, 20, 1000, [group(n, f"g{n}") for n in (6, 5, 4, 2)], np.arange(2))
    near = Duplicates(5, 50, 3000, [], np.arange(2))
    special = [Frequency(1, 40, 0.004, "<s>"), Frequency(2, 10, 0.001, "</s>")]
    head = [Frequency(9, 500, 0.05, "a"), Frequency(8, 250, 0.025)]
    languages = {f"l{i:02}": 40 - i for i in range(22)}
    odd = [Excerpt(5, 1, [Place("d/a", i)], f"o{i}", 0.25) for i in range(4)]
    given = {
        "datasets": ["d/a", "d/b"], "available": 200, "documents": 200, "tokens": 10_000,
        "empty": 2, "lengths": {"median": 1536.5}, "length_bins": [(1, 1, 3), (2, 3, 4)],
        "token_figures": Tokens(77, 99, 4, head, special), "exact": exact, "near": near,
        "near_threshold": 0.8, "span_sample": RepeatedSpans(10, 400, 100),
        "spans": [Excerpt(60, 12, [Place("d/b", 1, 5)], "span")],
        "texts": Texts(50, 1000, 30, 6, [], languages), "odd": odd, "notes": ["a note"],
    }  # fmt: skip
    return Quality(**{**given, **changes})


def test_lines_show_each_figure_over_what_it_is_a_part_of() -> None:
    told = lines(made_quality())
    for line in (
        "quality    200 documents with 10,000 tokens in 2 datasets; 2 are empty",
        "lengths    median 1,536.5",
        "exact      3 groups; 20 documents (10%) with 1,000 tokens (10%) could go",
        "near       5 groups; 50 documents (25%) with 3,000 tokens (30%) could go, exact ones "
        "included (Jaccard similarity 0.8)",
        "tokens     77 of 99 ids occur; the most frequent: 'a' 5%, 8 2.5%",
        "special    0.5% of tokens: '<s>' 40, '</s>' 10",
        "characters 3% are control or replacement characters; 6 of 50 documents have 1 in 100 or "
        "more",
        "  a:0 (25%): 'o0'",
        "  a:2 (25%): 'o2'",
        "repeated   25% of tokens lie in spans of 50 or more that occur elsewhere too; the "
        "longest:",
        "  60 tokens, 12 times: b:1+5 and 11 more",
        "    'span'",
        "  6 documents: a:7 b:3+9 and 4 more",
        "  2 documents: a:7 b:3+9",
        "note       a note",
    ):
        assert (line in told) is (line != "  2 documents: a:7 b:3+9"), line
    assert "  a:3 (25%): 'o3'" not in told
    (languages,) = [line for line in told if line.startswith("languages")]
    total = sum(40 - i for i in range(22))
    assert languages.startswith(f"languages  l00 {percent(40, total)}, l01 ")
    assert languages.count(",") == 11
    assert not [x for x in lines(made_quality(spans=[])) if "the longest" in x]
    assert percent(1, 8) == "12.5%" and percent(1, 0) == "–"


def test_the_page_shows_the_same_figures() -> None:
    quality = made_quality()
    assert _tiles(quality) == [
        ("documents", "200"), ("tokens", "10,000"), ("median length", "1,536.5"),
        ("empty documents", "2"), ("exact copies", "10%"), ("exact and near", "25%"),
        ("special tokens", "0.5%"), ("in repeated spans", "25%"),
    ]  # fmt: skip
    sentences = _sentences(quality)
    assert sentences[1].startswith("Exact and near duplicates: 5 groups")
    assert "77 of the tokenizer's 99 ids occur." in sentences
    assert "⚠ 4 tokens have ids that the tokenizer lacks." in sentences
    assert sentences[-1].startswith("6 of 50 decoded documents have at least")
    plain = made_quality(
        near=None, texts=None, span_sample=None, token_figures=Tokens(7, None, 4, [], None)
    )
    assert _sentences(plain)[1].startswith("Exact duplicates: 3 groups")
    assert _sentences(plain)[-1] == "⚠ 4 tokens have ids that are too large to count."
    assert [name for name, _ in _tiles(plain)][4:] == ["exact copies"]
    bars = _language_bars(quality)
    assert bars[0][:3] == ("l00", "40", 100.0) and bars[1][2] == pytest.approx(97.5)
    assert len(bars) == 21 and bars[-1][:2] == ("others", "39")
    assert _token_bars(quality, special=False) == [
        ("9  'a'", "500", 100.0, "5%"), ("8", "250", 50.0, "2.5%"),
    ]  # fmt: skip
    assert [bar[1:] for bar in _token_bars(quality, special=True)] == [
        ("40", 100.0, "0.4%"), ("10", 25.0, "0.1%"),
    ]  # fmt: skip
    assert _odd(quality).rows[0] == ("25%", "5", "o0", "a:0")
    groups = replace(quality.near, largest=[Excerpt(44, 9, [Place("d/a", 5)], "near text")])
    text = quality_page(made_quality(near=groups), now=1e9)
    exact, near = text.partition("<h2>Exact and near duplicates</h2>")[::2]
    near = near.partition("</section>")[0]
    assert "3 groups; 20 documents (10%) with 1,000 tokens" in exact and "g6" in exact
    assert "5 groups; 50 documents (25%) with 3,000 tokens" in near and "near text" in near
    assert "near text" not in exact and "g6" not in near and "of 0.8 or more" in near
    assert "1: 3 documents; 2–3: 4 documents" in quality_page(quality, now=1e9)
    assert [_short(x) for x in (512, 1 << 10, 1 << 12, 1 << 20, 1 << 30)] == [
        "512", "1k", "4k", "1M", "1G",
    ]  # fmt: skip
    for count, title in ((3, "d0, d1, d2"), (4, "d0, d1, d2 and 1 more")):
        page = quality_page(made_quality(datasets=[f"x/d{i}" for i in range(count)]), now=1e9)
        assert f"<h1>{title}</h1>" in page or f"<title>{title}" in page or f">{title}<" in page


def test_json_has_no_list_of_all_documents(tmp_path: Path) -> None:
    write_json(made_quality(), tmp_path / "q.json")
    told = json.loads((tmp_path / "q.json").read_text())
    for name in ("exact", "near"):
        assert "leaders" not in told[name]
    assert "longest" not in told["span_sample"] and "worst" not in told["texts"]
    assert [path.name for path in tmp_path.iterdir()] == ["q.json"]


def test_rows_of_duplicates_stay_in_groups_over_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ext.extras.quality.results._ROWS", 2)
    documents = Documents([write(tmp_path / "d", [[i] for i in range(7)])])
    near = Duplicates(0, 0, 0, [], np.array([0, 1, 0, 1, 4, 1, 0]))
    exact = Duplicates(0, 0, 0, [], np.array([0, 1, 2, 1, 4, 5, 2]))
    batches = [list(rows) for rows in _batches(near, exact, documents)]
    assert [len(rows) for rows in batches] == [2, 2, 2]
    found = [(row["group"], row["document"], row["kind"]) for rows in batches for row in rows]
    assert found == [
        (0, 0, "first"), (0, 2, "near"), (0, 6, "exact"),
        (1, 1, "first"), (1, 3, "exact"), (1, 5, "near"),
    ]  # fmt: skip


def test_bands_are_many_where_the_threshold_is_low() -> None:
    assert bands_for(1.0) == (1, 128)
    bands, rows = bands_for(0.5)
    assert bands > rows and bands_for(0.9)[1] > rows
    assert jaccard(np.array([1, 2, 3, 4]), np.array([3, 4, 5])) == 2 / 5


def test_a_pair_exactly_at_the_threshold_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    monkeypatch.setattr(duplicates_module, "bands_for", lambda threshold: (128, 1))
    # Of eight runs of five tokens, four are common: a similarity of 4 / 12.
    one = list(range(12))
    other = [*range(8), 90, 91, 92, 93]
    documents = Documents([write(tmp_path / "d", [one, other])])
    for threshold, leaders in ((4 / 12, [0, 0]), (4.01 / 12, [0, 1])):
        found = near_leaders(documents, np.arange(2), threshold, seed=0)
        assert found.tolist() == leaders


def test_copies_of_a_near_duplicate_join_its_group(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    text = list(range(100, 200))
    near = [*text[:98], 1, 2]
    five = [5, 6, 7, 8, 9]
    texts = [text, near, near, five, [*five], [], []]
    options = QualityOptions(near_duplicates=1.0)
    exact = measure([write(tmp_path / "d", texts)], None, options)[0]
    assert exact.near is not None
    assert exact.near.leaders.tolist() == exact.exact.leaders.tolist() == [0, 1, 1, 3, 3, 5, 6]
    found = measure([str(tmp_path / "d")], None, QualityOptions(near_duplicates=0.8))[0]
    assert found.near is not None
    assert found.near.leaders.tolist() == [0, 0, 0, 3, 3, 5, 6]
    assert (found.near.groups, found.near.documents, found.exact.groups) == (2, 3, 2)
    assert QualityOptions(near_duplicates=0.3)
    for wrong in (0.29, 1.01):
        with pytest.raises(ConfigError, match="must be a Jaccard similarity from 0.3 to 1"):
            QualityOptions(near_duplicates=wrong)


def test_a_document_of_five_tokens_has_one_shingle(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="near duplicates need rensa")
    texts = [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    documents = Documents([write(tmp_path / "d", texts)])
    assert near_leaders(documents, np.arange(2), 0.3, seed=0).tolist() == [0, 1]
    found = measure([str(tmp_path / "d")], None, QualityOptions(near_duplicates=0.3))[0]
    assert found.documents == 2


def test_blocks_are_filled_exactly_and_samples_are_drawn_apart(tmp_path: Path) -> None:
    lengths = np.array([2, 3, 5, 11, 1, 4])
    assert list(_cuts(lengths, 5)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    documents = Documents([write(tmp_path / "d", [[i] for i in range(40)])], seed=3)
    positions = np.arange(0, 80, 2)
    first, second = (documents.some(positions, 10, purpose) for purpose in ("texts", "spans"))
    for some in (first, second):
        assert sorted(set(some.tolist())) == some.tolist() and len(some) == 10
        assert set(some.tolist()) <= set(positions.tolist())
    assert first.tolist() != second.tolist()
    assert documents.some(positions, 99, "x").tolist() == positions.tolist()
    options = [QualityOptions(sample_documents=5, seed=seed) for seed in (0, 7)]
    places = [
        [found[1].place(i) for i in range(5)]
        for found in (measure([str(tmp_path / "d")], None, each) for each in options)
    ]
    assert places[0] != places[1]


def test_ids_at_the_limit_and_tokens_that_stand_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "MAX_ID", 10)
    counted = TokenCounts()
    for part in ([1, 1, 9], [10, -1], [9]):
        counted.add(np.array(part, dtype=np.int32))
    assert counted.outside == 2 and counted.counts.tolist()[9] == 2
    found = token_figures(counted, None)
    assert [(x.token, x.count, x.share) for x in found.head] == [(1, 2, 2 / 6), (9, 2, 2 / 6)]
    assert [count for *_, count in length_bins(np.array([1, 9, 9]))] == [1, 0, 0, 2]


def test_texts_are_odd_from_one_in_a_hundred_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["\x1b" + "a" * 99, "\x1b" + "a" * 100, "\x1b" * (1 + 1) + "b" * 8]
    texts += [f"\x1b{'c' * (9 + i)}" for i in range(12)]
    documents = Documents([write(tmp_path / "d", [list(text.encode()) for text in texts])])
    found = text_figures(documents, ByteLevelTokenizer(), 99)
    assert found.odd == 14 and len(found.worst) == 10
    assert [(x.position, x.share) for x in found.worst[:3]] == [(2, 0.2), (3, 0.1), (4, 1 / 11)]
    # A sample is drawn, and does not just begin at the first document.
    some = [text_figures(documents, ByteLevelTokenizer(), 1) for _ in range(2)]
    assert some[0] == some[1]
    drawn = documents.some(np.arange(15), 1, "texts").tolist()
    assert some[0].characters == len(texts[drawn[0]])
    monkeypatch.setattr(figures, "_TEXT_TOKENS", 4)
    cut = Documents([write(tmp_path / "c", [list("aé".encode()), list("aaaé".encode())])])
    assert text_figures(cut, ByteLevelTokenizer(), 9).control == 0


def test_a_short_text_has_no_language_and_one_that_may_be_several_is_unclear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("py3langid", reason="languages need py3langid")
    told: dict[str, Any] = {"confidence": 0.7}
    model = SimpleNamespace(classify=lambda text: ("de", told["confidence"]))
    monkeypatch.setattr(figures, "_language_model", lambda: model)
    classify = figures.language_classifier()
    assert classify is not None
    assert classify("1 abcdefghij klmnopqrs") == figures.TOO_SHORT  # 19 letters
    assert classify("1 abcdefghij klmnopqrst") == "de"
    told["confidence"] = 0.69
    assert classify("1 abcdefghij klmnopqrst") == UNCLEAR


def test_notes_say_what_was_looked_at_in_part(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[i, i + 1, i + 2] for i in range(65, 75)])
    whole = measure([prefix], ByteLevelTokenizer(), QualityOptions())[0]
    assert whole.texts is not None
    lacking = [suffix_library() is None, whole.texts.languages is None]
    assert len(whole.notes) == sum(lacking)
    part = measure(
        [prefix], ByteLevelTokenizer(), QualityOptions(sample_documents=6, text_documents=4)
    )[0]
    told = " ".join(part.notes)
    assert "All figures are of 6 of 10 documents" in told
    assert "Characters and languages are of 4 documents (`--text-documents`)." in told
    assert whole.lengths == {"least": 3, "median": 3.0, "mean": 3.0, "99%": 3.0, "largest": 3}
    summary = measure([write(tmp_path / "n", [[1] * n for n in range(1, 102)])], None,
                      QualityOptions())[0].lengths  # fmt: skip
    assert (summary["median"], summary["99%"]) == (51.0, 100.0)


def test_the_largest_groups_come_first(tmp_path: Path) -> None:
    texts = [[1]] * 2 + [[2]] * 4 + [[3]] * 3 + [[4]]
    found = measure([write(tmp_path / "d", texts)], None, QualityOptions())[0]
    assert [x.count for x in found.exact.largest] == [4, 3, 2]
    assert (found.exact.groups, found.exact.documents) == (3, 6)
    many = measure([write(tmp_path / "m", [[1]] * 12)], None, QualityOptions())[0]
    (group,) = many.exact.largest
    assert (group.count, [place.document for place in group.places]) == (12, list(range(10)))
    assert many.places_of(group).endswith(":3 and 8 more")


def test_each_document_of_a_band_is_paired_with_the_first_and_the_one_before() -> None:
    """Documents 1, 2, 4 and 5 of six have one key, 0 and 3 another."""
    keys = np.array([8, 7, 7, 8, 7, 7], dtype=np.uint64)
    coded = duplicates_module._pairs(keys).tolist()
    assert [divmod(pair, 6) for pair in coded] == [(0, 3), (1, 2), (1, 4), (1, 5), (2, 4), (4, 5)]


needs_suffixes = pytest.mark.skipif(suffix_library() is None, reason="needs pydivsufsort")


def spans_of(folder: Path, texts: list[list[int]], max_tokens: int = 10**9) -> RepeatedSpans:
    documents = Documents([write(folder / "d", texts)])
    return repeated_spans(documents, np.arange(len(texts)), documents.lengths(), max_tokens)


@needs_suffixes
def test_spans_at_the_limits_of_length_place_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LONG", 5)
    monkeypatch.setattr(spans, "_SHOWN", 2)
    five = [1, 2, 3, 4, 5]
    texts = [[*five, 60], [70, *five], [8, 9, 80], [81, 8, 9], [10, 11, 82], [83, 10, 11], []]
    found = spans_of(tmp_path, texts)
    assert found.repeated == 10 and found.tokens == 24 and found.documents == 6
    assert found.longest[0].tokens.tolist() == five
    assert [len(span.tokens) for span in found.longest] == [5, 2]
    assert sorted(found.longest[0].places) == [(0, 0), (1, 1)]
    exact = spans_of(tmp_path, [[1, 2], [3, 4], [5, 6]], max_tokens=4)
    assert exact.tokens == 4


@needs_suffixes
def test_ends_of_documents_are_no_repeated_tokens(tmp_path: Path) -> None:
    found = spans_of(tmp_path, [[1, 7], [2, 7], [3, 7]])
    assert found.longest == []  # One token is no span, whatever follows it.
    twice = spans_of(tmp_path, [[5, 6, 7], [9, 5, 6], [5, 6, 8]])
    assert sorted(twice.longest[0].places) == [(0, 0), (1, 1), (2, 0)]


@needs_suffixes
def test_the_flag_bounds_the_sample_of_spans(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[i] * 10 for i in range(20)])
    found = measure([prefix], None, QualityOptions(span_tokens=50))[0]
    assert found.span_sample is not None and found.span_sample.tokens == 50
    assert any("searched in 5 documents with 50 tokens" in note for note in found.notes)
    copies = write(tmp_path / "c", [[1, 2, 3]] * 2)
    whole = measure([copies], None, QualityOptions())[0]
    assert not any("Repeated spans" in note for note in whole.notes)
