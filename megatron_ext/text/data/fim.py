"""Fill-in-the-middle: documents whose middle comes last (Bavarian et al. 2022, arXiv:2207.14255).

A document is cut at two random characters into a prefix, a middle and a suffix, each is tokenized
by itself, and they are put in one of two orders (section 3 of the paper):

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle      (its variant 2)

Choices, tokens and rates are those of Megatron-LM's GPTFIMDataset: a sample is cut at its ends of
documents, each part is permuted at a rate, and the sample keeps its length, so that one that has
become longer loses its end, and one that has become shorter is filled up. Two things differ. The
random numbers follow from the seed, the sample's number and the place of the document in it, so
that they do not depend on who reads the sample. And no end of document is lost where a document is
empty, nor gets an empty one sentinels.
"""

from dataclasses import dataclass

import numpy as np

from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import key_of
from megatron_ext.errors import ConfigError
from megatron_ext.text.data.config import FimConfig
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer


@dataclass(frozen=True)
class _Ids:
    """The ids of the tokens that fill-in-the-middle uses; ``split`` is -1 without a split token."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int


class _Draws:
    """Random numbers of a part of a sample; raw PCG64 bits are the same in all numpy versions."""

    def __init__(self, key: int, sample: int, part: int) -> None:
        self._bits = np.random.PCG64([key, sample, part])

    def uniform(self) -> float:
        """Return a number from 0 to below 1."""
        return float(int(self._bits.random_raw()) >> 11) / float(1 << 53)

    def boundary(self, length: int) -> int:
        """Return a place from 0 to ``length`` in a text."""
        return int(self._bits.random_raw()) % (length + 1)


class FillInTheMiddle:
    """Permutes the documents of samples as the flags ``--fim-*`` ask.

    Args:
        seed: seed of the run.
        split: name of the split of the data, whose samples have their own random numbers.

    Raises:
        ConfigError: the tokenizer lacks one of the tokens.
    """

    def __init__(self, fim: FimConfig, tokenizer: Tokenizer, seed: int, split: str) -> None:
        self._fim = fim
        self._tokenizer = tokenizer
        self._key = key_of("fim", seed, split)
        self._ids = _ids_of(fim, tokenizer)

    def permute_rows(
        self, tokens: Array, labels: Array, sample_ids: Array | None, first: int
    ) -> None:
        """Permute the documents of samples in place.

        Args:
            tokens, labels: ``[b, s]``; -1 where a sample has no token or no label.
            sample_ids: number of the packed document at each position, ``[b, s]``; None where
                samples are windows of the text. Padding gets -1.
            first: number of the first sample.
        """
        length = tokens.shape[1]
        for row in range(len(tokens)):
            count = int((tokens[row] >= 0).sum())
            text = np.append(tokens[row, :count], labels[row, count - 1 : count])
            text = text[: count + int(text[-1] >= 0)]
            starts = [0]
            if sample_ids is not None:
                starts += (np.flatnonzero(np.diff(sample_ids[row])) + 1).tolist()
            parts = self._permuted_parts(text, starts, first + row)
            joined = np.concatenate([part for part, _ in parts])[: length + 1]
            kept = min(len(joined), length)
            tokens[row, :kept] = joined[:kept]
            tokens[row, kept:] = self._ids.pad
            labels[row] = -1
            labels[row, : len(joined) - 1] = joined[1:]
            if sample_ids is not None:
                documents = [np.full(len(part), document) for part, document in parts]
                sample_ids[row, :kept] = np.concatenate(documents)[:kept]
                sample_ids[row, kept:] = -1

    def _permuted_parts(
        self, text: Array, starts: list[int], sample: int
    ) -> list[tuple[Array, int]]:
        """Return the parts of a sample in order, each with the number of its packed document.

        Ends of documents are parts too.
        """
        parts: list[tuple[Array, int]] = []
        ends = [*starts[1:], len(text)]
        for document, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for part in _cut_at(text[start:end], self._ids.eod):
                if part[0] != self._ids.eod:
                    part = self._permuted(part, _Draws(self._key, sample, len(parts)))
                parts.append((part, document))
        return parts

    def _permuted(self, part: Array, draws: _Draws) -> Array:
        """Permute a document, or its fragments if it has any."""
        split = self._ids.split
        if split == NO_TOKEN or not (part == split).any():
            return self._moved(part, self._fim.fim_rate, draws)
        if draws.uniform() >= self._fim.fim_rate:
            return part
        rate = self._fim.fim_fragment_rate or 0.0
        fragments = [
            each if each[0] == split else self._moved(each, rate, draws)
            for each in _cut_at(part, split)
        ]
        return np.concatenate(fragments)

    def _moved(self, ids: Array, rate: float, draws: _Draws) -> Array:
        """Return ids with their middle at the end, at a rate; else return them as they are."""
        if draws.uniform() >= rate:
            return ids
        text = self._tokenizer.detokenize(ids.tolist())
        if self._fim.fim_no_prefix is not None and text.startswith(self._fim.fim_no_prefix):
            return ids
        a, b = sorted((draws.boundary(len(text)), draws.boundary(len(text))))
        prefix, middle, suffix = (
            self._tokenizer.tokenize(each) for each in (text[:a], text[a:b], text[b:])
        )
        own = self._ids
        if draws.uniform() < self._fim.fim_spm_rate:
            moved = [own.prefix, own.suffix, *suffix, own.middle, *prefix, *middle]
        else:
            moved = [own.prefix, *prefix, own.suffix, *suffix, own.middle, *middle]
        return np.array(moved, dtype=np.int64)


def _cut_at(ids: Array, mark: int) -> list[Array]:
    """Return the parts of ids between marks, and each mark by itself; no part is empty."""
    marks = np.flatnonzero(ids == mark)
    edges = np.union1d(marks, marks + 1)
    return [part for part in np.split(ids, edges) if len(part)]


def _ids_of(fim: FimConfig, tokenizer: Tokenizer) -> _Ids:
    """Return the ids of the flags' tokens; raise a ConfigError for those not in the vocabulary."""
    spelled = {
        "prefix_token": fim.fim_prefix_token,
        "middle_token": fim.fim_middle_token,
        "suffix_token": fim.fim_suffix_token,
        "pad_token": fim.fim_pad_token,
        "eod_token": fim.fim_eod_token,
        "split_sample": fim.fim_split_sample,
    }
    ids = {name: tokenizer.token_id(text) for name, text in spelled.items() if text is not None}
    errors = [
        f"`--fim-{name.replace('_', '-')}` ({spelled[name]}) is no token of the vocabulary of "
        f"`--tokenizer-type {tokenizer.kind}`; name one that is, or add it with "
        "`--tokenizer-special-tokens`."
        for name, value in ids.items()
        if value == NO_TOKEN
    ]
    if errors:
        raise ConfigError(errors)
    return _Ids(
        prefix=ids["prefix_token"],
        middle=ids["middle_token"],
        suffix=ids["suffix_token"],
        pad=ids["pad_token"],
        eod=ids.get("eod_token", tokenizer.eod),
        split=ids.get("split_sample", NO_TOKEN),
    )
