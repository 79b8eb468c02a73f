"""Products of float32 matrices by oneDNN, for CPUs.

torch's own products call MKL, which takes up to twice as long on AMD's processors. A call of oneDNN
takes about 10 µs more, so small weights stay with MKL. Sums longer than about a hundred terms may
differ from MKL's in the last bits.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

FEWEST = 2**15
"""The number of elements from which on a weight is multiplied by oneDNN."""

_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""The operation that torch.compile puts in the place of linear layers on CPUs."""

IS_AVAILABLE = _linear is not None and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]

multiply: Any = None
if IS_AVAILABLE:
    multiply = partial(_linear.default, B=None, attr="none", scalars=[], algorithm="")
"""Returns ``x W^T`` for ``x`` ``[..., in]`` and ``W`` ``[out, in]``, neither of them empty.

Either matrix may be a transposed view; ``B`` is a bias. Autograd does not see the call.
"""


@cache
def takes(num_elements: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether to multiply by oneDNN for a weight of this size and kind."""
    is_float32 = dtype == torch.float32 and device == "cpu"
    return IS_AVAILABLE and is_float32 and num_elements >= FEWEST
