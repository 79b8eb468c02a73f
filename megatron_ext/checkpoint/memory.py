"""Compares the memory of tensors: values that several tensors share are stored and read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same memory, read in the same way."""
    place = tensor.device, tensor.data_ptr()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


def fills(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether ``parts``, one after another, are the memory of the tensor ``whole``."""
    if not whole.is_contiguous():
        return False
    position = whole.data_ptr()
    for part in parts:
        alike = part.dtype == whole.dtype and part.device == whole.device
        if not alike or not part.is_contiguous() or part.data_ptr() != position:
            return False
        position += part.numel() * part.element_size()
    return position == whole.data_ptr() + whole.numel() * whole.element_size()
