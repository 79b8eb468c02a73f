"""Layer specs with Transformer Engine's layers or with our torch layers.

The torch spec is megatron-core's local spec with our norm, attention, linear layers and router.
Our layers also work under sequence and context parallelism and without Transformer Engine. The
torch spec keeps the local spec's parameter names and order of initialization.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs as gpt_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_ext import core
from megatron_ext.config.layers import (
    ATTENTION,
    EXPERTS,
    layers_with_experts,
    mixer_of,
    mlp_of,
)
from megatron_ext.config.model import RECOMPUTED_WITH_TE
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.linear import (
    BiasedColumnParallelLinear,
    BiasedRowParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
)
from megatron_ext.layers.norms import Norm
from megatron_ext.layers.transformer_layer import (
    SelfAttention,
    TransformerLayer,
    get_bias_dropout_add,
)


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules, with our norm, attention and linear layers."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return DotProductAttention

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> Any:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return core.experts_builder(SequentialMLP, linear)


class BiasedSpecProvider(TorchSpecProvider):
    """Our modules, with biases in all linear layers."""

    def column_parallel_linear(self) -> type:
        return BiasedColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return BiasedRowParallelLinear


def _has_own_bias(transformer_config: TransformerConfig, name: str) -> bool:
    """Return whether one kind of linear layer has a bias although the model's others have none.

    ``name`` is ``proj_bias`` for the output projection of attention, ``mlp_bias`` for dense MLPs.
    """
    return not transformer_config.add_bias_linear and getattr(transformer_config, name, False)


def torch_layer_spec(transformer_config: TransformerConfig, kind: str) -> ModuleSpec:
    """Return the spec of a transformer layer of this kind (see `config.layers`)."""
    mixer: Any = IdentityOp
    mlp: Any = IdentityOp
    names: dict[str, str] = {}
    input_norm: Any = Norm
    if getattr(transformer_config, "reordered_norm", False):
        from megatron_ext.layers.weightless_norm import Unnormalized

        input_norm = Unnormalized
    if mixer_of(kind) == ATTENTION:
        mixer, names = _attention(transformer_config)
    elif mixer_of(kind):
        from megatron_ext.layers.mixers.specs import mixer_spec

        mixer, names = mixer_spec(mixer_of(kind), transformer_config)
    if mlp_of(kind):
        mlp = _mlp(transformer_config, moe=mlp_of(kind) == EXPERTS)
    layer: Any = TransformerLayer
    mlp_norm: Any = input_norm
    if getattr(transformer_config, "use_parallel_residual", False):
        from megatron_ext.layers.parallel_residual import ParallelLayer

        layer = ParallelLayer
        mlp_norm = IdentityOp if transformer_config.shared_input_norm else input_norm
    if mlp_of(kind) != EXPERTS:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm if mixer_of(kind) else IdentityOp,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=mlp_norm if mlp_of(kind) else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # Transformer Engine's fused layers use these names in checkpoints for the same tensors.
            # So each spec can load what the other has saved.
            sharded_state_dict_keys_map=names,
        ),
    )


def _mlp(transformer_config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    """Return the spec of a layer's experts if ``moe``, else of its dense MLP."""
    biased = not moe and _has_own_bias(transformer_config, "mlp_bias")
    mlp = gpt_specs.get_mlp_module_spec_for_backend(
        BiasedSpecProvider() if biased else TorchSpecProvider(),
        num_experts=transformer_config.num_moe_experts if moe else None,
        moe_grouped_gemm=False,
    )
    if moe:
        from megatron_ext.layers.moe import Router

        core.moe_submodules(mlp).router = Router
        if transformer_config.moe_latent_size is not None:
            from megatron_ext.layers.latent_experts import LatentMoELayer

            mlp = core.with_module(mlp, LatentMoELayer)
    return mlp


def _attention(transformer_config: TransformerConfig) -> tuple[ModuleSpec, dict[str, str]]:
    """Return the spec of a layer's attention, and a mapping of prefixes of parameter names.

    The mapping translates the prefixes of the norms' parameters in the model to their prefixes in
    sharded checkpoints.
    """
    causal = {"attn_mask_type": AttnMaskType.causal}
    qk_norm: Any = Norm if transformer_config.qk_layernorm else IdentityOp
    biased = _has_own_bias(transformer_config, "proj_bias")
    proj = BiasedRowParallelLinear if biased else RowParallelLinear
    if transformer_config.multi_latent_attention:
        modules = MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=WholeLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=WholeLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=proj,
            q_layernorm=qk_norm,
            kv_layernorm=qk_norm,
        )
        from megatron_ext.layers.latent_attention import NORM_NAMES, LatentAttention

        spec = ModuleSpec(module=LatentAttention, params=causal, submodules=modules)
        return spec, dict(NORM_NAMES)
    kind: Any = SelfAttention
    if getattr(transformer_config, "varies_attention", False):
        from megatron_ext.layers.attention_variants import VariantSelfAttention, norm_in_core

        kind = VariantSelfAttention
        qk_norm = norm_in_core(transformer_config, qk_norm)
    modules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=proj,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return ModuleSpec(module=kind, params=causal, submodules=modules), names


