"""Fill-in-the-middle: moves the middle of documents to their end (arXiv:2207.14255).

A document is cut at two random characters into a prefix, a middle and a suffix. Each of the three
is tokenized by itself. To permute the document is to put them in one of two orders (section 3 of
the paper):

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle      (variant 2 of the paper)

As in Megatron-LM's GPTFIMDataset, a sample is cut at the ends of documents, and each part is
permuted with a given probability. The sample keeps its length: its end is cut off if it has become
longer, and padded if shorter. Two things differ from GPTFIMDataset. The random numbers depend only
on the seed, the number of the sample and the position of the document in the sample, not on the
process that reads the sample. And an empty document gets no sentinels; only its end-of-document
token remains.
"""

from dataclasses import dataclass

import numpy as np

from megatron_ext.data.indexed import Array
from megatron_ext.data.permutation import key_of
from megatron_ext.errors import ConfigError, FlagError
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
    """The random numbers for one part of a sample, usually a document.

    They are made from raw PCG64 bits, so that all versions of numpy give the same numbers.
    """

    def __init__(self, key: int, sample: int, part: int) -> None:
        self._bits = np.random.PCG64([key, sample, part])

    def uniform(self) -> float:
        """Return a uniform random number in [0, 1)."""
        return float(int(self._bits.random_raw()) >> 11) / float(1 << 53)

    def boundary(self, length: int) -> int:
        """Return a random position in a text of ``length`` characters, from 0 to ``length``."""
        return int(self._bits.random_raw()) % (length + 1)


class FillInTheMiddle:
    """Applies fill-in-the-middle to the documents of samples, as the flags ``--fim-*`` describe.

    Args:
        seed: seed of the run.
        split: name of the split; each split has random numbers of its own.

    Raises:
        ConfigError: the tokenizer lacks one of the tokens that the flags name.
    """

    def __init__(self, fim: FimConfig, tokenizer: Tokenizer, seed: int, split: str) -> None:
        self._fim = fim
        self._tokenizer = tokenizer
        self._key = key_of("fim", seed, split)
        self._ids = _ids_of(fim, tokenizer)

    def permute_rows(
        self, tokens: Array, labels: Array, sample_ids: Array | None, first: int
    ) -> None:
        """Permute the documents in each row of a batch of samples; change the arrays in place.

        Args:
            tokens, labels: ``[b, s]``; -1 where a sample has no token or no label.
            sample_ids: index of the packed document at each position, ``[b, s]``; updated in place
                too, with -1 in padding. None if samples are not packed.
            first: number in the run of the sample in row 0.
        """
        length = tokens.shape[1]
        for row in range(len(tokens)):
            # Join tokens and labels to one text: the tokens, and the last label if there is one.
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
        """Cut a sample into parts and permute them; return (ids, packed document's index) of each.

        A packed document is cut further at each end-of-document token. Such a token is a part by
        itself and is not permuted.

        Args:
            text: the ids of the sample.
            starts: indices in ``text`` at which packed documents start.
            sample: number of the sample in the run, which determines the random numbers.
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
        """Permute a document with probability ``--fim-rate``; return its ids.

        In place of a document that contains the split token, permute each fragment between these
        tokens, with probability ``--fim-fragment-rate``.
        """
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
        """Move the middle of a text to its end with probability ``rate``; return the text's ids."""
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
    """Cut ids before and after each id ``mark``; return the parts, of which none is empty."""
    marks = np.flatnonzero(ids == mark)
    edges = np.union1d(marks, marks + 1)
    return [part for part in np.split(ids, edges) if len(part)]


def _ids_of(fim: FimConfig, tokenizer: Tokenizer) -> _Ids:
    """Return the ids of the tokens that the flags name; raise a ConfigError if one is missing."""
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
        FlagError(
            f"--fim-{name.replace('_', '-')}",
            spelled[name],
            f"is no token of the vocabulary of `--tokenizer-type {tokenizer.kind}`",
            "name one that is, or add it with `--tokenizer-special-tokens`",
        )
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
