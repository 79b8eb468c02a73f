"""Settings of families whose layers have mixers other than attention.

Where a query and a key are nearly orthogonal, the norm of a head's output divides by little, and
rounding errors grow; a large epsilon of the norms, or few such layers, keep them small.
"""

from tests.text.convert.settings.kinds import Settings

_LINEAR: Settings = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}  # fmt: skip
_EXPERTS: Settings = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_KIMI: Settings = {
    "linear_num_heads": 4, "linear_head_dim": 10, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "qwen3_next": (
        {
            **_LINEAR, **_EXPERTS, "num_hidden_layers": 4, "full_attention_interval": 2,
            "head_dim": 24, "mlp_only_layers": [2], "tie_word_embeddings": False,
            "rms_norm_eps": 1e-3,
        },
        {
            **_LINEAR, **_EXPERTS, "num_hidden_layers": 4, "linear_num_key_heads": 6,
            "linear_conv_kernel_dim": 3, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 16, "partial_rotary_factor": 0.5, "norm_topk_prob": False,
            "attention_bias": True, "tie_word_embeddings": True,
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
        },
    ),
    "kimi_linear": (
        {
            **_KIMI, "num_hidden_layers": 4, "rms_norm_eps": 1e-3,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        },
        {
            **_KIMI, "num_hidden_layers": 4, "q_lora_rank": 20, "linear_conv_kernel_dim": 3,
            "num_attention_heads": 5, "num_key_value_heads": 5, "num_experts": 8,
            "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 4,
            "num_shared_experts": 2, "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "layer_types": [
                "full_attention", "linear_attention", "full_attention", "linear_attention",
            ],
        },
    ),
    "qwen3_5_text": (
        {
            **_LINEAR, "num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 24,
            "rms_norm_eps": 1e-3,
        },
        {
            **_LINEAR, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True,
            "tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention"],
            "rms_norm_eps": 1e-4,
        },
    ),
    "qwen3_5_moe_text": (
        {
            **_LINEAR, **_EXPERTS, "num_hidden_layers": 4, "full_attention_interval": 2,
            "head_dim": 24, "rms_norm_eps": 1e-3,
        },
        {
            **_LINEAR, **_EXPERTS, "num_hidden_layers": 2, "linear_num_key_heads": 6,
            "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16,
            "num_experts_per_tok": 3, "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip
