"""The base of linear layers: their parameters' start, 8-bit weights, communication buffers."""

from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.record import record


class UserBufferQuantizationMode(Enum):
    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: Any = None,
) -> None:
    record(
        "initialize_ub",
        shape=shape,
        tp_size=tp_size,
        modes=[mode.value for mode in quantization_modes or []],
        ub_cfgs=ub_cfgs,
        backend=bootstrap_backend,
    )


@dataclass
class ParameterStart:
    init_fn: Any
    get_rng_state_tracker: Any = None
    fp8_meta_index: int | None = None


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param_init_meta: dict[str, ParameterStart] = {}
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        recipes = FP8GlobalStateManager.init_recipes
        self.primary_weights_in_fp8 = bool(recipes) and recipes[-1] is not None
        self.keeps_initial_values = FP8GlobalStateManager.keeps_initial_values

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        record("set_extra_state")

    def register_parameter(self, name: str, param: Any, **start: Any) -> None:
        super().register_parameter(name, param)
        self.param_init_meta[name] = ParameterStart(**start)

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Fill all parameters, as the real method does: with new Parameters around them."""
        for name, param in list(self.named_parameters(recurse=False)):
            start = self.param_init_meta[name]
            with torch.no_grad():
                if start.get_rng_state_tracker is None:
                    start.init_fn(param)
                else:
                    with start.get_rng_state_tracker().fork():
                        start.init_fn(param)
            kept: Any = param.detach()
            exact = None
            if self.primary_weights_in_fp8 and start.fp8_meta_index is not None:
                exact = kept.clone() if self.keeps_initial_values else None
                kept = QuantizedTensor(kept)
            fresh: Any = torch.nn.Parameter(kept)
            if exact is not None:
                fresh._high_precision_init_val = exact
                fresh.get_high_precision_init_val = MethodType(_exact, fresh)
                fresh.clear_high_precision_init_val = MethodType(_forget, fresh)
            self._parameters[name] = fresh


def _exact(parameter: Any) -> Any:
    return getattr(parameter, "_high_precision_init_val", None)


def _forget(parameter: Any) -> None:
    del parameter._high_precision_init_val


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, fuses: bool) -> Tensor:  # type: ignore[override]
        plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        ctx.save_for_backward(x, plain)
        ctx.weight, ctx.fuses = weight, fuses
        return x @ plain.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, plain = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fuses:
            ctx.weight.main_grad.add_(of_weight)
            ctx.weight.grad_added_to_main_grad = True
            record("fused gradient", shape=list(of_weight.shape))
            of_weight = torch.zeros_like(of_weight)
        return gradient @ plain, of_weight, None


def product(x: Tensor, weight: Any, *, fuses: bool) -> Tensor:
    record(
        "product",
        recipe=FP8GlobalStateManager.current(),
        quantized=isinstance(weight, QuantizedTensor),
    )
    out: Tensor = _Product.apply(x, weight, fuses)  # type: ignore[no-untyped-call]
    return out
