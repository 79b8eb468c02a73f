"""Settings of families of decoders with experts."""

from tests.text.convert.settings.kinds import Settings

_FEW: Settings = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: Settings = {
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "num_key_value_heads": 4,
}  # fmt: skip
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "kimi_k2": (
        {
            **_FEW, **_LATENT, "n_routed_experts": 6, "rms_norm_eps": 1e-5, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
            "rope_scaling": {
                "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 131072,
        },
        {
            **_FEW, **_LATENT, "n_routed_experts": 4, "num_attention_heads": 6,
            "num_key_value_heads": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "tie_word_embeddings": True,
        },
    ),
    "glm4_moe_lite": (
        {
            **_FEW, **_LATENT, "n_routed_experts": 4, "rms_norm_eps": 1e-4,
            "routed_scaling_factor": 1.8,
        },
        {
            **_FEW, **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2,
            "num_experts_per_tok": 4, "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v32": (
        {
            **_FEW, **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4,
            "topk_group": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "index_topk": 5,
            "index_head_dim": 10, "index_n_heads": 9,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
            },
        },
        {
            **_FEW, **_LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2, "index_topk": 7,
            "index_head_dim": 6, "index_n_heads": 8, "tie_word_embeddings": True,
            "num_attention_heads": 6, "num_key_value_heads": 6,
        },
    ),
    "glm_moe_dsa": (
        {
            **_FEW, **_LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1, "index_topk": 6,
            "index_head_dim": 12, "index_n_heads": 9, "routed_scaling_factor": 1.8,
        },
        {
            **_FEW, **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 4, "mlp_layer_types": ["dense", "sparse"], "index_topk": 9,
            "index_head_dim": 8, "index_n_heads": 8, "rms_norm_eps": 1e-6,
            "n_shared_experts": 2, "tie_word_embeddings": True, "index_topk_freq": 1,
            "index_skip_topk_offset": 3,
        },
    ),
    "ernie4_5_moe": (
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 18,
            "pad_token_id": 0, "tie_word_embeddings": True,
        },
        {
            "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "head_dim": 10,
            "pad_token_id": 0, "num_attention_heads": 5, "num_key_value_heads": 1,
            "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "dots1": (
        {
            **_FEW, "n_routed_experts": 4, "n_shared_experts": 2, "norm_topk_prob": True,
            "head_dim": 18, "sliding_window": 8, "max_window_layers": 1,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        },
        {
            **_FEW, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
            "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1,
            "attention_bias": True, "n_group": 4, "topk_group": 2, "tie_word_embeddings": True,
        },
    ),
    "afmoe": (
        {
            **_FEW, "num_experts": 4, "head_dim": 18, "sliding_window": 8,
            "global_attn_every_n_layers": 2, "num_dense_layers": 1, "mup_enabled": True,
        },
        {
            **_FEW, "num_experts": 8, "num_shared_experts": 1, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1, "route_scale": 2.5,
            "layer_types": ["full_attention"] * 2, "num_dense_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "exaone_moe": (
        {
            **_FEW, "num_experts": 4, "head_dim": 18, "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
        {
            **_FEW, "num_experts": 8, "num_shared_experts": 2, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1,
            "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"],
            "tie_word_embeddings": True,
        },
    ),
    "solar_open": (
        {**_FEW, "n_routed_experts": 4, "head_dim": 18, "routed_scaling_factor": 1.5},
        {
            **_FEW, "n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "hy_v3": (
        {**_FEW, "num_experts": 4, "head_dim": 18},
        {
            **_FEW, "num_experts": 8, "num_shared_experts": 2, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "mlp_layer_types": ["sparse", "sparse"], "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": (
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
            "head_dim": 18, "rotary_dim": 12,
        },
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": (
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
            "embedding_multiplier": 2.5, "residual_multiplier": 0.6, "logits_scaling": 3.0,
            "attention_multiplier": 0.3, "tie_word_embeddings": True,
        },
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "attention_multiplier": 0.2, "num_attention_heads": 8, "num_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
    "granitemoeshared": (
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
            "embedding_multiplier": 2.5, "residual_multiplier": 0.6, "logits_scaling": 3.0,
            "attention_multiplier": 0.3, "shared_intermediate_size": 40,
        },
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "num_attention_heads": 8, "num_key_value_heads": 1, "shared_intermediate_size": 0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe_swa": (
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
            "residual_multiplier": 0.6, "attention_multiplier": 0.3, "sliding_window": 8,
            "shared_intermediate_size": 40, "layer_rope_theta": [0, 10000.0],
        },
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "attention_multiplier": 0.2, "num_attention_heads": 8, "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [500.0, 50000.0],
        },
    ),
    "olmoe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
        {
            "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "norm_topk_prob": True, "num_attention_heads": 8, "num_key_value_heads": 1,
            "tie_word_embeddings": True, "attention_bias": True,
        },
    ),
    "flex_olmo": (
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
            "pad_token_id": 0,
        },
        {
            "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
            "norm_topk_prob": True, "num_attention_heads": 8, "num_key_value_heads": 1,
            "tie_word_embeddings": True, "pad_token_id": 0,
        },
    ),
    "hunyuan_v1_moe": (
        {
            "num_experts": 4, "moe_topk": [2, 2], "intermediate_size": 24, "head_dim": 18,
            "moe_intermediate_size": [24, 24], "num_shared_expert": [1, 1],
            "tie_word_embeddings": True,
        },
        {
            "num_experts": 8, "moe_topk": 3, "intermediate_size": 24, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "mellum": (
        {
            **_FEW, "num_experts": 4, "head_dim": 18, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        {
            **_FEW, "num_experts": 8, "norm_topk_prob": False, "head_dim": 10,
            "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "qwen3_vl_moe_text": (
        {
            **_FEW, "num_experts": 4, "head_dim": 18, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 50000.0, "mrope_section": [3, 3, 3],
                "mrope_interleaved": True,
            },
        },
        {
            **_FEW, "num_experts": 8, "head_dim": 10, "num_attention_heads": 5,
            "num_key_value_heads": 1, "attention_bias": True, "decoder_sparse_step": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 50000.0, "mrope_section": [1, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    "mistral4": (
        {
            **_FEW, **_LATENT, "n_routed_experts": 4, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 4.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 8, "mscale": 1.0,
                "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
                "max_position_embeddings": 64,
            },
        },
        {
            **_FEW, **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "q_lora_rank": None, "n_shared_experts": 2, "num_experts_per_tok": 4,
            "first_k_dense_replace": 1, "tie_word_embeddings": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 6 / 18,
            },
        },
    ),
}  # fmt: skip
