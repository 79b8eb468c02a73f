"""Norms."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.record import options_of


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, kind: str, zero_centered: bool
) -> Tensor:
    gain = weight.float() + 1 if zero_centered else weight.float()
    full = x.float()
    if kind == "RMSNorm":
        return torch.nn.functional.rms_norm(full, gain.shape, gain, eps).to(x.dtype)
    offset = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(full, gain.shape, gain, offset, eps).to(x.dtype)


class LayerNorm(torch.nn.Module):
    kind = "LayerNorm"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        given.pop("device", None)  # one of the further keywords that the real norms ignore
        options = options_of(self.kind, given, eps=1e-5)
        size, dtype = options["hidden_size"], options["params_dtype"]
        size = options["normalized_shape"] if size is None else size
        self.eps, self.zero_centered = options["eps"], options["zero_centered_gamma"]
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=dtype))
        self.bias: Any = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = options["sequence_parallel"]

    def forward(self, x: Tensor) -> Tensor:
        return normalize(
            x, self.weight, self.bias, self.eps, kind=self.kind, zero_centered=self.zero_centered
        )


class RMSNorm(LayerNorm):
    kind = "RMSNorm"
