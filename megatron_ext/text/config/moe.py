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
    must_divide,
    resumed_flag,
    said_flag,
)
from megatron_ext.config.layers import layers_with_experts, read_pattern
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import TARGETS
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rules.precision import side_errors
from megatron_ext.config.run import LayerSection, RunConfig, has_te_layers
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import FlagError
from megatron_ext.text.config.attention import LatentAttentionConfig

FUSIONS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
"""Names of the fields for kernels that megatron-core runs only in Transformer Engine's layers."""
CAPACITY_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
TENSOR = "--tensor-model-parallel-size"
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
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of the shared expert, which every token passes; without it there is none", SIZE
    )
    moe_shared_expert_gate: bool = flag(False, "scale the shared expert's output by a learned gate")
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
        choices="allgather alltoall",
        advice="use alltoall, which gives the same results",
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
    moe_layer_recompute: bool = flag(False, "recompute the experts in the backward pass")
    moe_grouped_gemm: bool = flag(
        False, "multiply the tokens of all experts of a rank in one kernel, in bf16 on Hopper"
    )
    moe_permute_fusion: bool = flag(False, "fuse the permutation of tokens")
    moe_router_fusion: bool = flag(False, "fuse the router's pointwise operations")
    moe_apply_probs_on_input: bool = resumed_flag(False, "weight an expert's input, not its output")

    def layer_pattern(self) -> int | list[int]:
        """Return ``--moe-layer-freq`` as a number or a list.

        Raise a ValueError if it is neither.
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
        """Yield an error for each wrong flag of experts, and each flag that experts do not support.

        For a dense model, yield an error for each flag that needs experts.
        """
        if self.num_experts is None:
            yield from _errors_without_experts(config)
            return
        model = config.model
        size = "--expert-model-parallel-size"
        ranks = max(1, config.parallel.expert_model_parallel_size)
        yield from must_divide("--num-experts", self.num_experts, size, ranks)
        if not 1 <= self.moe_router_topk <= self.num_experts:
            yield FlagError(
                "--moe-router-topk",
                self.moe_router_topk,
                f"must be between 1 and `--num-experts` ({self.num_experts})",
            )
        try:
            self.layer_pattern()
        except ValueError:
            yield FlagError(
                "--moe-layer-freq",
                self.moe_layer_freq,
                "must be a number or a list of 0 and 1",
                "use 1 to give every layer experts",
            )
        if model.num_layers and model.hidden_size and model.num_attention_heads:
            yield from _expert_errors(self, model, config.parallel)
            yield from _router_errors(self)
            yield from _dispatch_errors(self, config.parallel, config.training, model)
        yield from _adapter_errors(self, config)
        yield from _fp8_errors(self, config)
        if config.cuda_graphs.cuda_graph_impl == "local":
            yield FlagError(
                "--cuda-graph-impl local",
                None,
                "does not go with `--num-experts`, whose experts get any number of tokens",
            )


def _uses_te(config: RunConfig) -> bool:
    return config.model.transformer_impl == TE_IMPL


def _errors_without_experts(config: RunConfig) -> Iterator[FlagError]:
    ranks = config.parallel.expert_model_parallel_size
    if ranks > 1:
        yield FlagError(
            "--expert-model-parallel-size",
            ranks,
            "needs `--num-experts`",
            "give the number of experts",
        )
    if _pads(config):
        yield FlagError(PADDING, None, "needs `--num-experts`", "give both")


def _pads(config: RunConfig) -> bool:
    """Return whether each expert's tokens are padded to a number that 8-bit matrix products need.

    Only Transformer Engine's layers can pad them.
    """
    fp8 = config.fp8
    asked = fp8.fp8_format is not None and fp8.moe_router_padding_for_quantization
    return asked and _uses_te(config)


def _fp8_errors(moe: MoEConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that prevents experts from computing in 8 bits."""
    if config.fp8.fp8_format is None:
        return
    dispatcher = moe.moe_token_dispatcher_type
    if _pads(config) and dispatcher == "allgather":
        yield FlagError(
            PADDING,
            None,
            f"does not go with `--moe-token-dispatcher-type` ({dispatcher})",
            "use alltoall",
        )
    tp = config.parallel.tensor_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size or tp
    shared = moe.moe_shared_expert_intermediate_size
    sides = [
        ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size, etp),
        ("--moe-shared-expert-intermediate-size", shared, tp),
    ]
    yield from side_errors(config.fp8, sides)