def layer_kinds(transformer_config: TransformerConfig) -> list[str]:
    """Return the kind of each layer of the decoder (see `config.layers`).

    Raises:
        ConfigError: ``moe_layer_freq`` is a list whose length is not the number of layers.
    """
    kinds = getattr(transformer_config, "layer_kinds", None)
    if kinds is not None:
        return list(kinds)
    num_layers = transformer_config.num_layers
    if transformer_config.num_moe_experts is None:
        return ["*-"] * num_layers
    pattern = layers_with_experts(transformer_config.moe_layer_freq, num_layers)
    if len(pattern) != num_layers:
        raise ConfigError(
            f"`--moe-layer-freq` has {len(pattern)} entries, but must have one for each of the "
            f"{num_layers} layers."
        )
    return ["*E" if has_experts else "*-" for has_experts in pattern]


def depth_kind(transformer_config: TransformerConfig) -> str:
    """Return the kind of the layer of a depth of multi-token prediction; see `layer_kinds`."""
    return getattr(transformer_config, "depth_kind", None) or layer_kinds(transformer_config)[-1]


def _adapted(layers: Sequence[ModuleSpec], transformer_config: TransformerConfig) -> None:
    """Put our router, and `GradientAccumulatingLayer` if configured, into the given layer specs."""
    for layer in layers:
        experts = core.moe_submodules(getattr(layer.submodules, "mlp", None))
        if experts is not None:
            from megatron_ext.layers.moe import Router

            experts.router = Router
    if getattr(transformer_config, "te_gradient_accumulation_fusion", False):
        from megatron_ext.layers.transformer_engine import accumulate_gradients

        accumulate_gradients(layers)


def layer_spec(
    transformer_config: TransformerConfig,
    *,
    impl: str,
    vp_stage: int | None = None,
    all_layers: bool = False,
) -> TransformerBlockSubmodules:
    """Return the specs of a pipeline chunk's decoder layers and of the final norm.

    Args:
        impl: ``transformer_engine`` for Transformer Engine's layers, anything else for ours.
        vp_stage: index of the chunk on this rank under virtual pipeline parallelism.
        all_layers: whether to return the specs of all layers of the decoder instead.

    Raises:
        ConfigError: an option needs Transformer Engine, which is not installed, or the length of
            ``moe_layer_freq`` is not the number of layers.
    """
    normalization = transformer_config.normalization
    if impl == TE_IMPL:
        block = gpt_specs.get_gpt_decoder_block_spec(
            transformer_config, True, normalization=normalization, vp_stage=vp_stage
        )
        if all_layers:
            block.layer_specs = gpt_specs.get_gpt_decoder_layer_specs(
                transformer_config, True, normalization=normalization
            )
        _adapted(block.layer_specs, transformer_config)
        return block
    # megatron-core discards the outputs of these modules with a function of Transformer Engine.
    needing = [x for x in transformer_config.recompute_modules or () if x in RECOMPUTED_WITH_TE]
    selective = transformer_config.recompute_granularity == "selective"
    if selective and needing and not has_transformer_engine():
        raise ConfigError(
            f"`--recompute-modules {needing[0]}` needs Transformer Engine, which is not "
            "installed; use core_attn, mlp, moe or shared_experts."
        )
    kinds = layer_kinds(transformer_config)
    own = kinds if all_layers else kinds[layers_of_chunk(transformer_config, vp_stage)]
    layers = [torch_layer_spec(transformer_config, kind) for kind in own]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def layers_of_chunk(transformer_config: TransformerConfig, vp_stage: int | None) -> slice:
    """Return which of the decoder's layers a pipeline chunk of this rank holds."""
    first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
    return slice(first, first + get_num_layers_to_build(transformer_config, vp_stage=vp_stage))


def mtp_block_spec(
    transformer_config: TransformerConfig,
    *,
    impl: str,
    vp_stage: int | None = None,
    layer: ModuleSpec | None = None,
) -> ModuleSpec | None:
    """Return the spec of the multi-token-prediction block; None if this chunk has none.

    Each of its layers has the spec ``layer``, by default that of a layer of `depth_kind`.
    """
    if impl == TE_IMPL:
        layers = [layer]
        if layer is None:
            layers = gpt_specs.get_gpt_decoder_layer_specs(
                transformer_config, True, normalization=transformer_config.normalization
            )
            _adapted(layers, transformer_config)
        # megatron-core accepts a single layer only of its own class, but a block with layers of any
        # class.
        block = TransformerBlockSubmodules(layer_specs=layers)
        return gpt_specs.get_gpt_mtp_block_spec(transformer_config, block, True, vp_stage=vp_stage)
    if layer is None:
        layer = torch_layer_spec(transformer_config, depth_kind(transformer_config))
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=Norm)
    return gpt_specs.get_gpt_mtp_block_spec_for_backend(
        transformer_config, block, TorchSpecProvider(), vp_stage=vp_stage
    )
