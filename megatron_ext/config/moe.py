"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import FACTOR, RATE, SHARE, SIZE, WEIGHT, IfChanged, flag


@dataclass(frozen=True)
class MoEConfig:
    """Experts and their router; names and defaults are Megatron-LM's."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    num_experts: int | None = flag(
        None, "experts of a layer; none makes a dense model", bounds=SIZE
    )
    moe_layer_freq: str = flag("1", "every n-th layer holds experts, or a list such as [1,0,1]")
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert's MLP; default: --ffn-hidden-size", bounds=SIZE
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "width of the shared expert, which every token passes; default: no shared expert",
        bounds=SIZE,
    )
    moe_shared_expert_gate: bool = flag(
        False, "multiply the output of the shared expert by a learned gate"
    )
    moe_router_topk: int = flag(
        2, "experts that each token is sent to", bounds=SIZE, if_changed="refuse_to_resume"
    )
    moe_router_load_balancing_type: list[str] = flag(
        ["aux_loss"],
        "losses or methods that balance the load of the experts",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        nargs="+",
        if_changed="say",
    )
    moe_aux_loss_coeff: list[float] = flag(
        [0.0], "weight of the load-balancing loss", nargs="+", bounds=WEIGHT, if_changed="say"
    )
    moe_z_loss_coeff: float | None = flag(
        None, "weight of the router z-loss", bounds=WEIGHT, if_changed="say"
    )
    moe_input_jitter_eps: float | None = flag(
        None,
        "half width of the uniform noise on the router's input",
        bounds=SHARE,
        if_changed="say",
    )
    moe_router_dtype: str | None = flag(
        None, "dtype of the router's logits", choices=("fp32", "fp64"), if_changed="say"
    )
    moe_router_score_function: str = flag(
        "softmax",
        "function from the router's logits to scores",
        choices=("softmax", "sigmoid"),
        if_changed="refuse_to_resume",
    )
    moe_router_pre_softmax: bool = flag(
        False, "take the softmax before the top experts are chosen", if_changed="refuse_to_resume"
    )
    moe_router_num_groups: int | None = flag(
        None,
        "groups of experts, of which a token may choose only --moe-router-group-topk",
        bounds=SIZE,
        if_changed="refuse_to_resume",
    )
    moe_router_group_topk: int | None = flag(
        None,
        "groups of experts that a token may choose from",
        bounds=SIZE,
        if_changed="refuse_to_resume",
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None,
        "factor on the scores of the chosen experts",
        bounds=FACTOR,
        if_changed="refuse_to_resume",
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "balance the experts with a bias on the router's scores instead of a loss"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "step of the bias of --moe-router-enable-expert-bias", bounds=RATE, if_changed="say"
    )
    moe_router_force_load_balancing: bool = flag(
        False, "route tokens at random, for benchmarks", if_changed="say"
    )
    moe_token_dispatcher_type: str = flag(
        "allgather", "method that brings tokens to their experts", choices=("allgather", "alltoall")
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "capacity of an expert over an even share of the tokens; tokens beyond it are dropped",
        bounds=FACTOR,
        if_changed="say",
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "pad the input of each expert to its capacity", if_changed="say"
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "tokens to drop beyond an expert's capacity",
        choices=("probs", "position"),
        if_changed="say",
    )
    moe_layer_recompute: bool = flag(False, "recompute the experts in the backward pass")
    moe_grouped_gemm: bool = flag(
        False,
        "compute all experts of a rank in one kernel",
        gpu_only="a kernel of Transformer Engine",
    )
    moe_permute_fusion: bool = flag(
        False, "fuse the permutation of tokens", gpu_only="a kernel of Transformer Engine"
    )
    moe_router_fusion: bool = flag(
        False, "fuse the router's pointwise operations", gpu_only="a kernel of Transformer Engine"
    )
    moe_apply_probs_on_input: bool = flag(
        False, "weight the input of an expert, not its output", if_changed="refuse_to_resume"
    )

    def layer_pattern(self) -> int | list[int]:
        """Return --moe-layer-freq as a number or a list.

        Raises:
            ValueError: neither.
        """
        text = self.moe_layer_freq.strip()
        if text.startswith("[") and text.endswith("]"):
            # "[1,0]*2" and "([0]*1+[1]*26)" are written with products and sums.
            return [int(part) for part in text[1:-1].split(",")]
        if "[" in text:
            return _expand(text)
        return int(text)

    def errors(self, expert_size: int) -> list[str]:
        """Return a sentence for everything that cannot be built."""
        found = []
        if self.num_experts is None:
            if expert_size > 1:
                found.append(
                    f"`--expert-model-parallel-size` ({expert_size}) needs `--num-experts`; give "
                    "the number of experts."
                )
            return found
        if self.num_experts % expert_size:
            found.append(
                f"`--num-experts` ({self.num_experts}) must be divisible by "
                f"`--expert-model-parallel-size` ({expert_size}); use "
                f"{-(-self.num_experts // expert_size) * expert_size}."
            )
        if not 1 <= self.moe_router_topk <= self.num_experts:
            found.append(
                f"`--moe-router-topk` ({self.moe_router_topk}) must be between 1 and "
                f"`--num-experts` ({self.num_experts})."
            )
        try:
            self.layer_pattern()
        except ValueError:
            found.append(
                f"`--moe-layer-freq` ({self.moe_layer_freq}) must be a number or a list of 0 and "
                "1; use 1 to give every layer experts."
            )
        return found


def _expand(text: str) -> list[int]:
    """Expand ``([0]*3+[1]*2)`` to ``[0, 0, 0, 1, 1]``, without evaluating code."""
    pattern: list[int] = []
    for term in text.strip("() ").split("+"):
        body, _, times = term.strip().partition("*")
        numbers = [int(part) for part in body.strip("[] ").split(",")]
        if not 0 < int(times or 1) <= SIZE.high:
            raise ValueError(text)
        pattern += numbers * int(times or 1)
    return pattern
