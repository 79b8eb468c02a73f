"""megatron-core's transformer layer, attention and MLPs, which compile their pointwise parts.

Where these parts can be compiled, on a GPU, `fused_layer` joins them; otherwise megatron-core's own
functions compute them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as core_bias_dropout_add
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import mlp as core
from megatron.core.transformer.attention import SelfAttention as CoreSelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP as CoreSharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer as CoreTransformerLayer
from torch import Tensor

from megatron_ext.core import numbered_after_the_decoder
from megatron_ext.layers import compiled
from megatron_ext.layers.compiled import compiles, fusions_of
from megatron_ext.layers.norms import LayerNorm, RMSNorm
from megatron_ext.layers.subclass import specialize

if TYPE_CHECKING:
    from megatron_ext.layers.graphs import LayerGraphs

WithBias = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class LayerRotary:
    """How a layer rotates its queries and keys.

    Attributes:
        index: which of the k tables of angles in ``[s, 1, k, d]`` the layer uses: 0, or 1 for
            layers with a window that have their own angles. None rotates nothing.
        magnitude: factor of the cosines and sines.
    """

    index: int | None
    magnitude: float

    @classmethod
    def of(
        cls, transformer_config: TransformerConfig, layer_number: int, *, windowed: bool
    ) -> LayerRotary:
        """Return the rotation of layer ``layer_number``, counted from 1.

        ``windowed`` says whether the layer has a window. Layers of multi-token prediction follow
        the decoder's layers, and rotate like the last of them.
        """
        last = transformer_config.num_layers
        lacking = transformer_config.no_rope_freq
        if lacking and lacking[min(layer_number, last) - 1]:
            return cls(None, 1.0)
        if windowed and getattr(transformer_config, "has_local_rotary", False):
            return cls(1, 1.0)
        return cls(0, getattr(transformer_config, "rotary_magnitude", 1.0))


class SelfAttention(CoreSelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention with fused norm and rotary embedding of queries and keys.

    Attributes:
        rotary: how this layer rotates queries and keys.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, layer_number: int, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        windowed = getattr(self.core_attention, "window_size", None) is not None
        self.rotary = LayerRotary.of(config, layer_number, windowed=windowed)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> WithBias:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add.

        Args:
            attention_mask: each position's document index ``[b, s]``, or a dense mask (see
                `layers.masks`); None means causal attention.
        """
        rotary = kwargs.pop("rotary_pos_emb", None)
        has_others = any(value is not None for value in kwargs.values())
        if has_others or isinstance(rotary, tuple):
            given: WithBias = super().forward(
                hidden_states, attention_mask, rotary_pos_emb=rotary, **kwargs
            )
            return given
        rotary = None if self.rotary.index is None else rotary
        if self._fuses(hidden_states):
            from megatron_ext.layers.fused_layer import projected

            query, key, value = projected(self, hidden_states, rotary)
        else:
            query, key, value = self._projected_by_core(hidden_states, rotary)
        checkpoints = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if checkpoints else self.core_attention
        attended = attend(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
        output: WithBias = self.linear_proj(attended)
        return output

    def _fuses(self, x: Tensor) -> bool:
        """Return whether `fused_layer.projected` can compute queries, keys and values."""
        config = self.config
        return (
            (x.is_cuda or compiled.compiler.on_cpu)
            and fusions_of(config).rotary
            and compiles(x)
            and all(
                isinstance(norm, (LayerNorm, RMSNorm, IdentityOp, type(None)))
                for norm in (self.q_layernorm, self.k_layernorm)
            )
            # If there are fewer groups than tensor-parallel ranks, megatron-core gathers them.
            and config.num_query_groups >= self.world_size
            and not (config.attention_output_gate or config.test_mode)
        )

    def _projected_by_core(
        self, hidden: Tensor, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[s, b, n, d]``, and keys and values ``[s, b, g, d]`` of g groups.

        megatron-core's separate functions compute them. ``rotary`` has the angles ``[s, 1, k, d]``;
        None rotates nothing.
        """
        query, key, value = self.get_query_key_value_tensors(hidden, None)
        if rotary is not None:
            query, key = self._turned(query, key, rotary)
        return query, key, value

    def _turned(self, query: Tensor, key: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries ``[s, b, n, d]`` and keys ``[s, b, g, d]`` rotated by ``[s, 1, k, d]``."""
        index = self.rotary.index or 0
        own = rotary if rotary.size(2) == 1 else rotary[:, :, index : index + 1]
        turn = functools.partial(
            apply_rotary_pos_emb,
            freqs=own,
            config=self.config,
            mscale=self.rotary.magnitude,
            cp_group=self.pg_collection.cp,
        )
        return turn(query), turn(key)


class MLP(core.MLP):  # type: ignore[misc]
    """megatron-core's MLP with a compiled activation.

    Attributes:
        adds_bias: whether to add the bias of the second linear layer instead of returning it. It
            must be True if the MLP is recomputed: activation checkpointing of a function that
            returns a parameter recomputes endlessly in the backward pass.
    """

    adds_bias: bool = False

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> WithBias:
        """Return the output, shaped like the input, and None or a bias that the caller must add.

        The input is ``[s, b, h]``; or ``[tokens, h]`` for an expert, whose output is multiplied by
        ``per_token_scale`` ``[tokens]``.
        """
        may_compile = hidden_states.is_cuda or compiled.compiler.on_cpu
        if may_compile and fusions_of(self.config).activation and compiles(hidden_states):
            from megatron_ext.layers.fused_layer import mlp_forward

            output, bias = mlp_forward(self, hidden_states, per_token_scale)
        else:
            output, bias = super().forward(hidden_states, per_token_scale, **kwargs)
        return (output + bias, None) if self.adds_bias and bias is not None else (output, bias)


class SharedExpertMLP(CoreSharedExpertMLP, MLP):  # type: ignore[misc]
    """The shared expert; its activation is compiled unless the expert overlaps communication."""


OWN = {core.MLP: MLP, CoreSharedExpertMLP: SharedExpertMLP}


def use_own_mlps(module: torch.nn.Module) -> None:
    """Change the class of megatron-core's MLPs in a module to ours, which has the same state."""
    for part in module.modules():
        if type(part) in OWN:
            specialize(part, OWN[type(part)])


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return a function that computes ``residual + dropout(x + bias)``, as in megatron-core.

    It drops nothing unless ``training``. The function is compiled if ``fused`` and a compiler is
    available. It keeps a float32 residual stream in float32, whereas megatron-core's function
    rounds it to the 16-bit dtype of ``x``.
    """
    unfused: Callable[..., Tensor] = core_bias_dropout_add(training, fused=False)

    def function(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        is_compiled = fused and (x.is_cuda or compiled.compiler.on_cpu) and compiles(x)
        if not is_compiled and residual.dtype == x.dtype:
            return unfused(x_with_bias, residual, probability)
        from megatron_ext.layers.pointwise import added, bias_dropout_add

        add = bias_dropout_add if is_compiled else added
        return add(x, bias, residual, probability, training)

    return function


def _dispatcher_class(config: TransformerConfig) -> type[MoEAlltoAllTokenDispatcher]:
    if getattr(config, "kept_tokens", None) is not None:
        from megatron_ext.layers.keeping_dispatcher import KeepingDispatcher

        return KeepingDispatcher
    formats = {getattr(config, f"moe_{x}_dtype", "bf16") for x in ("dispatch_fwd", "combine_bwd")}
    if getattr(config, "turns", None) is not None or formats != {"bf16"}:
        from megatron_ext.layers.expert_exchange import OverlappedDispatcher

        return OverlappedDispatcher
    from megatron_ext.layers.moe import AlltoAllDispatcher

    return AlltoAllDispatcher


class TransformerLayer(CoreTransformerLayer):  # type: ignore[misc]
    """megatron-core's layer with fused parts, our all-to-all dispatcher and our dropout masks.

    A layer may lack attention or the MLP (`layers.specs.torch_layer_spec`).

    Attributes:
        graphs: CUDA graphs that replay the layer in training; None to launch each kernel.
    """

    graphs: LayerGraphs | None = None
    recompute_mlp: bool
    self_attn_bda: Any
    mlp_bda: Any

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        # megatron-core's multi-token-prediction block may pass no process groups.
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        numbered = numbered_after_the_decoder(config, kwargs)
        super().__init__(config, *args, pg_collection=groups, **numbered)
        if getattr(self.config, "xielu", False):
            from megatron_ext.layers.xielu import use_xielu

            use_xielu(self.mlp, groups.tp)
        use_own_mlps(self.mlp)
        if self.recompute_mlp:
            self.mlp.adds_bias = True
        if getattr(self.config, "deterministic_dropout", False):
            from megatron_ext.layers.dropout import BiasDropoutAdd, HiddenDropout

            cut = self.config.sequence_parallel
            self.self_attn_bda, self.mlp_bda = (
                BiasDropoutAdd(
                    HiddenDropout(self.hidden_dropout, f"{name} {self.layer_number}", groups, cut)
                )
                for name in ("attention", "mlp")
            )
        if getattr(self.config, "changes_outputs", False):
            from megatron_ext.layers.branch_outputs import change_outputs

            change_outputs(self)
        mlp = self.mlp
        joins = any(
            getattr(self.config, name, False) for name in ("groups_experts", "multiplies_by_onednn")
        )
        if self.is_moe_layer and joins:
            from megatron_ext.layers.experts import join_experts

            join_experts(mlp)
        if self.is_moe_layer and type(mlp.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            local = mlp.num_local_experts, mlp.local_expert_indices
            mlp.token_dispatcher = _dispatcher_class(self.config)(
                *local, config=self.config, pg_collection=groups
            )
            if mlp.shared_expert_overlap:
                mlp.token_dispatcher.set_shared_experts(mlp.shared_experts)
        # A part that the layer lacks has no output to drop out of, to change and to add.
        if isinstance(self.self_attention, IdentityOp):
            self.self_attn_bda = IdentityFuncOp()
        if isinstance(mlp, IdentityOp):
            self.mlp_bda = IdentityFuncOp()
            self.recompute_mlp = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output and context; replay a CUDA graph if one fits the call."""
        graphs = self.graphs
        if graphs is not None and self.training and torch.is_grad_enabled():
            if graphs.takes(kwargs):
                return graphs.replay(self, kwargs)
            graphs.note(kwargs)
        return super().__call__(*args, **kwargs)

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return output ``[s, b, h]`` and context like megatron-core's layer, but fused."""
        if args or not self._fuses(hidden_states, kwargs):
            given: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return given
        from megatron_ext.layers import fused_layer

        joins = self.self_attn_bda is get_bias_dropout_add
        return fused_layer.forward(self, hidden_states, kwargs, joins_norm=joins)

    def _fuses(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether the fused forward pass supports this call and configuration."""
        if not (x.is_cuda or compiled.compiler.on_cpu):
            return False
        supported = ("attention_mask", "rotary_pos_emb", "padding_mask", "context_mask")
        has_others = any(
            value is not None for name, value in kwargs.items() if name not in supported
        )
        return (
            fusions_of(self.config).bias_dropout
            and not has_others
            and isinstance(self.input_layernorm, (LayerNorm, RMSNorm))
            and isinstance(self.pre_mlp_layernorm, (LayerNorm, RMSNorm))
            and not (self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm)
            and not (self.offload_attn_norm or self.offload_mlp_norm)
            and compiles(x)
        )
