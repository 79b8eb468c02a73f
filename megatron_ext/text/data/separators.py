"""Compares the token that ends the documents of a dataset with the tokenizer of the run.

A document should end with the tokenizer's end-of-document token: there positions and attention can
be reset, and the loss masked. Two mistakes are common. Documents end with another token, such as a
base model's ``<|endoftext|>``, while the instruct tokenizer of the run has ``<|im_end|>``. Or the
end-of-document token is also the padding, which megatron-core's GPTDataset replaces by id 0 and
excludes from the loss.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.data.indexed import Array, Index, bin_path
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer

SAMPLED_TOKENS = 1 << 20
"""The number of a dataset's first tokens in which the ends of documents are examined."""


def padding_id(tokenizer: Tokenizer, *, allow_ambiguous: bool = False) -> int:
    """Return the id that megatron-core's GPTDataset treats as padding; -1 if there is none.

    If the tokenizer's padding id is also its eos or eod, it counts as padding only with
    ``allow_ambiguous``.
    """
    pad = tokenizer.pad
    if pad in (tokenizer.eos, tokenizer.eod) and not allow_ambiguous:
        return NO_TOKEN
    return pad


@dataclass(frozen=True)
class Endings:
    """Counts of the tokens with which documents end, taken from the first tokens of a dataset.

    Attributes:
        documents: number of documents that end within these first tokens.
        last_ids: for each id, the number of these documents that end with it.
        ids: the ids of the dataset's first tokens.
    """

    documents: int
    last_ids: Counter[int]
    ids: Array

    def share(self, number: int) -> float:
        """Return the share of documents that end with the id ``number``."""
        return self.last_ids[number] / max(1, self.documents)


def endings_of(ids: Array, ends: Array) -> Endings:
    """Return the `Endings` of the documents that end within ``ids``, an array of token ids.

    ``ends`` has the indices of the documents' last tokens.
    """
    last = ids[ends]
    return Endings(len(ends), Counter(last.tolist()), ids)


def first_endings(prefix: Any, index: Index) -> Endings:
    """Return the `Endings` of a local dataset, counted in its first `SAMPLED_TOKENS` tokens."""
    ids = np.fromfile(bin_path(prefix), index.dtype, SAMPLED_TOKENS)
    return endings_of(ids, document_ends(index, 0, len(ids)))


def document_ends(index: Index, first: int, tokens: int) -> Array:
    """Return the indices of the tokens at which documents end, within a range of a dataset.

    The range has ``tokens`` tokens from token ``first`` on; indices count from ``first``.
    """
    width = index.dtype.itemsize
    edges = np.searchsorted(index.offsets, [first * width, (first + tokens) * width])
    low, high = np.searchsorted(index.documents, edges, side="right")
    last = np.asarray(index.documents[low : high + 1], dtype=np.int64) - 1
    last = last[last < len(index.lengths)]
    # An empty document or sequence ends at the same token as the one before it.
    ends = np.unique(index.offsets[last] // width + index.lengths[last]) - first
    return ends[(ends > 0) & (ends <= tokens)] - 1


def ending_warnings(
    name: str, endings: Endings, tokenizer: Tokenizer, padding: int, needed_by: Sequence[str] = ()
) -> list[str]:
    """Return warnings about end-of-document tokens in a dataset that a run would misread.

    One warns if the dataset contains the padding id, on which the run has no loss; another if most
    documents do not end with the run's end-of-document token.

    Args:
        name: the prefix of the dataset.
        padding: the id that the run treats as padding wherever it occurs; -1 if there is none.
        needed_by: the flags of the run that depend on the ends of documents.
    """
    return [
        *_about_padding(name, endings, tokenizer, padding),
        *_about_other_ends(name, endings, tokenizer, needed_by),
    ]


def _about_padding(name: str, endings: Endings, tokenizer: Tokenizer, padding: int) -> list[str]:
    if padding == NO_TOKEN:
        return []
    count = int((endings.ids == padding).sum())
    if not count:
        return []
    return [
        f"{name} holds the token {spelled(tokenizer, padding)} {count} times in its first "
        f"{len(endings.ids)} tokens, and {endings.last_ids[padding]} of the first "
        f"{endings.documents} documents end with it, but it is the padding of the run's tokenizer: "
        "the order of samples of megatron-core reads it as id 0 and does not train it; use "
        "`--data-order direct`, which trains it, or a tokenizer whose padding is another token."
    ]


def _about_other_ends(
    name: str, endings: Endings, tokenizer: Tokenizer, needed_by: Sequence[str]
) -> list[str]:
    if not endings.documents or endings.share(tokenizer.eod) >= 0.5:
        return []
    common, count = endings.last_ids.most_common(1)[0]
    ends = f"{count} of the first {endings.documents} documents of {name} end with"
    own = f"the run's end of document is {spelled(tokenizer, tokenizer.eod)}"
    needed = " and ".join(f"`{flag}`" for flag in needed_by)
    if 2 * count >= endings.documents and common in special_ids(tokenizer):
        effect = f"{needed} does not see their ends" if needed else "a run takes it for a text's"
        return [
            f"{ends} {spelled(tokenizer, common)}, but {own}, so that {effect}; use the tokenizer "
            "that the data was made with, or preprocess it again with `--append-eod`."
        ]
    if needed:
        return [
            f"{endings.last_ids[tokenizer.eod]} of the first {endings.documents} documents of "
            f"{name} end with {spelled(tokenizer, tokenizer.eod)}, the run's end of document, by "
            f"which {needed} knows where one ends; preprocess the data with `--append-eod`."
        ]
    return []


def appended_warnings(tokenizer: Tokenizer, eod: int) -> list[str]:
    """Return warnings about ``eod``, the token that preprocessing appends to documents.

    A warning tells how a training run with the same tokenizer would misread this token.
    """
    sentences = []
    if eod == padding_id(tokenizer):
        sentences.append(
            f"Documents end with {spelled(tokenizer, eod)}, which is the padding of this "
            "tokenizer: train on them with `--data-order direct`, since the order of samples of "
            "megatron-core reads padding as id 0 and does not train it."
        )
    if eod != tokenizer.eod:
        sentences.append(
            f"Documents end with {spelled(tokenizer, eod)}, but the end of document of this "
            f"tokenizer is {spelled(tokenizer, tokenizer.eod)}: `--reset-position-ids`, "
            "`--reset-attention-mask` and `--eod-mask-loss` of a run with it do not see the ends."
        )
    return sentences


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the tokenizer's eos, eod, bos, pad and unk, and of its control tokens."""
    named = (tokenizer.eos, tokenizer.eod, tokenizer.bos, tokenizer.pad, tokenizer.unk)
    spelled_out = (tokenizer.token_id(text) for text in tokenizer.control_texts())
    return {number for number in (*named, *spelled_out) if number >= 0}


def spelled(tokenizer: Tokenizer, number: int) -> str:
    """Return an id for messages with its token's text, if it has any, such as "2 (`</s>`)"."""
    if not 0 <= number < tokenizer.vocab_size:
        return f"{number}"
    text = tokenizer.detokenize([number], skip_special_tokens=False)
    return f"{number} (`{text}`)" if text.strip() else f"{number}"
