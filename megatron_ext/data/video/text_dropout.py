"""Captions replaced by the empty one, so that sampling can guide away from it.

Classifier-free guidance (arXiv:2207.12598) as Open-Sora 2.0 trains it: the sequence of text
embeddings and the pooled embedding of a clip are dropped independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError


@dataclass(frozen=True)
class Text:
    """Encoded captions.

    Attributes:
        sequence: embeddings of their tokens, ``[b, l, d]``.
        pooled: one embedding each, ``[b, e]``.
    """

    sequence: Tensor
    pooled: Tensor


def fit_length(sequence: Tensor, length: int) -> Tensor:
    """Make an encoded empty caption as long as the captions of a batch by repeating its last token.

    Args:
        sequence: ``[b, k, d]``.
        length: l.

    Returns:
        ``[b, l, d]``.

    Raises:
        DataError: it is longer than l.
    """
    missing = length - sequence.size(1)
    if missing < 0:
        raise DataError(
            f"The encoded empty caption has {sequence.size(1)} tokens, but the captions of the "
            f"batch have {length}; encode both with the same maximal length."
        )
    return torch.cat([sequence, sequence[:, -1:].expand(-1, missing, -1)], dim=1)


def null_like(null: Text, text: Text) -> Text:
    """The empty caption in the shape and type of a batch of captions.

    Args:
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, k at most l.
        text: ``[b, l, d]`` and ``[b, e]``.

    Raises:
        DataError: see `fit_length`.
    """
    sequence = fit_length(null.sequence, text.sequence.size(1))
    return Text(
        sequence.to(text.sequence).expand_as(text.sequence),
        null.pooled.to(text.pooled).expand_as(text.pooled),
    )


def drop_text(text: Text, null: Text, drop_sequence: Tensor, drop_pooled: Tensor) -> Text:
    """Replace dropped captions by the empty one.

    Args:
        text: ``[b, l, d]`` and ``[b, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, k at most l.
        drop_sequence: ``[b]`` bool.
        drop_pooled: ``[b]`` bool.

    Raises:
        DataError: see `fit_length`.
    """
    empty = null_like(null, text)
    sequence_at = drop_sequence.to(text.sequence.device)[:, None, None]
    pooled_at = drop_pooled.to(text.pooled.device)[:, None]
    return Text(
        torch.where(sequence_at, empty.sequence, text.sequence),
        torch.where(pooled_at, empty.pooled, text.pooled),
    )
