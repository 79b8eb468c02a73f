"""Flags of layers with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.config.flags import (
    FACTOR,
    RATE,
    SHARE,
    SIZE,
    WEIGHT,
    Changeable,
    flag,
    must_divide,
    resumed_flag,
    said_flag,
)
from megatron_ext.config.layers import read_pattern


def layers_with_experts(frequency: int | Sequence[int], num_layers: int) -> list[bool]:
    """Return for each layer of the decoder whether it holds experts.

    Args:
        frequency: n for experts in layers 0, n, 2n and so on, or a truth value for each layer.
    """
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(holds) for holds in frequency]


@dataclass(frozen=True)
class MoEConfig(Changeable):
    """Experts and their router; names and defaults are Megatron-LM's."""

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
        """Return --moe-layer-freq as a number or a list; raise a ValueError if it is neither."""
        return read_pattern(self.moe_layer_freq)

    def expert_layers(self, num_layers: int) -> list[bool]:
        """Return for each layer of the decoder whether it holds experts."""
        if self.num_experts is None:
            return [False] * num_layers
        return layers_with_experts(self.layer_pattern(), num_layers)

    def errors(self, expert_size: int) -> Iterator[str]:
        """Yield a sentence for each fault in these flags, given the expert-parallel size."""
        if self.num_experts is None:
            if expert_size > 1:
                yield (
                    f"`--expert-model-parallel-size` ({expert_size}) needs `--num-experts`; give "
                    "the number of experts."
                )
            return
        size = "--expert-model-parallel-size"
        yield from must_divide("--num-experts", self.num_experts, size, expert_size)
        if not 1 <= self.moe_router_topk <= self.num_experts:
            yield (
                f"`--moe-router-topk` ({self.moe_router_topk}) must be between 1 and "
                f"`--num-experts` ({self.num_experts})."
            )
        try:
            self.layer_pattern()
        except ValueError:
            yield (
                f"`--moe-layer-freq` ({self.moe_layer_freq}) must be a number or a list of 0 and "
                "1; use 1 to give every layer experts."
            )
