"""Rows of zeros that make each expert's number of tokens suit 8-bit products."""

import torch
from torch import Tensor

from transformer_engine.record import record

UNIT = 16


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.unit = align_size or UNIT

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        record("Fp8Padding", splits=list(m_splits))
        padded = [-(-rows // self.unit) * self.unit for rows in m_splits]
        pieces = [
            torch.nn.functional.pad(piece, (0, 0, 0, want - len(piece)))
            for piece, want in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(pieces), padded


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.unit = align_size or UNIT

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        padded = [-(-rows // self.unit) * self.unit for rows in m_splits]
        pieces = inp.split(padded)
        return torch.cat([piece[:rows] for piece, rows in zip(pieces, m_splits, strict=True)])