def _adapter_errors(moe: MoEConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error if the flags ask for LoRA adapters on experts."""
    lora = config.lora
    if lora.lora_rank is None:
        return
    targets = TARGETS if lora.lora_target_modules is None else lora.lora_target_modules
    mlp = [name for name in targets if name.startswith("linear_fc")]
    if mlp:
        latent = config.section(LatentAttentionConfig).multi_latent_attention
        projections = "linear_q_up_proj linear_kv_up_proj" if latent else "linear_qkv"
        yield FlagError(
            "--lora-target-modules",
            " ".join(mlp),
            f"does not go with `--num-experts` ({moe.num_experts}), since experts take no adapters",
            f"use {projections} linear_proj",
        )


def _expert_errors(
    moe: MoEConfig, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[FlagError]:
    """Yield an error for each fault in the sizes, the biases and the layers of experts."""
    tp = max(1, parallel.tensor_model_parallel_size)
    etp = parallel.expert_tensor_parallel_size or tp
    width = moe.moe_ffn_hidden_size
    shared_width = moe.moe_shared_expert_intermediate_size
    yield from must_divide("--moe-ffn-hidden-size", width, "--expert-tensor-parallel-size", etp)
    yield from must_divide("--moe-shared-expert-intermediate-size", shared_width, TENSOR, tp)
    if model.add_bias_linear and shared_width:
        yield FlagError(
            "Experts with biases",
            None,
            "do not go with a shared expert",
            "give `--disable-bias-linear`",
        )
    elif model.add_bias_linear and etp > 1:
        yield FlagError(
            "Experts with biases",
            None,
            f"do not go with `--expert-tensor-parallel-size` ({etp})",
            "give `--expert-tensor-parallel-size 1` or `--disable-bias-linear`",
        )
    if model.add_mlp_bias and not model.add_bias_linear:
        yield FlagError(
            "--add-mlp-bias",
            None,
            "gives biases to dense MLPs, not to experts",
            "leave it out, or use `--add-bias-linear`, which gives them to all layers",
        )
    try:
        pattern = moe.layer_pattern()
    except ValueError:
        return  # said by the section itself
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        yield FlagError(
            "--moe-layer-freq",
            None,
            f"has {len(pattern)} entries, but must have one for each of the {model.num_layers} "
            "layers",
        )
    if isinstance(pattern, int) and pattern < 1:
        yield FlagError("--moe-layer-freq", pattern, "must be at least 1", "use 1")


def _router_errors(moe: MoEConfig) -> Iterator[FlagError]:
    kinds = moe.moe_router_load_balancing_type
    weights = moe.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        yield FlagError(
            "--moe-aux-loss-coeff",
            None,
            f"has {len(weights)} value(s), but `--moe-router-load-balancing-type` has {len(kinds)}",
            "give one for each",
        )
    if "sinkhorn" in kinds and any(weights):
        yield FlagError(
            "--moe-aux-loss-coeff",
            " ".join(f"{x:g}" for x in weights),
            "must be 0 with `--moe-router-load-balancing-type sinkhorn`",
            "leave it out",
        )
    softmax = moe.moe_router_score_function == "softmax"
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        yield FlagError(
            "--moe-router-enable-expert-bias",
            None,
            "needs `--moe-router-score-function sigmoid`",
            "give both",
        )
    one = moe.moe_router_topk == 1 and kinds != ["sinkhorn"]
    if one and softmax and not moe.moe_router_pre_softmax:
        yield FlagError(
            "--moe-router-topk",
            "1",
            "with a softmax over one expert has no gradient",
            "give `--moe-router-pre-softmax`",
        )
    chosen = moe.moe_router_group_topk
    groups = moe.moe_router_num_groups
    if chosen is None:
        if moe.moe_router_group_scores is not None:
            yield FlagError(
                "--moe-router-group-scores",
                moe.moe_router_group_scores,
                "needs `--moe-router-group-topk`",
                "give both",
            )
        return
    if not groups:
        yield FlagError(
            "--moe-router-group-topk", chosen, "needs `--moe-router-num-groups`", "give both"
        )
        return
    yield from must_divide("--num-experts", moe.num_experts, "--moe-router-num-groups", groups)
    if not 1 <= chosen <= groups:
        yield FlagError(
            "--moe-router-group-topk",
            chosen,
            f"must be between 1 and `--moe-router-num-groups` ({groups})",
        )
    ranked = moe.moe_router_group_scores
    group_size = (moe.num_experts or 0) // groups
    if ranked is not None and ranked > group_size:
        yield FlagError(
            "--moe-router-group-scores",
            ranked,
            f"must be at most the experts of a group ({group_size})",
            f"use {group_size} or less",
        )
    if ranked is not None and moe.moe_router_fusion:
        yield FlagError(
            "--moe-router-fusion",
            None,
            "ranks groups as Megatron-LM does",
            "leave it out with `--moe-router-group-scores`",
        )


def _dispatch_errors(
    moe: MoEConfig, parallel: ParallelConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[FlagError]:
    """Yield an error for each wrong flag about sending tokens to experts."""
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel and not training.skip_train:
        yield FlagError(
            "Training `--num-experts` with `--tensor-model-parallel-size`",
            tp,
            "needs `--sequence-parallel`",
            "give it",
        )
    capacity = moe.moe_expert_capacity_factor
    wrong = [x for x in moe.moe_router_load_balancing_type if x not in CAPACITY_BALANCING]
    if capacity is not None and wrong:
        yield FlagError(
            "--moe-expert-capacity-factor",
            f"{capacity:g}",
            f"does not go with `--moe-router-load-balancing-type {wrong[0]}`",
            "use aux_loss",
        )
    if capacity is None and moe.moe_pad_expert_input_to_capacity:
        yield FlagError(
            "--moe-pad-expert-input-to-capacity",
            None,
            "needs `--moe-expert-capacity-factor`",
            "give both",
        )
    if moe.moe_layer_recompute and model.recompute_granularity == "full":
        yield FlagError(
            "--moe-layer-recompute",
            None,
            "has no effect beside `--recompute-granularity full`",
            "leave one out",
        )
    if moe.moe_apply_probs_on_input and moe.moe_router_topk != 1:
        yield FlagError(
            "--moe-apply-probs-on-input",
            None,
            f"needs `--moe-router-topk` ({moe.moe_router_topk}) to be 1",
            "leave it out",
        )
