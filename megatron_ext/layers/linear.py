"""megatron-core's parallel linear layers, with control over their weight gradients.

The matrix product of a weight gradient may be deferred, or add to the gradient buffer directly (see
`layers.linear_function`). Large products in float32 on a CPU are oneDNN's (see `layers.onednn`);
otherwise the results equal megatron-core's bit for bit. A layer may hold an adapter, which
changes its output (see `layers.lora`). It may multiply in 8 bits (see `layers.fp8`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig, build_module
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers import onednn
from megatron_ext.layers.initialization import device_of
from megatron_ext.layers.weight_gradients import LinearCall


def enter(x: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return all tokens on every tensor-parallel rank; the backward pass sums the ranks' gradients.

    The input is ``[s/tp, b, h]`` with sequence parallelism, else ``[s, b, h]``; the result is
    always ``[s, b, h]``.
    """
    if sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(x, group=tp_group)  # type: ignore[no-any-return]
    return mappings.copy_to_tensor_model_parallel_region(x, group=tp_group)  # type: ignore[no-any-return]


def leave(partial_sums: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Sum ``[s, b, h]`` over the ranks; with sequence parallelism return ``[s/tp, b, h]``."""
    if sequence_parallel:
        return mappings.reduce_scatter_to_sequence_parallel_region(partial_sums, group=tp_group)  # type: ignore[no-any-return]
    return mappings.reduce_from_tensor_model_parallel_region(partial_sums, group=tp_group)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """``x W^T + bias`` by oneDNN, for a layer that does not communicate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        product: Tensor = onednn.multiply(x, weight, B=bias)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            onednn.multiply(gradient, weight.t()) if needs_x else None,
            onednn.multiply(rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


class _ParallelLinear:
    """Mixin of parallel linear layers: deferred weight gradients, adapters and 8-bit products."""

    config: Any
    alone = True
    """Whether the weight belongs to this layer only; otherwise another module uses it, too."""
    by_onednn = False
    """Whether oneDNN multiplies by the weight."""
    communicates = True
    """Whether the layer itself gathers its input and sums its output where ranks split these;
    otherwise its caller does."""
    quantized: Any = None
    """The weight in 4 bits, set by `layers.quantized`; None for a plain one."""
    weight: Any
    is_expert: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora: Any = None
        """Adapter, set by `layers.lora`; None without one."""
        self.fp8: Any = None
        """Scaling for 8-bit products, set by `layers.fp8`; None without them."""
        # Experts multiply together, or as many tokens as never before (see `experts.ROWS`).
        if getattr(self.config, "multiplies_by_onednn", False) and not self.is_expert:
            weight: Tensor = self.weight
            self.by_onednn = onednn.takes(weight.numel(), weight.dtype, "cpu")

    @property
    def adds_in_place(self) -> bool:
        """Return whether the layer itself adds its weight's gradient to the gradient buffer."""
        return self.alone and self.overwrites

    @property
    def overwrites(self) -> bool:
        """Return whether a step's first weight gradient overwrites the buffer (not zeroed)."""
        return getattr(self.config, "adds_in_place", False)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output, changed by an adapter, and a bias that the caller must add.

        The bias is None if the layer has none or has added it.
        """
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return (output if self.lora is None else self.lora(self, input_, output)), bias

    def without_adapter(self, x: Tensor) -> Tensor:
        """Return the output for ``x`` as it is without an adapter."""
        output: Tensor = super().forward(x)[0]  # type: ignore[misc]
        return output

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the shards of the layer and of its adapter."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)  # type: ignore[misc]
        if self.lora is not None:
            state.update(self.lora.sharded_state_dict(f"{prefix}lora.", *args, **kwargs))
        return state

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.quantized is not None:
            return self.quantized.multiply(input, **kwargs)  # type: ignore[no-any-return]
        queue = getattr(self.config, "weight_gradients", None)
        # If the input needed no gradient, no backward pass would collect the weight gradients.
        if not (weight.requires_grad and input.requires_grad):
            queue = None
        # Beside an exchange nothing of the loss is computed, and autograd adds up all uses first.
        if queue is not None and not self.alone and self.config.turns is not None:
            queue = None
        in_place = weight.requires_grad and self.adds_in_place
        by_onednn = self.by_onednn and input.numel() > 0
        is_plain = queue is None and not in_place and self.fp8 is None
        communicates = kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"]
        if is_plain and by_onednn and not communicates:
            product: Tensor = _Product.apply(input, weight, kwargs["bias"])  # type: ignore[no-untyped-call]
            return product
        if is_plain and not (by_onednn and weight.requires_grad):
            output: Tensor = super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
            return output
        groups = {x: kwargs[x] for x in ("tp_group", "sequence_parallel", "allreduce_dgrad")}
        options: dict[str, Any] = {"scaling": self.fp8, "by_onednn": by_onednn}
        call = LinearCall(weight, queue, in_place, **options, **groups)
        if self.fp8 is not None:
            from megatron_ext.layers.fp8.linear import fp8_linear

            return fp8_linear(input, weight, kwargs["bias"], call)
        from megatron_ext.layers.linear_function import linear

        return linear(input, weight, kwargs["bias"], call)


class ColumnParallelLinear(_ParallelLinear, tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
    """Y = X A with A split along its columns over the tensor-parallel ranks."""


class OutputLayer(ColumnParallelLinear):
    """The output head; losses that compute the logits themselves can get its weight.

    Such a loss must get the weight by calling the module. In this call, data parallelism waits
    until the weight is gathered.
    """

    alone = False

    def forward(
        self, input_: Tensor | None, *args: Any, weight_only: bool = False, **kwargs: Any
    ) -> Any:
        """Return logits and bias; with ``weight_only`` return this rank's weight ``[v/tp, h]``."""
        if weight_only:
            given = kwargs.get("weight")
            return self.weight if given is None else given
        assert input_ is not None
        return super().forward(input_, *args, **kwargs)


class RowParallelLinear(_ParallelLinear, tensor_parallel.RowParallelLinear):  # type: ignore[misc]
    """Y = X A with A split along its rows over the tensor-parallel ranks."""

    def __init__(self, *args: Any, is_expert: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, is_expert=is_expert, **kwargs)
        # With one rank, megatron-core's reduction returns a view. Its experts could not add their
        # bias to a view in place, so skip the reduction.
        if is_expert and self.tp_group.size() == 1:
            self.explicit_expert_comm = True


class _WholeLinear(MegatronModule):  # type: ignore[misc]
    """`WholeLinear` without deferred weight gradients, adapters and 8-bit products."""

    is_expert = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        tp_group: ProcessGroup,
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.sequence_parallel: bool = config.sequence_parallel
        device = device_of(config)
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight)
        # Under sequence parallelism, a rank's gradient covers only its part of the sequence.
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor | None]:
        alone = {"tp_group": None, "sequence_parallel": False, "allreduce_dgrad": False}
        return self._forward_impl(input_, self.weight, bias=None, **alone), None

    def _forward_impl(self, input: Tensor, weight: Tensor, **_unused: Any) -> Tensor:
        return torch.nn.functional.linear(input, weight)


