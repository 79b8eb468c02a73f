"""Lines of input as token ids and masks, and these as rows of the model's length.

Worker processes tokenize conversations block by block; parquet comes as lines of JSON too. A rank
that reads data cuts them, shifts them one by one, lays them side by side, and pads the row: no
label crosses from one conversation into the next. Padding is known by its place, never by its id,
which may be the end token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import DataError
from megatron_ext.text.preprocess.encode import BadLine, Encoded, Refuse, Write, read_object
from megatron_ext.text.sft.chat import Chat, ChatTokenizer
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import TokenizedConversation, tokenize_conversation

Truncation = Literal["error", "left", "right"]


class Labeled(NamedTuple):
    """The ids that the model reads and predicts at each of s positions.

    Attributes:
        inputs: token ids, ``[s]`` int64.
        labels: ids to predict, ``[s]`` int64.
        weights: weight of each label in the loss, ``[s]`` float32.
    """

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class SftRow:
    """One row of a micro-batch: n conversations side by side, then padding, s positions.

    Attributes:
        inputs: token ids, ``[s]`` int64.
        labels: ids to predict, ``[s]`` int64.
        weights: weight of each label, 0 in padding, ``[s]`` float32.
        position_ids: counted from 0 in each conversation, 0 in padding, ``[s]`` int64.
        cu_seqlens: cumulative lengths of the conversations, from 0, ``[n + 1]`` int32; padding
            begins at the last.
    """

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]


def kept_tokens(max_length: int, truncation: Truncation) -> slice:
    """Return which tokens of a conversation of any length are kept: its last, or its first."""
    return slice(-max_length, None) if truncation == "left" else slice(max_length)


def shift(ids: ArrayLike, mask: ArrayLike) -> Labeled:
    """Return inputs, labels and label weights of ids and their mask of trained tokens.

    ``inputs = ids[:-1]``, ``labels = ids[1:]``, ``weights = mask[1:]``: position t predicts token
    t + 1, so a weight belongs to the token that is predicted. The first token is never a label.

    Args:
        ids: ``[s + 1]``.
        mask: 1 at trained tokens, ``[s + 1]``.

    Raises:
        DataError: lengths that differ, or are below 2.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    trained = np.asarray(mask, dtype=np.float32)
    if tokens.shape != trained.shape or tokens.ndim != 1 or tokens.size < 2:
        raise DataError(
            f"ids (shape {tokens.shape}) and mask (shape {trained.shape}) must be of one length, "
            "at least 2: one token to read, one to predict."
        )
    return Labeled(tokens[:-1], tokens[1:], trained[1:])


def pad_id_of(tokenizer: ChatTokenizer) -> int:
    """Return the tokenizer's padding id, else 0; it may equal the end token's."""
    return 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def lay_out(sequences: Sequence[Labeled], length: int, pad_id: int) -> SftRow:
    """Lay shifted conversations side by side and pad the row.

    Args:
        length: s, positions of the row.
        pad_id: id in the padding, as input and label; weights are 0 there.

    Raises:
        DataError: they need more positions than ``length``.
    """
    lengths = [len(sequence.inputs) for sequence in sequences]
    total = sum(lengths)
    if total > length:
        raise DataError(
            f"{len(lengths)} conversations of {total} positions together must fit a row of "
            f"{length}; truncate them first, or lay out fewer."
        )
    inputs = np.full(length, pad_id, dtype=np.int64)
    labels = inputs.copy()
    weights = np.zeros(length, dtype=np.float32)
    position_ids = np.zeros(length, dtype=np.int64)
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    for sequence, start, end in zip(sequences, ends, ends[1:], strict=False):
        inputs[start:end] = sequence.inputs
        labels[start:end] = sequence.labels
        weights[start:end] = sequence.weights
        position_ids[start:end] = np.arange(end - start)
    return SftRow(inputs, labels, weights, position_ids, ends)


KEYS = ("document", "mask")
"""The parts of a conversation in a store: its token ids, and 1 for each trained one."""


@dataclass(frozen=True)
class ConversationEncoder:
    """A `BlockEncoder` of conversations: one document for each, under both `KEYS`."""

    chat: Chat

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """Encode the lines of a block; see `BlockEncoder`."""
        kept: list[TokenizedConversation] = []
        for number, line in enumerate(lines, first):
            try:
                kept.append(self.tokenize(line, number))
            except BadLine as bad:
                refuse(number, str(bad))
        ones = np.ones(len(kept), np.int32)
        lengths = np.array([len(conversation.ids) for conversation in kept], np.int32)
        for key in range(len(KEYS)):
            values = [np.asarray(conversation[key], np.int64) for conversation in kept]
            tokens = np.concatenate(values) if values else np.zeros(0, np.int64)
            write(key, 0, Encoded(tokens, lengths, ones))
        return len(kept)

    def tokenize(self, line: bytes, number: int) -> TokenizedConversation:
        """Return ids and mask of the conversation of one line.

        Raises:
            BadLine: the line holds no conversation that can be trained.
        """
        place = Place("", number)
        try:
            conversation = read_conversation(read_object(line), place, self.chat.sft)
            tokenized = tokenize_conversation(self.chat.tokenizer, conversation, self.chat.sft)
        except DataError as error:
            text = str(error).removeprefix(f"{place}: ").removesuffix(".")
            raise BadLine(f"is refused: {text}") from None
        if len(tokenized.ids) < 2:
            raise BadLine(f"gives {len(tokenized.ids)} tokens, but at least 2 are needed")
        return tokenized
