"""The fast engine: never other ids than the native tokenizer, and it says why it stands back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.preprocess.tokenizer_flags import TokenizerFlags
from megatron_ext.data.tokenizers import Tokenizer, build_tokenizer
from megatron_ext.data.tokenizers import fast as fast_module
from megatron_ext.data.tokenizers.fast import FastEncoder, InexactEngine
from tests.data import tiny

KINDS = ("SentencePieceTokenizer", "HuggingFaceTokenizer")
PIECES = st.sampled_from(
    ["<s>", "</s>", "<unk>", "<user>", "<0x0A>", tiny.END, "<", "|>", "\u2581", " ", "\n", "ba"]
)
TEXT = st.lists(st.one_of(PIECES, st.text(max_size=12)), max_size=8).map("".join)


def native(kind: str) -> Tokenizer:
    paths = {KINDS[0]: tiny.sentencepiece_model, KINDS[1]: tiny.hf_folder}
    return build_tokenizer(TokenizerFlags(tokenizer_type=kind, tokenizer_model=str(paths[kind]())))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, FastEncoder]:
    tokenizer = native(request.param)
    return tokenizer, FastEncoder(tokenizer)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4))
def test_ids_are_the_native_ones(pair: tuple[Tokenizer, FastEncoder], texts: list[str]) -> None:
    tokenizer, fast = pair
    assert [list(map(int, ids)) for ids in fast.encode_batch(texts)] == [
        tokenizer.tokenize(text) for text in texts
    ]


def test_control_texts_are_those_of_the_model() -> None:
    assert native(KINDS[0]).control_texts() == ("</s>", "<0x", "<s>", "<unk>", "<user>")
    assert native(KINDS[1]).control_texts() == ("<|endoftext|>", "<|pad|>")


def test_documents_with_control_texts_go_to_the_native_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = native(KINDS[0])
    fast = FastEncoder(tokenizer)
    monkeypatch.setattr(fast, "_encode", lambda text: np.asarray([-7]))
    ids = fast.encode_batch(["plain", "with </s> inside"])
    assert list(ids[0]) == [-7]
    assert list(ids[1]) == tokenizer.tokenize("with </s> inside")


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, source: str) -> object:
        return lambda text: [1, 2, 3]

    monkeypatch.setattr(fast_module, "_load", load)
    with pytest.raises(InexactEngine, match="gigatoken gives other ids for a text that starts"):
        FastEncoder(native(KINDS[1]))


def test_tokenizers_without_a_faster_engine_say_so() -> None:
    tokenizer = build_tokenizer(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=9))
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
