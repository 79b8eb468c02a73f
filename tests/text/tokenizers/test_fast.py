"""The fast engine: never other ids than the native tokenizer, and it says why it stands back."""

import random
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers import fast as fast_module
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.text.tokenizers.fast import FastEncoder, InexactEngine, has_combining
from tests.text import tiny

KINDS = ("SentencePieceTokenizer", "HuggingFaceTokenizer")
PIECES = st.sampled_from(
    ["<s>", "</s>", "<unk>", "<user>", "<0x0A>", tiny.END, "<", "|>", "\u2581", " ", "\n", "ba"]
)
TEXT = st.lists(st.one_of(PIECES, st.text(max_size=12)), max_size=8).map("".join)


def native(kind: str) -> Tokenizer:
    paths = {KINDS[0]: tiny.sentencepiece_model, KINDS[1]: tiny.hf_folder}
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(paths[kind]())))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, FastEncoder]:
    tokenizer = native(request.param)
    return tokenizer, FastEncoder(tokenizer)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4))
def test_ids_are_the_native_ones(pair: tuple[Tokenizer, FastEncoder], texts: list[str]) -> None:
    tokenizer, fast = pair
    found = [list(map(int, ids)) for ids in fast.encode_batch(texts)]
    assert found == [tokenizer.tokenize(text) for text in texts]


NORMALIZED_APART = [
    "\x85", "a\x85", "\u2581\u0326", "x\u2581\u0301y", "\uffa9\uffdb", "\u1100\u1161\u11a8",
    "e\u0301\u0323", "\u0e01\u0e33", "\u0915\u094d\u0937", "\U0001f44d\U0001f3fd", "\u3131\u314f",
    "a\u200db", "a\u20dd",
]  # fmt: skip


@pytest.mark.parametrize("text", NORMALIZED_APART)
def test_combining_characters_go_native(pair: tuple[Tokenizer, FastEncoder], text: str) -> None:
    """Some of these come out of gigatoken otherwise, for it normalizes by grapheme cluster."""
    tokenizer, fast = pair
    plain = "plain \u4e2d\u6587 caf\u00e9"
    ids = [list(map(int, i)) for i in fast.encode_batch([plain, text])]
    assert ids == [tokenizer.tokenize(plain), tokenizer.tokenize(text)]
    assert has_combining(text)


def test_common_text_stays_with_the_fast_engine() -> None:
    text = "caf\u00e9 \u201cna\u00efve\u201d \u2014 \u4e2d\u6587 \uac00 \U0001f600 \u200b\u00ad"
    assert not has_combining("ascii") and not has_combining(text)


def test_random_characters_of_all_scripts(pair: tuple[Tokenizer, FastEncoder]) -> None:
    _, fast = pair
    dice = random.Random(11)
    scripts = [(0x20, 0x7F), (0x80, 0x530), (0x590, 0x1200), (0x1E00, 0x2C00), (0x3000, 0x3400)]
    scripts += [(0x4E00, 0x4F00), (0xAC00, 0xD7A4), (0xF900, 0xFFFE), (0x1F300, 0x1FB00)]
    texts = [
        "".join(chr(dice.randrange(*dice.choice(scripts))) for _ in range(dice.randint(1, 12)))
        for _ in range(4000)
    ]
    fast.compare(texts)


def test_control_texts_are_those_of_the_model() -> None:
    assert native(KINDS[0]).control_texts() == ("</s>", "<0x", "<s>", "<unk>", "<user>")
    assert native(KINDS[1]).control_texts() == ("<|endoftext|>", "<|pad|>")


def test_documents_with_control_texts_go_native(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = native(KINDS[0])
    fast = FastEncoder(tokenizer)
    monkeypatch.setattr(fast, "_encode", lambda text: np.asarray([-7]))
    ids = fast.encode_batch(["plain", "with </s> inside"])
    assert list(ids[0]) == [-7]
    assert list(ids[1]) == tokenizer.tokenize("with </s> inside")


def test_differences_and_missing_engines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, source: str) -> object:
        return lambda text: [1, 2, 3]

    monkeypatch.setattr(fast_module, "_load", load)
    with pytest.raises(InexactEngine, match="gigatoken gives other ids for a text that starts"):
        FastEncoder(native(KINDS[1]))
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    with pytest.raises(InexactEngine, match="NullTokenizer has no faster engine"):
        FastEncoder(tokenizer)


def test_a_model_that_gigatoken_cannot_load_is_left_to_its_library() -> None:
    class Unigram(type(native(KINDS[0]))):  # type: ignore[misc]
        def fast_source(self) -> tuple[str, str]:
            return "json", '{"model": {"type": "Unigram", "vocab": []}}'

        def control_texts(self) -> Sequence[str]:
            return ()

    tokenizer = Unigram("SentencePieceTokenizer", str(tiny.sentencepiece_model()))
    with pytest.raises(InexactEngine, match="gigatoken cannot load this tokenizer"):
        FastEncoder(tokenizer)


class Spelled(type(native(KINDS[1]))):  # type: ignore[misc]
    """A tokenizer whose control tokens have no letter in common."""

    def __init__(self) -> None:
        vars(self).update(vars(native(KINDS[1])))

    def control_texts(self) -> Sequence[str]:
        return ("[END]", "<pad>", tiny.END)


def test_control_texts_need_no_letter_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = FastEncoder(Spelled())
    monkeypatch.setattr(fast, "_encode", lambda text: np.asarray([-7]))
    ids = fast.encode_batch(["plain", "an [END] of it", "a <pad>", "END pad"])
    assert [list(each) == [-7] for each in ids] == [True, False, False, True]


def test_ids_are_compared_one_by_one() -> None:
    tokenizer = native(KINDS[1])
    fast = FastEncoder(tokenizer)
    ids = tokenizer.tokenize("ba be")
    fast.compare_ids("ba be", np.asarray(ids, np.uint16))
    for other in ([*ids[:-1], ids[-1] + 1], [*ids, 1], ids[1:], ids[::-1]):
        with pytest.raises(InexactEngine, match="gives other ids for a text that starts 'ba be'"):
            fast.compare_ids("ba be", other)


def test_every_mark_joiner_and_skin_tone_may_combine() -> None:
    marks = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code))[0] == "M"]
    tones = [chr(code) for code in range(0x1F3FB, 0x1F400)]
    assert {unicodedata.category(mark) for mark in marks} == {"Mn", "Mc", "Me"}
    assert [x for x in (*marks, "\u200c", "\u200d", *tones) if not has_combining(x)] == []
    assert not any(map(has_combining, ("\u200b", "\U0001f3fa", "\U0001f400", "\u6f22")))
