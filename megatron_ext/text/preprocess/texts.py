"""Encodes texts by a tokenizer, or by gigatoken if both give the same ids on samples of them."""

from collections.abc import Sequence
from typing import Any

from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.errors import ConfigError
from megatron_ext.text.data.separators import appended_warnings
from megatron_ext.text.preprocess.encode import (
    BadLine,
    TextEncoder,
    choose_engine,
    parse_line,
    read_long,
    sentence_splitter,
)
from megatron_ext.text.preprocess.inputs import Part, blocks
from megatron_ext.text.preprocess.jobs import Say
from megatron_ext.text.preprocess.long_lines import LongLine, Unusual, head_of
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.tokenizers import build_tokenizer
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer
from megatron_ext.text.tokenizers.fast import FastEncoder

_SAMPLE_PLACES = 24
_SAMPLE_BYTES = 8192


class TextEncoding:
    """The `Encoding` of plain texts: one document of token ids for each JSON key of a line.

    Raise a ConfigError if documents should end with a token that the tokenizer lacks.
    """

    def __init__(self, options: PreprocessOptions) -> None:
        tokenizer = build_tokenizer(options.tokenizer)
        self._options = options
        self._tokenizer = tokenizer
        self._eod = _end_of_document(options, tokenizer)
        self._fast: FastEncoder | None = None
        self.dtypes = [optimal_dtype(tokenizer.vocab_size)] * len(options.json_keys)
        self.identity: dict[str, Any] = {
            "keys": list(options.json_keys),
            "append_eod": options.append_eod,
            "streams": options.streams,
            "split": [options.split_sentences, options.keep_newlines, options.lang],
            "tokenizer": dict(tokenizer.unique_identifiers),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod if self._eod is None else self._eod,
        }

    def choose_engine(self, parts: Sequence[Part], say: Say) -> bool:
        """Return whether the encoder should use gigatoken, a faster library than the tokenizer's.

        It should if gigatoken gives the same ids on texts from all over the input. ``say`` gets a
        sentence on the choice, those of `Tokenizer.notes`, and warnings if a training run might
        misread the end-of-document token.
        """
        samples = _samples(parts, self._options.json_keys)
        self._fast, line = choose_engine(self._tokenizer, samples, self._options.engine)
        say(line)
        for sentence in self._tokenizer.notes():
            say(sentence)
        if self._eod is not None:
            for sentence in appended_warnings(self._tokenizer, self._eod):
                say(sentence)
        return self._fast is not None

    def encoder(self, *, fast: bool) -> TextEncoder:
        options = self._options
        splitter = None
        if options.split_sentences:
            splitter = sentence_splitter(options.lang, keep_newlines=options.keep_newlines)
        if fast and self._fast is None:
            self._fast = FastEncoder(self._tokenizer)
        return TextEncoder(
            self._tokenizer,
            self._fast if fast else None,
            options.json_keys,
            options.streams,
            splitter,
            self._eod,
        )


def _end_of_document(options: PreprocessOptions, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends documents; None without ``--append-eod``."""
    if not options.append_eod:
        return None
    if options.eod_token is None:
        if tokenizer.eod == NO_TOKEN:
            raise ConfigError(
                f"`--append-eod` needs an end-of-document token, but {tokenizer.kind} "
                f"({tokenizer.path}) names none; give its text with `--eod-token`, set eos_token "
                "in the tokenizer, or leave the flag out."
            )
        return tokenizer.eod
    number = tokenizer.token_id(options.eod_token)
    if number == NO_TOKEN:
        raise ConfigError(
            f"`--eod-token` ({options.eod_token}) is no token of {tokenizer.kind} "
            f"({tokenizer.path}); give the text of one, or leave the flag out for the tokenizer's "
            "own."
        )
    return number


def _samples(parts: Sequence[Part], keys: Sequence[str]) -> list[str]:
    """Return texts from all over the input, to compare the ids of gigatoken with the tokenizer's.

    Bad lines are skipped, since the run reports them later.
    """
    chosen = [parts[i * len(parts) // _SAMPLE_PLACES] for i in range(_SAMPLE_PLACES) if parts]
    lines = [line for i, part in enumerate(chosen) for line in _lines_at(part, i)]
    texts: list[str] = []
    if not lines and parts:  # All documents are longer than a sample; take the first one.
        block, _ = next(blocks(parts[0]), (b"", 0))
        if isinstance(block, LongLine):
            try:
                _, _, long_texts = read_long(block, keys)
                pieces = (next(iter(x), "") for of_key in long_texts for x in of_key)
                return [piece[:_SAMPLE_BYTES] for piece in pieces]
            except (BadLine, Unusual):
                block = block.read()
        lines = block.split(b"\n")[:1]
    for line in lines:
        try:
            # Comparing a long text would take too much memory.
            texts.extend(text[:_SAMPLE_BYTES] for key in parse_line(line, keys) for text in key)
        except BadLine:
            continue
    return texts


def _lines_at(part: Part, place: int) -> list[bytes]:
    """Return a few whole lines of a part, from the offset that ``place`` chooses.

    ``place`` is an integer that stands for one of `_SAMPLE_PLACES` evenly spaced offsets in the
    part. If the part is not plain text, return its first lines.
    """
    if part.packing != "plain":
        block, _ = next(blocks(part), (b"", 0))
        return head_of(block)[:_SAMPLE_BYTES].split(b"\n")[:-1]
    within = part.num_bytes * (place * 37 % _SAMPLE_PLACES) // _SAMPLE_PLACES
    with open(part.path, "rb") as stream:
        stream.seek(part.start + within)
        return stream.read(_SAMPLE_BYTES).split(b"\n")[1 if within else 0 : -1]
