"""Tiny tokenizers and texts, made once per process, for tests of the data tools."""

import base64
import dataclasses
import functools
import importlib.util
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ext.text.tokenizers import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
END = "<|endoftext|>"

HARD_TEXTS = [
    "",
    " ",
    "Hello world, it's 2026.",
    "  two  spaces \n\n and\ttabs ",
    f"a {END} inside, <s> and </s> and <unk> too",
    "<0x41> <mask> <pad> <SPECIAL_9>",
    "caf\u00e9 na\u00efve \u4e2d\u6587\u3002 \U0001f600 \u0645\u0631\u062d\u0628\u0627",
    "\u2581 x\u00a0y z\u200bw \x00",
]


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tiny_tokenizers_"))


@functools.cache
def sentences() -> list[str]:
    """Return sentences of pseudo-words, enough to train a few hundred merges."""
    dice = random.Random(5)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ["".join(dice.choices(syllables, k=dice.randint(1, 3))) for _ in range(400)]
    drawn = (dice.choices(words, k=dice.randint(3, 14)) for _ in range(2000))
    return [" ".join(some).capitalize() + "." for some in drawn]


@functools.cache
def sentencepiece_model() -> Path:
    import sentencepiece

    prefix = _folder() / "sp"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_prefix=str(prefix), vocab_size=500,
        model_type="bpe", byte_fallback=True, user_defined_symbols=["<user>"], minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@functools.cache
def hf_folder() -> Path:
    """Write a byte-level BPE as `save_pretrained` of transformers' general class does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(sentences(), trainer)
    folder = _folder() / "hf"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": END, "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def gpt2_files() -> tuple[Path, Path]:
    model = json.loads((hf_folder() / "tokenizer.json").read_bytes())["model"]
    vocab, merges = _folder() / "vocab.json", _folder() / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    lines = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *lines]) + "\n", encoding="utf-8")
    return vocab, merges


@functools.cache
def tiktoken_file() -> Path:
    """Write 256 bytes and 44 merges in NVIDIA's JSON form."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes([a, b]) for a in b"abdegi" for b in b"nrstlm "] + [b"the", b" the"]
    texts = enumerate(base64.b64encode(token).decode() for token in tokens)
    entries = [{"rank": i, "token_bytes": text, "token_str": None} for i, text in texts]
    path = _folder() / "tiktoken.json"
    path.write_text(json.dumps(entries))
    return path


def write_jsonl(path: Path, documents: list[dict[str, object]], *, end: str = "\n") -> Path:
    """Write one document per line; `end` closes the last one."""
    path.write_text("\n".join(map(json.dumps, documents)) + end, encoding="utf-8")
    return path


def corpus(count: int, *, seed: int = 0) -> list[dict[str, object]]:
    """Return documents with `text` and `title`, some empty, some with control tokens."""
    dice = random.Random(seed)
    documents: list[dict[str, object]] = []
    for i in range(count):
        text = " ".join(dice.choices(sentences(), k=dice.randint(1, 8)))
        if i % 11 == 3:
            text = ""
        if i % 13 == 5:
            text += dice.choice(HARD_TEXTS)
        documents.append({"id": i, "title": dice.choice(sentences()), "text": text})
    return documents


Split = Callable[[str], list[str]]


def cores_tokenizer(flags: TokenizerConfig) -> Any:
    """Return the tokenizer that megatron-core builds from the flags."""
    homes = "megatron.core.tokenizers.text.utils", "megatron.core.tokenizers.utils"
    from megatron.core.tokenizers.text.libraries import NullTokenizer

    from megatron_ext.core import takes  # imports torch

    home = next(name for name in homes if _is_there(name))
    build = importlib.import_module(f"{home}.build_tokenizer").build_tokenizer
    named = dataclasses.asdict(flags)
    if takes(NullTokenizer, "eod_id") and flags.tokenizer_type == "NullTokenizer":
        named["vocab_size"] += 1  # newer releases count the end of a document in
    # Newer releases read some flags by another name, or its opposite.
    newer = {
        "special_tokens": flags.tokenizer_special_tokens,
        "metadata_path": flags.tokenizer_metadata,
        "tokenizer_hf_no_use_fast": False,
        "tokenizer_hf_no_include_special_tokens": not flags.tokenizer_hf_include_special_tokens,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
        "chat_template": None,
        "pad_vocab_size": False,
    }
    return build(SimpleNamespace(**{"tokenizer_hf_use_fast": True, **newer, **named}))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"{module}.build_tokenizer") is not None
    except ModuleNotFoundError:
        return False


def write_expected(
    prefix: Path,
    values: Sequence[str | list[str]],
    flags: TokenizerConfig,
    *,
    append_eod: bool,
    split: Split | None = None,
) -> tuple[bytes, bytes]:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = cores_tokenizer(flags)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for value in values:
        sequences = value if isinstance(value, list) else [value]
        if split is not None:
            sequences = [sentence for text in sequences for sentence in split(text)]
        ids = [tokenizer.tokenize(text) for text in sequences]
        ids = [piece for piece in ids if piece]
        if ids and append_eod:
            ids[-1] = [*ids[-1], tokenizer.eod]
        builder.add_document([i for piece in ids for i in piece], [len(piece) for piece in ids])
    builder.finalize(f"{prefix}.idx")
    return read_pair(prefix)


def read_pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
