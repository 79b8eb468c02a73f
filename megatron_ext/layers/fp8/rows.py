"""Rows of hidden states in 8 bits, for their way to experts on other ranks.

Each block of consecutive values of a row has a scale, a power of two, and the values are in e4m3.
DeepSeek-V3 sends its tokens so, with blocks of 128 (arXiv:2412.19437, section 3.3.3); MXFP8 has
blocks of 32. Since scales are powers of two, bf16 and float32 hold the decoded values exactly, and
encoding these once more changes nothing: rows may be decoded and encoded between two hops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.layers.fp8.blocks import BLOCKS

E4M3 = torch.float8_e4m3fn
BIAS = 127
"""Added to the exponent of a scale, which is sent as one byte."""
LIMIT = 120
"""The largest exponent of a scale, and the negative of the least one."""
INFINITE = 128
"""The exponent of a scale that is infinite in float32."""


@dataclass(frozen=True)
class RowFormat:
    """The 8-bit format of a row: consecutive ``block`` values have one scale."""

    block: int

    @classmethod
    def of(cls, name: str) -> RowFormat | None:
        """Return the format of a ``--moe-dispatch-fwd-dtype``; None leaves rows as they are."""
        block = BLOCKS.get(name)
        return None if block is None else cls(block)

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows ``[n, h]`` as bytes ``[n, h + h / block]``: values, then exponents of scales.

        A value that is not finite stays so; the others of its block are lost.
        """
        blocks = rows.float().reshape(len(rows), rows.size(1) // self.block, self.block)
        largest = blocks.abs().amax(2)
        mantissa, exponent = torch.frexp(largest)
        # The least power of two by which the largest value is at most 448 = 0.875 * 2^9.
        scale = (exponent - torch.where(mantissa > 0.875, 8, 9)).clamp(-LIMIT, LIMIT)
        scale = torch.where(largest.isfinite(), scale, INFINITE)
        values = torch.ldexp(blocks, -scale.unsqueeze(2)).to(E4M3).flatten(1)
        return torch.cat([values.view(torch.uint8), (scale + BIAS).to(torch.uint8)], 1)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows ``[n, h]`` that `encode` has made into bytes."""
        count = encoded.size(1) // (self.block + 1)
        values = encoded[:, : count * self.block].contiguous().view(E4M3)
        scale = encoded[:, count * self.block :].int() - BIAS
        blocks = values.float().reshape(len(encoded), count, self.block)
        return torch.ldexp(blocks, scale.unsqueeze(2)).flatten(1).to(dtype)
