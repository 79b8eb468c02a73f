"""`GPT_COST`, with which planning finds the formulas of a GPT's cost when it needs them."""

from __future__ import annotations

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.text.config.attention import LatentAttentionConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.train.task import later

RECOMPUTATION: dict[str, dict[str, object]] = {
    "none": {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": ["core_attn"],
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": None,
    },
}
"""The modes of recomputation, each with the fields of `ModelConfig` that it sets."""


def with_recomputation(config: RunConfig, mode: str) -> RunConfig:
    """Return the configuration with the recomputation that ``mode`` of `RECOMPUTATION` names."""
    return config.with_values(RECOMPUTATION[mode])


def num_experts(config: RunConfig) -> int:
    """Return ``--num-experts``, or 0 without experts."""
    return config.section(MoEConfig).num_experts or 0


def most_memory(config: RunConfig) -> float:
    """Return a rough upper bound of the bytes that a rank with the whole model needs.

    Every matrix is taken to be as large as the widest layer makes it. Each parameter counts 32
    bytes, for itself, its gradient, optimizer state and average, with room to spare.
    """
    model = config.model
    moe = config.section(MoEConfig)
    latent = config.section(LatentAttentionConfig)
    heads = model.num_attention_heads or 0
    channels = model.kv_channels or 0
    hidden = model.hidden_size or 0
    expert = (moe.moe_ffn_hidden_size or 0) * moe.moe_router_topk
    if latent.multi_latent_attention:
        channels = latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim
    width = max(
        hidden,
        model.ffn_hidden_size or 0,
        heads * channels,
        expert + (moe.moe_shared_expert_intermediate_size or 0),
        latent.q_lora_rank or 0,
        latent.kv_lora_rank,
    )
    layers = (model.num_layers or 0) + (model.mtp_num_layers or 0)
    matrices = 16 + 3 * num_experts(config)
    rows = 2 * (model.padded_vocab_size or 0) + (
        config.section(PositionConfig).max_position_embeddings or 0
    )
    parameters = (layers * matrices * width + rows) * width
    tokens = config.training.batch_sizes[0] * (model.seq_length or 0)
    scores = heads * (model.seq_length or 0)
    kept = layers * (64 * width + 8 * scores) + 4 * (model.padded_vocab_size or 0)
    return 32.0 * parameters + 4.0 * tokens * kept


GPT_COST = TaskCost(
    cases=later("megatron_ext.text.cost.network:cases"),
    modes=tuple(RECOMPUTATION),
    recompute=with_recomputation,
    from_flags=True,
    most_memory=most_memory,
    num_experts=num_experts,
    switches=later("megatron_ext.text.cost.switches:switches"),
)
