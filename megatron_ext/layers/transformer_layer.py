"""megatron-core's transformer layer, with its pointwise parts fused across its submodules.

megatron-core's layer adds a branch to the residual stream in one kernel and norms the sum in
another, and autograd adds the gradients of norm and residual connection in a third. Here the sum
and its norm are one kernel, and so are the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as core_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer as CoreTransformerLayer
from torch import Tensor

from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.dropout import BiasDropoutAdd, HiddenDropout
from megatron_ext.layers.graphs import LayerGraphs
from megatron_ext.layers.moe import AlltoAllDispatcher
from megatron_ext.layers.pointwise import (
    LayerNorm,
    RMSNorm,
    added,
    bias_dropout_add,
    bias_dropout_add_norm,
    fusions_of,
    norm_with_residual,
    spec_of,
    weights_of,
)
from megatron_ext.layers.submodules import WithBias, use_own_mlps


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return megatron-core's function of this name, with `bias_dropout_add` where it compiles.

    A residual stream in float32 stays so, where core rounds it to the 16 bits of ``x``.

    Args:
        fused: false under ``--no-bias-dropout-fusion``.
    """
    unfused: Callable[..., Tensor] = core_bias_dropout_add(training, fused=False)

    def function(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        if residual.dtype != x.dtype and not (fused and compiles(x)):
            return added(x, bias, residual, probability, training)
        if not (fused and compiles(x)):
            return unfused(x_with_bias, residual, probability)
        return bias_dropout_add(x, bias, residual, probability, training)

    return function


class TransformerLayer(CoreTransformerLayer):  # type: ignore[misc]
    """megatron-core's layer with fused parts, our all-to-all dispatcher and our dropout masks.

    Attributes:
        graphs: what replays the layer in training; None where it is always run kernel by kernel.
    """

    graphs: LayerGraphs | None = None

    def __init__(
        self, *args: Any, pg_collection: ProcessGroupCollection | None = None, **kwargs: Any
    ) -> None:
        # megatron-core's multi-token-prediction block hands none down.
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(*args, pg_collection=groups, **kwargs)
        use_own_mlps(self.mlp)
        if self.recompute_mlp:
            self.mlp.adds_bias = True
        if getattr(self.config, "deterministic_dropout", False):
            self.self_attn_bda = self._bias_dropout_add("attention", groups)
            self.mlp_bda = self._bias_dropout_add("mlp", groups)
        if self.is_moe_layer and type(self.mlp.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.mlp.token_dispatcher = AlltoAllDispatcher(
                self.mlp.num_local_experts,
                self.mlp.local_expert_indices,
                config=self.config,
                pg_collection=groups,
            )
            if self.mlp.shared_expert_overlap:
                self.mlp.token_dispatcher.set_shared_experts(self.mlp.shared_experts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output and its context, by a graph where there is one for the call."""
        graphs = self.graphs
        if graphs is not None and self.training and torch.is_grad_enabled():
            if graphs.takes(kwargs):
                return graphs.replay(self, kwargs)
            graphs.note(kwargs)
        return super().__call__(*args, **kwargs)

    def _bias_dropout_add(self, name: str, groups: ProcessGroupCollection) -> BiasDropoutAdd:
        site = f"{name} {self.layer_number}"
        return BiasDropoutAdd(
            HiddenDropout(self.hidden_dropout, site, groups, self.config.sequence_parallel)
        )

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run megatron-core's forward pass on ``[s, b, h]``, or the same of fused parts."""
        if args or not self._fuses(hidden_states, kwargs):
            given: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return given
        residual, normed = self._norm_with_residual(self.input_layernorm, hidden_states)
        attended = self.self_attention(
            normed,
            kwargs.get("attention_mask"),
            rotary_pos_emb=kwargs.get("rotary_pos_emb"),
        )
        hidden, normed = self._added(attended, residual, self.pre_mlp_layernorm)
        mlp = functools.partial(self.mlp, padding_mask=kwargs.get("padding_mask"))
        if self.recompute_mlp:
            output = tensor_parallel.checkpoint(mlp, False, normed)
        else:
            output = mlp(normed)
        return self._forward_post_mlp(output, hidden), kwargs.get("context")

    def _fuses(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether nothing is asked for that only megatron-core's forward pass does."""
        known = ("attention_mask", "rotary_pos_emb", "padding_mask", "context_mask")
        asked = any(value is not None for name, value in kwargs.items() if name not in known)
        return (
            fusions_of(self.config).bias_dropout
            and not asked
            and isinstance(self.input_layernorm, (LayerNorm, RMSNorm))
            and not (self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm)
            and not (self.offload_attn_norm or self.offload_mlp_norm)
            and compiles(x)
        )

    def _norm_with_residual(self, norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x`` and its norm."""
        if not norm.compiled:
            return x, norm(x)
        residual, normed = norm_with_residual(x, *weights_of(norm), spec_of(norm))
        return residual, normed

    def _added(self, output: WithBias, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a branch, and its norm."""
        training = bool(self.training)
        bda = self.self_attn_bda
        if bda is not get_bias_dropout_add or not norm.compiled:
            hidden = bda(training, True)(output, residual, self.hidden_dropout)
            return hidden, norm(hidden)
        x, bias = output
        weights = weights_of(norm)
        return bias_dropout_add_norm(
            x, bias, residual, self.hidden_dropout, training, *weights, spec_of(norm)
        )
