"""Floating-point operations of a training step, and what a GPU can do at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.planning.flops import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

PEAK_FLOPS_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A40": 150e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 rates of NVIDIA's datasheets, by a part of the device's name."""


def flops_per_sample(config: RunConfig) -> float:
    """Of one sequence through the model, forward and backward.

    Matrix products only, causal attention counted half, recomputation not counted: the count of
    Megatron-LM, so that the figures compare.
    """
    model, moe = config.model, config.moe
    h, s = model.hidden_size or 0, model.seq_length or 0
    heads, d = model.num_attention_heads or 0, model.kv_channels or 0
    groups = model.num_query_groups or heads
    mtp = model.mtp_num_layers or 0
    experts = _expert_layers(config)
    dense_layers = len(experts) - sum(experts)
    products = 3 if model.swiglu else 2
    expert_width = moe.moe_ffn_hidden_size or model.ffn_hidden_size or 0
    shared = moe.moe_shared_expert_intermediate_size or 0
    mlp = (
        h
        * products
        * (
            (model.ffn_hidden_size or 0) * dense_layers
            + (expert_width * moe.moe_router_topk + shared) * sum(experts)
        )
    )
    attention = len(experts) * (h * d * (heads + 2 * groups) + heads * d * s + heads * d * h)
    mtp_extra = mtp * (3 * h + 2 * h * h)
    logits = h * (model.padded_vocab_size or 0) * (mtp + 1)
    per_token = mlp + attention + mtp_extra + logits
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * s * per_token)


def _expert_layers(config: RunConfig) -> list[bool]:
    """For each layer, those of multi-token prediction included, whether it holds experts."""
    layers = config.model.num_layers or 0
    if config.moe.num_experts is None:
        pattern = [False] * layers
    else:
        frequency = config.moe.layer_pattern()
        if isinstance(frequency, int):
            pattern = [layer % frequency == 0 for layer in range(layers)]
        else:
            pattern = [bool(flag) for flag in frequency]
    return pattern + pattern[-1:] * (config.model.mtp_num_layers or 0)


def peak_flops(device_name: str | None) -> float | None:
    """Dense bfloat16 rate of a GPU, None where it is not known."""
    if device_name is None:
        return None
    matches = [name for name in PEAK_FLOPS_BF16 if name in device_name]
    return PEAK_FLOPS_BF16[max(matches, key=len)] if matches else None
