"""Translates a run's configuration to a subclass of megatron-core's TransformerConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import scaled_init_method_normal
from torch import Tensor

from megatron_ext.config.parallel import V_SHAPED
from megatron_ext.config.precision import TE_IMPL, PrecisionConfig
from megatron_ext.config.run import RunConfig, transformer_fields
from megatron_ext.core import RECOMPUTES_DEPTHS, kinds_by_layer
from megatron_ext.errors import ConfigError
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.compiled import Fusions
from megatron_ext.layers.weight_gradients import DeferredWeightGradients

if TYPE_CHECKING:
    from megatron_ext.layers.kept_tokens import KeptTokens
    from megatron_ext.parallel.turns import Turns


class VShapedLayerLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """megatron-core's layer layout for the V-shaped schedule, with two chunks on each rank.

    Rank r holds stages r and ``2 * pipeline_size - 1 - r``. All stages have the same number of
    layers; the first one also has the embedding, and the last one the output layer.
    """

    def __init__(self, num_layers: int, pipeline_size: int) -> None:
        self.per_stage = num_layers // (2 * pipeline_size)
        stages = [[LayerType.decoder] * self.per_stage for _ in range(2 * pipeline_size)]
        stages[0].insert(0, LayerType.embedding)
        stages[pipeline_size].append(LayerType.loss)
        super().__init__(stages, pipeline_size)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Return False: no stage holds only multi-token prediction. The layout is not checked."""
        return False

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers before a chunk.

        ``vp_stage`` is the chunk's index on its rank; None counts as 0. ``pp_rank`` is the rank's
        pipeline rank; None means this rank.
        """
        first = int(super().get_layer_offset(layer_type, vp_stage=0, pp_rank=pp_rank))
        last = (2 * self.pipeline_model_parallel_size - 1) * self.per_stage
        return last - first if vp_stage else first


def gelu_tanh(x: Tensor) -> Tensor:
    """Apply GELU in its tanh approximation (arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
"""The activation functions of an MLP, by name."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class StepTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """megatron-core's TransformerConfig with the settings of our own layers.

    Attributes:
        auxiliary_scale: holds the factor of auxiliary losses, which each training step sets.
        weight_gradients: queues of the weight gradients that are computed later, by a zero-bubble
            schedule or with ``--delay-wgrad-compute``; None in other runs.
        turns: runs a forward and a backward pass in turns; None if the schedule has no pairs.
        kept_tokens: the tokens that recomputed layers have dispatched; None exchanges them again.
        deterministic_dropout: whether dropout masks are independent of the parallel layout.
        adds_in_place: whether our linear layers add weight gradients to the data-parallel buffer.
        multiplies_by_onednn: whether our linear layers multiply large matrices by oneDNN.
        groups_experts: whether one grouped matrix product serves all experts of a rank.
        te_gradient_accumulation_fusion: whether Transformer Engine's layers add weight gradients to
            the data-parallel buffer. Unlike megatron-core's layers, they do not need apex for it.
        fusions: the parts of a layer that may be compiled.
        attn_logit_softcapping, final_logit_softcapping: soft caps c of the scores of attention and
            of the logits: x becomes c tanh(x / c). None sets no cap.
        sandwich_norm: whether the outputs of attention and MLP are normalized, too.
        reordered_norm: whether the outputs of attention and MLP are normalized instead of the
            inputs.
        qk_layernorm_all_heads: whether the norms of queries and keys span all heads together.
        qk_layernorm_after_rope: whether queries and keys are normalized after their rotation.
        norm_elementwise_affine: whether norms have weights.
        norm_bias: whether a LayerNorm has a bias.
        use_parallel_residual: whether attention and MLP both read the input of their layer.
        shared_input_norm: whether they then share one norm.
        xielu: whether dense MLPs apply xIELU, whatever ``activation_func`` says.
        embedding_multiplier: factor of the token embeddings.
        residual_multiplier: factor of the outputs of attention and MLP before they are added.
        logits_scaling: divisor of the logits.
        llama_4_scaling_beta: growth of attention's scores with the position; None for none.
        proj_bias, mlp_bias: whether the output projection of attention, and dense MLPs, have biases
            even without ``add_bias_linear``.
        rotary_magnitude: factor of the cosines and sines of scaled rotary positions.
        has_local_rotary: whether layers with a window have their own rotary angles.
        moe_router_group_scores: group-limited routing ranks a group of experts by the sum of this
            many of its best scores; None means router top-k / group top-k.
        moe_router_norm_topk_prob: whether the probabilities of a token's experts, from a softmax
            over all experts, are divided by their sum.
        latent_norm_epsilon: epsilon of the norms within multi-latent attention; None means
            ``layernorm_epsilon``.
        dsa_indexer_rope_interleaved: whether the indexer of sparse attention rotates neighbouring
            channels together, instead of the first half of them with the second.
        dsa_indexer_k_norm_epsilon: epsilon of the norm of the indexer's keys; None means
            ``layernorm_epsilon``.
        layer_kinds: the kind of each decoder layer (see `config.layers`); None if all layers have
            attention, and an MLP or experts by ``moe_layer_freq``.
        depth_kind: the kind of the layer of a depth of multi-token prediction; None for that of the
            last decoder layer.
        mamba_conv_kernel_dim: number of positions of Mamba-2's short convolution.
        mamba_conv_bias: whether this convolution has a bias.
        mamba_time_step_min, mamba_time_step_max: limits of the length of a token's step in Mamba-2;
            None for no upper one.
        rotates_latent_heads: whether multi-latent attention rotates a part of each head.
        moe_ranks_per_node: number of ranks on each node, to which tokens are sent once; None sends
            them as ``moe_token_dispatcher_type`` says.
        moe_keep_dispatched_tokens: whether there are ``kept_tokens``.
        moe_dispatch_fwd_dtype, moe_combine_bwd_dtype: how rows are sent to experts on other ranks,
            tokens and gradients of outputs: fp8 or mxfp8; bf16 sends them in their own dtype.
    """

    auxiliary_scale: AuxiliaryScale | None = None
    weight_gradients: DeferredWeightGradients | None = None
    turns: Turns | None = None
    kept_tokens: KeptTokens | None = None
    deterministic_dropout: bool = False
    adds_in_place: bool = False
    multiplies_by_onednn: bool = False
    groups_experts: bool = False
    te_gradient_accumulation_fusion: bool = False
    fusions: Fusions = Fusions()
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sandwich_norm: bool = False
    reordered_norm: bool = False
    qk_layernorm_all_heads: bool = False
    qk_layernorm_after_rope: bool = False
    norm_elementwise_affine: bool = True
    norm_bias: bool = True
    use_parallel_residual: bool = False
    shared_input_norm: bool = False
    xielu: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    llama_4_scaling_beta: float | None = None
    proj_bias: bool = False
    mlp_bias: bool = False
    rotary_magnitude: float = 1.0
    has_local_rotary: bool = False
    moe_router_group_scores: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_norm_topk_prob: bool = False
    latent_norm_epsilon: float | None = None
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_k_norm_epsilon: float | None = None
    layer_kinds: tuple[str, ...] | None = None
    depth_kind: str | None = None
    mamba_conv_kernel_dim: int = 4
    mamba_conv_bias: bool = True
    mamba_time_step_min: float = 0.0
    mamba_time_step_max: float | None = None
    rotates_latent_heads: bool = True
    moe_ranks_per_node: int | None = None
    moe_keep_dispatched_tokens: bool = False
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_combine_bwd_dtype: str = "bf16"

    def __post_init__(self) -> None:
        """Check the fields by megatron-core's rules, and derive others.

        megatron-core has no bias on the scores of a softmax, which our router has, so its rule
        against one is not asked.
        """
        has_bias: bool = self.moe_router_enable_expert_bias
        if self.moe_router_score_function == "softmax":
            self.moe_router_enable_expert_bias = False
        super().__post_init__()
        self.moe_router_enable_expert_bias = has_bias

    @property
    def changes_outputs(self) -> bool:
        """Return whether the outputs of attention and MLP are normalized or multiplied."""
        return self.sandwich_norm or self.reordered_norm or self.residual_multiplier != 1.0

    @property
    def varies_attention(self) -> bool:
        """Return whether self-attention is a `layers.attention_variants.VariantSelfAttention`."""
        changes = self.llama_4_scaling_beta is not None or self.attention_output_gate
        return changes or self.qk_layernorm_all_heads or self.qk_layernorm_after_rope


@dataclass
class StepMLATransformerConfig(MLATransformerConfig, StepTransformerConfig):  # type: ignore[misc]
    """A `StepTransformerConfig` with the sizes of multi-latent attention."""


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Return the dtype of the parameters that the forward pass uses."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def xavier_uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Draw a matrix by Xavier initialization (Glorot and Bengio, 2010); set a vector to zero."""
    if tensor.dim() < 2:
        return torch.nn.init.zeros_(tensor)
    return torch.nn.init.xavier_uniform_(tensor)


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Translate a run's configuration for megatron-core.

    Two options avoid faults of megatron-core's interleaved schedule (``core-interleaved``).
    ``batch_p2p_comm`` is off: with two stages both neighbours are the same rank, and batched
    messages would be swapped. ``deallocate_pipeline_outputs`` is off: outputs of stages would be
    freed while they are being sent.
    """
    fields: dict[str, Any] = dict(transformer_fields(config))
    model = config.model
    parallel = config.parallel
    dtype = params_dtype(config.precision)
    schedule = parallel.pipeline_schedule
    core_interleaved = schedule == "core-interleaved"
    in_te = model.transformer_impl == TE_IMPL
    fuses = model.gradient_accumulation_fusion
    fields |= {
        "params_dtype": dtype,
        "pipeline_dtype": torch.float32 if model.fp32_residual_connection else dtype,
        "activation_func": ACTIVATIONS[str(fields.get("activation_func", "gelu"))],
        "attention_backend": AttnBackend[str(fields["attention_backend"])],
        "overlap_p2p_comm": core_interleaved,
        "batch_p2p_comm": not core_interleaved,
        "deallocate_pipeline_outputs": not core_interleaved,
        "pipeline_model_parallel_layout": parallel.pipeline_model_parallel_layout,
        "deterministic_dropout": model.deterministic_dropout,
        "final_logit_softcapping": model.final_logit_softcapping,
        "sandwich_norm": model.sandwich_norm,
        "embedding_multiplier": model.embedding_multiplier,
        "proj_bias": model.add_proj_bias,
        "mlp_bias": model.has_mlp_bias,
        "adds_in_place": fuses and not in_te and config.device == "cuda",
        "multiplies_by_onednn": config.device == "cpu" and dtype == torch.float32,
        "te_gradient_accumulation_fusion": fuses and in_te,
        "weight_gradients": DeferredWeightGradients() if parallel.defers_weight_gradients else None,
        "auxiliary_scale": AuxiliaryScale(),
        "fusions": Fusions(
            norm=model.persist_layer_norm,
            activation=model.bias_swiglu_fusion if model.swiglu else model.bias_gelu_fusion,
            rotary=model.apply_rope_fusion,
            bias_dropout=model.bias_dropout_fusion,
        ),
    }
    if schedule in V_SHAPED:
        fields["pipeline_model_parallel_layout"] = VShapedLayerLayout(
            model.num_layers or 0, parallel.pipeline_model_parallel_size
        )
    if model.init_method_xavier_uniform:
        fields |= dict.fromkeys(("init_method", "output_layer_init_method"), xavier_uniform)
    if fields.get("layer_kinds") is not None:
        fields |= _of_kinds(fields)
    latent = fields.get("multi_latent_attention", False)
    kind = StepMLATransformerConfig if latent else StepTransformerConfig
    transformer_config = kind(**fields)
    if parallel.overlap_moe_expert_parallel_comm:
        from megatron_ext.parallel.turns import Turns

        recomputes = transformer_config.recompute_granularity is not None
        transformer_config.turns = Turns(
            keeps_random_states=recomputes,
            releases_early=parallel.ep_overlap_early_attn_memory_release,
        )
    if transformer_config.moe_keep_dispatched_tokens:
        from megatron_ext.layers.kept_tokens import KeptTokens

        transformer_config.kept_tokens = KeptTokens()
    kinds = transformer_config.cp_comm_type
    if isinstance(kinds, list):
        transformer_config.cp_comm_type = kinds_by_layer(kinds, transformer_config)
    return transformer_config


def _of_kinds(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that follow from ``layer_kinds``.

    megatron-core divides the standard deviation of output layers by the root of twice the number of
    layers, since that many modules add to the residual stream; a layer here may have one of them.
    """
    kinds = fields["layer_kinds"]
    # Layers that differ have no tensor in common, so checkpoints hold the tensors of each.
    derived: dict[str, Any] = {"hetereogenous_dist_checkpoint": len(set(kinds)) > 1}
    if "output_layer_init_method" not in fields:
        derived["output_layer_init_method"] = scaled_init_method_normal(
            fields["init_method_std"], sum(map(len, kinds)), multiplier=1.0
        )
    return derived


def check_core(config: RunConfig) -> TransformerConfig:
    """Build a run's TransformerConfig, which checks megatron-core's rules.

    Raises:
        ConfigError: the run breaks a rule of megatron-core; the message says which.
    """
    try:
        transformer_config = build_transformer_config(config)
    except (AssertionError, ValueError) as error:
        said = " ".join(str(error).split()) or "an assertion without a message"
        raise ConfigError(
            f"megatron-core refuses this model: {said.rstrip('.')}; change the flags that it names."
        ) from error
    model = config.model
    if model.mtp_num_layers and model.recompute_granularity == "full" and not RECOMPUTES_DEPTHS:
        raise ConfigError(
            "`--recompute-granularity full` with `--mtp-num-layers` fails in this release of "
            "megatron-core, whose depths refuse an argument of its own; use selective, or another "
            "megatron-core."
        )
    return transformer_config
