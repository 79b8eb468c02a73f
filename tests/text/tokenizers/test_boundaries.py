"""Long texts: the ids of their parts, one after another, are those of the whole."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megatron_ext.text.tokenizers import TokenizerConfig, boundaries, build_tokenizer
from megatron_ext.text.tokenizers import base as interface
from megatron_ext.text.tokenizers.boundaries import (
    boundary_of_backend,
    boundary_of_pattern,
    parts,
)
from megatron_ext.text.tokenizers.huggingface import HuggingFaceTokenizer
from tests.text import tiny

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [
    *"a b a b c d Word text it's we'LL I'M \u017f don 12 1234 ! ... -- (f)".split(),
    *"\u3002 \u4e2d\u6587 \u0301 e\u0301 \uac00 \u11a8 \u3042 \u30d0 \u0416".split(),
    *"\U0001f600 <|im_end|> <|endoftext|>".split(),
    *("<s>", "<pad>", "<user>", *[" "] * 8, "  ", "\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000"),
    *("\u2581", "\x00"),
]


def _bpe(splitter: Any, normalizer: Any = None) -> interface.Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_text(seed, 400) for seed in range(900, 930)], trainer)
    return HuggingFaceTokenizer("HuggingFaceTokenizer", "made", backend, {})


def _split(*patterns: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(x), "isolated", False) for x in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


def _text(seed: int, length: int) -> str:
    dice = random.Random(seed)
    return "".join(dice.choices(PIECES, k=length))


def _flags(kind: str, model: Path, **more: Any) -> interface.Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model), **more))


def _tiktoken(pattern: str) -> interface.Tokenizer:
    sizes = {"vocab_size": 320, "tiktoken_num_special_tokens": 20}
    return _flags("TikTokenizer", tiny.tiktoken_file(), tiktoken_pattern=pattern, **sizes)


MADE: dict[str, Callable[[], interface.Tokenizer]] = {
    "gpt2": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: _bpe(_split(LLAMA3)),
    "qwen": lambda: _bpe(_split(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
    "deepseek": lambda: _bpe(_split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK)),
    "o200k": lambda: _bpe(_split(O200K)),
    "sentencepiece": lambda: _flags("SentencePieceTokenizer", tiny.sentencepiece_model()),
    "tiktoken v1": lambda: _tiktoken("v1"),
    "tiktoken v2": lambda: _tiktoken("v2"),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_ids_of_the_parts_are_those_of_the_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundaries, "PART_CHARACTERS", 3)
    tokenizer = MADE[kind]()
    assert tokenizer.boundary is not None
    cuts = 0
    for seed in range(40):
        text = _text(seed, 300)
        cut = list(parts(text, tokenizer.boundary))
        joined = [number for part in cut for number in tokenizer.tokenize(part)]
        assert joined == tokenizer.tokenize(text), cut
        cuts += len(cut) - 1
    assert cuts > 100


def test_ids_in_words_are_cut_at_single_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "PART_CHARACTERS", 3)
    tokenizer = interface.NullTokenizer(100)
    text = "12 3 45 6 7 89 10"
    cut = list(parts(text, tokenizer.boundary))
    assert cut == ["12 3", "45 6", "7 89", "10"]
    assert [i for part in cut for i in tokenizer.tokenize(part)] == tokenizer.tokenize(text)
    for bad in ("12 3  45", "12 3 45 "):
        with pytest.raises(ValueError, match="single spaces"):
            for part in parts(bad, tokenizer.boundary):
                tokenizer.tokenize(part)


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": GPT2 | {"add_prefix_space": True}},
        {"pre_tokenizer": GPT2 | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": LLAMA3},
                "behavior": "MergedWithNext",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": LLAMA3 + r"|\p{L}+ \p{L}+"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\p{N}{1,3}"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
)
def test_texts_stay_whole_where_the_ids_might_change(change: dict[str, Any]) -> None:
    sound = {"normalizer": None, "model": {"type": "BPE"}, "pre_tokenizer": GPT2}
    assert boundary_of_backend(sound, ()) is not None
    assert boundary_of_backend(sound | change, ()) is None


def test_patterns_are_known_by_all_of_their_alternatives() -> None:
    assert boundary_of_pattern(LLAMA3, ()) is not None
    assert boundary_of_pattern(r"\S+|\s+", ()) is None
    assert boundary_of_pattern(O200K, ()) is not None
    first = O200K.split("|[^")[0]
    assert boundary_of_pattern(first + r"|\s+", ()) is None, "capitals alone would match nothing"


def test_a_unigram_model_of_sentencepiece_stays_whole(tmp_path: Path) -> None:
    """Unigram keeps a text whole: its scores are sums over all of it."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.sentences()), model_prefix=str(tmp_path / "sp"),
        vocab_size=200, model_type="unigram", minloglevel=2,
    )  # fmt: skip
    assert _flags("SentencePieceTokenizer", tmp_path / "sp.model").boundary is None


def test_a_tokenizer_that_adds_tokens_to_a_text_keeps_it_whole() -> None:
    folder = tiny.hf_folder()
    assert _flags("HuggingFaceTokenizer", folder).boundary is not None
    including = _flags("HuggingFaceTokenizer", folder, tokenizer_hf_include_special_tokens=True)
    assert including.boundary is None
    content = json.loads((folder / "tokenizer.json").read_bytes())
    assert boundary_of_backend(content, ()) is not None
