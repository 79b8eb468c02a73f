"""Attention masks of documents, and the cache of what layers compute from a mask.

A mask is one of two tensors. One kind is the document index of each position, ``[b, s]``: a query
attends to its own document, up to its own position. The other kind is a dense mask, ``[b or 1, 1,
q, k]``, True where attention is forbidden; at 32,768 positions it takes 1 GiB per sample. Data
loaders provide documents. Dense masks are made from them only for kernels that need one, and for
one micro-batch at a time. `flex_attention` makes block masks from both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def is_dense(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a mask is a dense mask, rather than the document index of each position."""
    return mask is not None and mask.dim() == 4


def document_mask(documents: Tensor, first_query: int, num_queries: int) -> Tensor:
    """Return the dense mask ``[b, 1, q, s]`` of q queries from ``first_query`` on.

    It is True at later positions and in other documents. ``documents`` is the document index of
    each position, ``[b, s]``. The result is cached in `newest`.
    """

    def made() -> Tensor:
        position = torch.arange(documents.size(1), device=documents.device)
        queries = slice(first_query, first_query + num_queries)
        future = position[None, :] > position[queries, None]
        return (future | (documents[:, queries, None] != documents[:, None, :])).unsqueeze(1)

    return newest.find(documents, (first_query, num_queries), made)


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on this device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class NewestMask:
    """Cache of the values that all layers compute from the newest micro-batch's mask.

    A mask is recognized by its storage and version, because activation recomputation passes the
    same mask as another tensor object. The cache holds a reference to the mask, so that the storage
    is not reused for another one.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None
        self._key: tuple[Any, ...] = ()
        self._made: dict[Any, Any] = {}
        self._of_graphs: dict[Any, Any] | None = None

    @contextmanager
    def kept_for_graphs(self, kept: dict[Any, Any]) -> Iterator[None]:
        """Keep in ``kept`` the values computed inside the block, which records CUDA graphs.

        The graphs read these values at fixed addresses, so ``kept`` must live as long as the graphs
        of the model chunk. Values that depend only on positions are computed before the capture.
        A value that depends on a mask is computed by the graph of the first layer that needs it,
        and read by the graphs of later layers. So the layers of a chunk must be replayed in order,
        and all of them or none, which holds because all layers get the same mask.
        """
        self._of_graphs = kept
        try:
            yield
        finally:
            self._of_graphs = None

    def find(self, mask: Tensor, purpose: Any, make: Callable[[], T]) -> T:
        """Return the result of ``make`` for a mask, cached under the mask and ``purpose``.

        ``mask`` may be a view of the micro-batch's mask; each view has its own results. While a
        CUDA graph is being captured, results that were computed outside the capture are not reused.
        """
        version = 0 if mask.is_inference() else mask._version
        key = (mask.untyped_storage()._cdata, version, mask.device)
        part = (mask.storage_offset(), mask.shape, mask.stride(), purpose)
        if is_captured(mask.device):
            return self.recorded((key, part), make, mask)
        if key != self._key:
            self._held = mask
            self._key = key
            self._made = {}
        if part not in self._made:
            self._made[part] = make()
        made: T = self._made[part]
        return made

    def keeps_apart(self, device: torch.device) -> bool:
        """Return whether CUDA graphs are being recorded; cache values only by `recorded` then.

        Another cache might evict a value that the graphs still read. It might also give code
        outside the graphs a value that only a replay computes.
        """
        return self._of_graphs is not None or is_captured(device)

    def recorded(self, what: Any, make: Callable[[], T], mask: Tensor | None = None) -> T:
        """Return the result of ``make``, cached under ``what`` in the dict of `kept_for_graphs`.

        The dict also keeps ``mask`` alive. Outside a `kept_for_graphs` block nothing is cached.
        """
        if self._of_graphs is None:
            return make()
        if what not in self._of_graphs:
            self._of_graphs[what] = make(), mask
        made: T = self._of_graphs[what][0]
        return made


newest = NewestMask()
