"""Flags of layers with a mixture of experts, and their rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    FACTOR,
    RATE,
    SHARE,
    SIZE,
    WEIGHT,
    flag,
    resumed_flag,
    said_flag,
)
from megatron_ext.config.layers import layers_with_experts, read_pattern
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import LayerSection, RunConfig, has_te_layers
from megatron_ext.errors import FlagError

FUSIONS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
"""Fields that turn on fused kernels which megatron-core has only in Transformer Engine's layers."""
PADDING = "--moe-router-padding-for-quantization"


@dataclass(frozen=True)
class MoEConfig(LayerSection):
    """The flags of experts and their router; names and defaults are Megatron-LM's."""

    SECTION: ClassVar[str] = "moe"

    num_experts: int | None = flag(None, "experts of a layer; none makes a dense model", SIZE)
    moe_layer_freq: str = flag("1", "every n-th layer holds experts, or a list such as [1,0,1]")
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert's MLP; default: --ffn-hidden-size", SIZE
    )
    moe_latent_size: int | None = flag(
        None,
        "channels to which tokens are projected for their experts, and from which back (Nemotron "
        "3); default: the experts see the hidden state",
        SIZE,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of the shared expert, which every token passes; without it there is none", SIZE
    )
    moe_shared_expert_gate: bool = flag(False, "scale the shared expert's output by a learned gate")
    moe_shared_expert_overlap: bool = flag(
        False, "compute the shared expert while the other experts exchange tokens"
    )
    moe_router_topk: int = resumed_flag(2, "experts that each token is sent to", SIZE)
    moe_router_load_balancing_type: list[str] = said_flag(
        ["aux_loss"],
        "losses or methods that balance the load of the experts",
        choices="aux_loss seq_aux_loss global_aux_loss sinkhorn none",
        nargs="+",
    )
    moe_aux_loss_coeff: list[float] = said_flag(
        [0.0], "weight of the load-balancing loss", WEIGHT, nargs="+"
    )
    moe_z_loss_coeff: float | None = said_flag(None, "weight of the router z-loss", WEIGHT)
    moe_input_jitter_eps: float | None = said_flag(
        None, "half width of the uniform noise on the router's input", SHARE
    )
    moe_router_dtype: str | None = said_flag(
        None, "dtype of the router's logits", choices="fp32 fp64"
    )
    moe_router_score_function: str = resumed_flag(
        "softmax", "function from the router's logits to scores", choices="softmax sigmoid"
    )
    moe_router_pre_softmax: bool = resumed_flag(
        False, "take the softmax before the top experts are chosen"
    )
    moe_router_norm_topk_prob: bool = resumed_flag(
        False,
        "divide a token's probabilities by their sum, after --moe-router-pre-softmax",
    )
    moe_router_num_groups: int | None = resumed_flag(
        None, "groups of experts, of which a token may choose only --moe-router-group-topk", SIZE
    )
    moe_router_group_topk: int | None = resumed_flag(
        None, "groups of experts that a token may choose from", SIZE
    )
    moe_router_group_scores: int | None = resumed_flag(
        None,
        "best scores of a group that are summed to rank it; default: --moe-router-topk over "
        "--moe-router-group-topk, as in Megatron-LM; DeepSeek-V2 takes 1 and V3 takes 2",
        SIZE,
    )
    moe_router_topk_scaling_factor: float | None = resumed_flag(
        None, "factor on the scores of the chosen experts", FACTOR
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "balance the experts with a bias on the router's scores instead of a loss"
    )
    moe_router_bias_update_rate: float = said_flag(
        1e-3,
        "step of the bias of --moe-router-enable-expert-bias; --lora-rank freezes the bias",
        RATE,
    )
    moe_router_force_load_balancing: bool = said_flag(
        False, "route tokens at random, for benchmarks"
    )
    moe_token_dispatcher_type: str = flag(
        "allgather",
        "method that brings tokens to their experts",
        choices="allgather alltoall flex",
    )
    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        "library that --moe-token-dispatcher-type flex uses on GPUs where it is installed",
        choices="deepep hybridep ncclep",
    )
    moe_ranks_per_node: int | None = flag(
        None,
        "consecutive ranks that --moe-token-dispatcher-type flex takes for a node, to which it "
        "sends a token once; default: those that the launcher has started on this machine",
        SIZE,
        "ranks",
    )
    moe_dispatch_fwd_dtype: str = said_flag(
        "bf16",
        "format in which tokens go to experts on other ranks: fp8 with a scale for 128 values, or "
        "mxfp8 with one for 32; bf16 leaves them as they are",
        choices="bf16 fp8 mxfp8",
    )
    moe_combine_bwd_dtype: str = said_flag(
        "bf16",
        "format in which the gradients of outputs go to experts on other ranks, like "
        "--moe-dispatch-fwd-dtype",
        choices="bf16 fp8 mxfp8",
    )
    moe_expert_capacity_factor: float | None = said_flag(
        None,
        "capacity of an expert over an even share of the tokens; tokens beyond it are dropped",
        FACTOR,
    )
    moe_pad_expert_input_to_capacity: bool = said_flag(
        False, "pad the input of each expert to its capacity"
    )
    moe_token_drop_policy: str = said_flag(
        "probs", "tokens to drop beyond an expert's capacity", choices="probs position"
    )
    moe_keep_dispatched_tokens: bool = flag(
        False,
        "keep the tokens that the experts of recomputed layers have got, so that the backward pass "
        "exchanges only gradients",
    )
    moe_layer_recompute: bool = flag(False, "recompute the experts in the backward pass")
    moe_grouped_gemm: bool = flag(
        False, "multiply the tokens of all experts of a rank in one kernel, in bf16 on Hopper"
    )
    moe_permute_fusion: bool = flag(False, "fuse the permutation of tokens")
    moe_router_fusion: bool = flag(False, "fuse the router's pointwise operations")
    moe_apply_probs_on_input: bool = resumed_flag(False, "weight an expert's input, not its output")

    def layer_pattern(self) -> int | list[int]:
        """Return ``--moe-layer-freq``: n if every n-th layer has experts, else a list.

        The list has 1 for each layer with experts and 0 for each other layer. Raise a ValueError
        if the flag is neither a number nor a list.
        """
        return read_pattern(self.moe_layer_freq)

    def expert_layers(self, num_layers: int) -> list[bool]:
        """Return, for each decoder layer, whether it has experts."""
        if self.num_experts is None:
            return [False] * num_layers
        return layers_with_experts(self.layer_pattern(), num_layers)

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of `StepTransformerConfig` for experts, with their values.

        Return {} for a dense model.

        Raises:
            ValueError: ``--moe-layer-freq`` is neither a number nor a list.
        """
        if self.num_experts is None:
            return {}
        te = has_te_layers(config)
        on_gpu = config.device == "cuda"
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k.startswith("moe_")}
        kinds = self.moe_router_load_balancing_type
        weights = self.moe_aux_loss_coeff
        fields.update(
            num_moe_experts=self.num_experts,
            moe_layer_freq=self.layer_pattern(),
            moe_router_load_balancing_type=kinds[0] if len(kinds) == 1 else kinds,
            moe_aux_loss_coeff=weights[0] if len(weights) == 1 else weights,
            groups_experts=self.moe_grouped_gemm and on_gpu and not _uses_te(config),
            **{name: fields[name] and te for name in FUSIONS},
        )
        fields["moe_ranks_per_node"] = None
        if self.moe_keep_dispatched_tokens:
            from megatron_ext.text.config.flex import keeps_tokens, values_of

            fields["moe_keep_dispatched_tokens"] = keeps_tokens(values_of(self, config))
        if self.moe_token_dispatcher_type == "flex":
            from megatron_ext.text.config.flex import flex_fields, values_of

            fields |= flex_fields(values_of(self, config), config.parallel)
        else:
            # Releases of megatron-core refuse some libraries that this dispatcher does not use.
            del fields["moe_flex_dispatcher_backend"]
        if config.model.add_bias_linear or not config.model.swiglu:
            # megatron-core's experts have no fused form of other activations and of biases.
            fields["bias_activation_fusion"] = False
        return fields

    def te_versions(self, config: RunConfig) -> Mapping[str, str]:
        """Map ``--moe-router-fusion`` to the oldest Transformer Engine release that supports it.

        Return {} if the flag is not given or has no effect.
        """
        fuses = bool(self.num_experts and self.moe_router_fusion) and _uses_te(config)
        return {"--moe-router-fusion": "2.7.0"} if fuses else {}

    def errors(self, config: RunConfig) -> Iterator[FlagError]:
        """Yield an error for each flag that needs experts, if the model has none."""
        if self.num_experts is not None:
            return
        ranks = config.parallel.expert_model_parallel_size
        if ranks > 1:
            yield FlagError(
                "--expert-model-parallel-size",
                ranks,
                "needs `--num-experts`",
                "give the number of experts",
            )
        if pads_for_quantization(config):
            yield FlagError(PADDING, None, "needs `--num-experts`", "give both")


def _uses_te(config: RunConfig) -> bool:
    return config.model.transformer_impl == TE_IMPL


def pads_for_quantization(config: RunConfig) -> bool:
    """Return whether each expert's token count is padded to a multiple that 8-bit products need.

    Only Transformer Engine's layers can do this.
    """
    fp8 = config.fp8
    asked = fp8.fp8_format is not None and fp8.moe_router_padding_for_quantization
    return asked and _uses_te(config)