class WholeLinear(_ParallelLinear, _WholeLinear):
    """Y = X A with all of A on every tensor-parallel rank, for narrow outputs.

    Each rank multiplies the tokens that it holds. Under sequence parallelism these are its part of
    the sequence, ``[s/tp, b, in]``; otherwise all ranks multiply the whole sequence.
    """


def unbiased(
    kind: Any, inputs: int, outputs: int, config: TransformerConfig, tp_group: ProcessGroup
) -> Any:
    """Return a linear layer without a bias, of the class or the spec ``kind``.

    Ranks split its outputs if the class does so.
    """
    return build_module(
        kind,
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp_group,
    )


class BiasedColumnParallelLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` with a bias, whatever ``add_bias_linear`` says."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedRowParallelLinear(RowParallelLinear):
    """A `RowParallelLinear` with a bias, whatever ``add_bias_linear`` says."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class WordEmbedding(tensor_parallel.VocabParallelEmbedding):  # type: ignore[misc]
    """megatron-core's word embedding, multiplied by the config's ``embedding_multiplier``.

    If ``adds_in_place`` of the TransformerConfig is set, the backward pass adds the gradient of the
    weight directly to the gradient buffer.
    """

    config: Any = None

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings ``[b, s, h]`` of token ids ``[b, s]``.

        With ``reduce_scatter_embeddings`` they are ``[s/tp, b, h]``.
        """
        multiplier = getattr(self.config, "embedding_multiplier", 1.0)
        adds = getattr(self.config, "adds_in_place", False) and hasattr(self.weight, "main_grad")
        if adds and self.weight.requires_grad and torch.is_grad_enabled():
            embeddings = self._added_in_place(input_)
        else:
            embeddings = super().forward(input_)
        return embeddings if multiplier == 1.0 else embeddings * multiplier

    def _added_in_place(self, input_: Tensor) -> Tensor:
        """Look up embeddings, not yet multiplied; the backward pass adds to ``main_grad``."""
        from megatron_ext.layers.linear_function import rows_of

        if self.tp_group.size() == 1:
            embeddings = rows_of(self.weight, input_)
        else:
            indices = input_ - self.vocab_start_index
            count = self.num_embeddings_per_partition
            elsewhere = (indices < 0) | (indices >= count)
            # Other ranks' tokens add zeros. Spread these over all rows: a single row would be slow.
            rows = rows_of(self.weight, indices.remainder(count))
            embeddings = rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if not self.reduce_scatter_embeddings:
            return leave(embeddings, self.tp_group, sequence_parallel=False)
        return leave(embeddings.transpose(0, 1).contiguous(), self.tp_group, sequence_parallel=True)
