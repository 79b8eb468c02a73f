"""Linear layers on one rank of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, product
from transformer_engine.pytorch.module.norm import normalize
from transformer_engine.record import record


class _Linear(TransformerEngineBaseModule):
    def _start(
        self,
        names: list[str],
        sides: tuple[int, int],
        options: dict[str, Any],
    ) -> None:
        out_features, in_features = sides
        dtype = options["params_dtype"]
        self.fuses = options["fuse_wgrad_accumulation"]
        self.use_bias, self.returns_bias = options["bias"], options["return_bias"]
        self.parallel_mode = options["parallel_mode"]
        tracker = options["get_rng_state_tracker"]
        for name in names:
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
            self.register_parameter(
                name,
                weight,
                init_fn=options["init_method"],
                get_rng_state_tracker=tracker,
                fp8_meta_index=0,
            )
            if self.use_bias:
                bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype))
                zero = torch.nn.init.zeros_
                self.register_parameter(name.replace("weight", "bias"), bias, init_fn=zero)
        self._record(options)

    def _record(self, options: dict[str, Any]) -> None:
        told = {k: v for k, v in options.items() if k.startswith("ub_")}
        record(
            type(self).__mro__[1].__name__,
            fuses=self.fuses,
            mode=self.parallel_mode,
            sequence_parallel=options["sequence_parallel"],
            tp_size=options["tp_size"],
            in_8_bits=self.primary_weights_in_fp8,
            ub=told,
        )

    def _result(self, out: Tensor, bias: Tensor | None) -> Any:
        if self.returns_bias:
            return out, bias
        return out if bias is None else out + bias


class Linear(_Linear):
    """``y = x w^T + b``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        options = dict(locals())
        super().__init__()
        self.save_original_input = save_original_input
        cut_out = tp_size if parallel_mode == "column" else 1
        cut_in = tp_size if parallel_mode == "row" else 1
        self._start(["weight"], (out_features // cut_out, in_features // cut_in), options)
        self.reset_parameters()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Map ``[..., in]`` to ``[..., out]``."""
        record("first microbatch", value=is_first_microbatch)
        out = product(inp, self.weight, fuses=self.fuses)
        return self._result(out, self.bias if self.use_bias else None)


class LayerNormLinear(_Linear):
    """A norm, then a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        options = dict(locals())
        super().__init__()
        self.eps, self.kind, self.zero_centered = eps, normalization, zero_centered_gamma
        ones = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        gain = torch.nn.Parameter(torch.empty(in_features, dtype=params_dtype))
        self.register_parameter("layer_norm_weight", gain, init_fn=ones)
        if normalization == "LayerNorm":
            offset = torch.nn.Parameter(torch.empty(in_features, dtype=params_dtype))
            self.register_parameter("layer_norm_bias", offset, init_fn=torch.nn.init.zeros_)
        self._start(["weight"], (out_features // tp_size, in_features), options)
        self.reset_parameters()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Map ``[..., in]`` to ``[..., out]``."""
        record("first microbatch", value=is_first_microbatch)
        bias = self.layer_norm_bias if self.kind == "LayerNorm" else None
        normed = normalize(
            inp,
            self.layer_norm_weight,
            bias,
            self.eps,
            kind=self.kind,
            zero_centered=self.zero_centered,
        )
        out = product(normed, self.weight, fuses=self.fuses)
        return self._result(out, self.bias if self.use_bias else None)


class GroupedLinear(_Linear):
    """A linear layer of each expert."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        options = dict(locals())
        super().__init__()
        self.num_gemms = num_gemms
        names = [f"weight{index}" for index in range(num_gemms)]
        self._start(names, (out_features, in_features), options)
        self.reset_parameters()

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        """Map rows ``[m, in]`` of all experts."""
        record("GroupedLinear.forward", splits=list(m_splits))
        pieces = inp.split(list(m_splits))
        out = torch.cat(
            [
                product(piece, getattr(self, f"weight{index}"), fuses=self.fuses)
                for index, piece in enumerate(pieces)
            ]
        )
        return self._result(out, None)
