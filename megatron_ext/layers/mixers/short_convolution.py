"""Causal convolution of each channel over the last few positions, which stops at documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    documents: Tensor | None = None,
    before: Tensor | None = None,
    documents_before: Tensor | None = None,
) -> Tensor:
    """Return ``[b, s, c]``: each channel's weighted sum of its input and the w - 1 before it.

    The last column of the weight belongs to the position itself, as in torch's convolutions. Half
    precision is summed in float32.

    Args:
        x: ``[b, s, c]``.
        weight: ``[c, w]``.
        bias: ``[c]``.
        documents: the document index of each position, ``[b, s]``; a position sees only its own
            document. None is one document.
        before: ``[b, w - 1, c]``, the inputs before the first position; None is zeros.
        documents_before: the documents of ``before``, ``[b, w - 1]``; needed if both of them are
            given.
    """
    length = x.size(1)
    reach = weight.size(1) - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype)
    if before is None:
        inputs = F.pad(x.to(dtype), (0, 0, reach, 0))
    else:
        inputs = torch.cat((before.to(dtype), x.to(dtype)), dim=1)
    same = None if documents is None else _same(documents, documents_before, reach)
    total = inputs[:, reach:] * taps[:, reach]
    if bias is not None:
        total = total + bias.to(dtype)
    for tap in range(reach):
        earlier = inputs[:, tap : tap + length]
        if same is not None:
            earlier = earlier * same[tap].to(dtype)
        total = torch.addcmul(total, earlier, taps[:, tap])
    return total.to(x.dtype)


def _same(documents: Tensor, documents_before: Tensor | None, reach: int) -> list[Tensor]:
    """Return, for each column of the weight but the last, whether its position sees its input.

    Each entry is ``[b, s, 1]``, True where the input belongs to the document of the position.
    """
    length = documents.size(1)
    if documents_before is None:
        # Whatever comes before the first position is in no document.
        known = F.pad(documents, (reach, 0), value=-1)
    else:
        known = torch.cat((documents_before, documents), dim=1)
    return [(known[:, tap : tap + length] == documents)[..., None] for tap in range(reach)]
