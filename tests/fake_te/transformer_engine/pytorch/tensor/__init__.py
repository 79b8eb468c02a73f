"""Tensors in 8 bits: a byte of each element, and what a real one would tell of itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class QuantizedTensor(Tensor):
    """Looks like bfloat16 and holds e4m3, without scales."""

    _bytes: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> QuantizedTensor:
        made: Any = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )
        made._bytes = values.detach().to(torch.float8_e4m3fn).view(torch.uint8)
        return made

    def __init__(self, values: Tensor) -> None:
        super().__init__()

    def dequantize(self) -> Tensor:
        return self._bytes.view(torch.float8_e4m3fn).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = args[1].dequantize() if isinstance(args[1], cls) else args[1]
            args[0]._bytes.copy_(source.to(torch.float8_e4m3fn).view(torch.uint8))
            return args[0]
        if func is torch.ops.aten.detach.default:
            alias = cls(args[0].dequantize())
            alias._bytes = args[0]._bytes
            return alias

        def plain(x: Any) -> Any:
            return x.dequantize() if isinstance(x, QuantizedTensor) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
