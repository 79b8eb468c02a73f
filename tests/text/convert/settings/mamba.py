"""Settings of families with Mamba-2."""

import math

from tests.text.convert.settings.kinds import Settings

_NEMOTRON: Settings = {
    "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 12, "n_groups": 2,
    "head_dim": 24, "chunk_size": 8, "mlp_hidden_act": "relu2",
    # transformers' class keeps steps above this, and not within `time_step_limit`.
    "time_step_min": 1e-9,
}  # fmt: skip
_SIZES: Settings = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 12,
    "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_GRANITE: Settings = {
    **_SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.07, "logits_scaling": 6.0,
}  # fmt: skip
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "nemotron_h": (
        {
            **_NEMOTRON, "tie_word_embeddings": False, "time_step_min": 0.3,
            "time_step_limit": [0.3, math.inf],
            "layers_block_type": [
                "linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp",
                "full_attention",
            ],
            "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 20, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5, "moe_latent_size": 24,
        },
        {
            **_NEMOTRON, "n_groups": 3, "conv_kernel": 3, "use_conv_bias": False,
            "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14,
            "hybrid_override_pattern": "M-MM*-", "mlp_hidden_act": "gelu",
        },
    ),
    "bamba": (
        {
            **_SIZES, "num_hidden_layers": 4, "attn_layer_indices": [1],
            "tie_word_embeddings": False, "time_step_limit": [0.1, 1.5],
        },
        {
            **_SIZES, "num_hidden_layers": 4, "attn_layer_indices": [2], "mamba_n_groups": 1,
            "mamba_d_conv": 3, "mamba_conv_bias": False, "num_attention_heads": 4,
            "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granitemoehybrid": (
        {
            **_GRANITE, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_intermediate_size": 40, "intermediate_size": 24, "tie_word_embeddings": True,
            "layer_types": [
                "linear_attention", "full_attention", "linear_attention", "linear_attention",
            ],
        },
        {
            **_GRANITE, "num_hidden_layers": 4, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": 40, "position_embedding_type": "rope",
            "mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
    ),
}  # fmt: skip
