"""Linear layers on one rank of tensor parallelism."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, product
from transformer_engine.pytorch.module.norm import normalize
from transformer_engine.record import options_of, record


class _Linear(TransformerEngineBaseModule):
    def _start(
        self, names: list[str], out_features: int, in_features: int, options: dict[str, Any]
    ) -> None:
        dtype = options["params_dtype"]
        self.fuses = options["fuse_wgrad_accumulation"]
        self.use_bias, self.returns_bias = options["bias"], options["return_bias"]
        start = {"init_fn": options["init_method"], "fp8_meta_index": 0}
        start["get_rng_state_tracker"] = options["get_rng_state_tracker"]
        for name in names:
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
            self.register_parameter(name, weight, **start)
            if self.use_bias:
                bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype))
                zero = torch.nn.init.zeros_
                self.register_parameter(name.replace("weight", "bias"), bias, init_fn=zero)
        self.reset_parameters()

    def _result(self, out: Tensor, bias: Tensor | None) -> Any:
        if self.returns_bias:
            return out, bias
        return out if bias is None else out + bias


class Linear(_Linear):
    def __init__(self, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        options = options_of("Linear", given, bias=True, tp_size=1, save_original_input=False)
        self.save_original_input = options["save_original_input"]
        out_ranks = options["tp_size"] if options["parallel_mode"] == "column" else 1
        in_ranks = options["tp_size"] if options["parallel_mode"] == "row" else 1
        self._start(["weight"], out_features // out_ranks, in_features // in_ranks, options)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        record("first microbatch", value=is_first_microbatch)
        out = product(inp, self.weight, fuses=self.fuses)
        return self._result(out, self.bias if self.use_bias else None)


class LayerNormLinear(_Linear):
    def __init__(self, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        usual = {"eps": 1e-5, "bias": True, "normalization": "LayerNorm", "tp_size": 1}
        options = options_of("LayerNormLinear", given, **usual)
        self.eps, self.kind = options["eps"], options["normalization"]
        self.zero_centered, dtype = options["zero_centered_gamma"], options["params_dtype"]
        ones = torch.nn.init.zeros_ if self.zero_centered else torch.nn.init.ones_
        gain = torch.nn.Parameter(torch.empty(in_features, dtype=dtype))
        self.register_parameter("layer_norm_weight", gain, init_fn=ones)
        if self.kind == "LayerNorm":
            offset = torch.nn.Parameter(torch.empty(in_features, dtype=dtype))
            self.register_parameter("layer_norm_bias", offset, init_fn=torch.nn.init.zeros_)
        self._start(["weight"], out_features // options["tp_size"], in_features, options)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        record("first microbatch", value=is_first_microbatch)
        bias = self.layer_norm_bias if self.kind == "LayerNorm" else None
        how = {"kind": self.kind, "zero_centered": self.zero_centered}
        normed = normalize(inp, self.layer_norm_weight, bias, self.eps, **how)
        out = product(normed, self.weight, fuses=self.fuses)
        return self._result(out, self.bias if self.use_bias else None)


class GroupedLinear(_Linear):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        options = options_of("GroupedLinear", given, bias=True, tp_size=1)
        names = [f"weight{index}" for index in range(num_gemms)]
        self._start(names, out_features, in_features, options)

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        record("GroupedLinear.forward", splits=list(m_splits))
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        pieces = zip(inp.split(list(m_splits)), weights, strict=True)
        return self._result(torch.cat([product(*pair, fuses=self.fuses) for pair in pieces]), None)
