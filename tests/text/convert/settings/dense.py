"""Settings of families of dense decoders."""

from typing import Any

from tests.text.convert.settings.kinds import Settings

ODD: Settings = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14}
"""Heads that do not divide the hidden size."""
ONE_KEY: Settings = {"num_attention_heads": 4, "num_key_value_heads": 1}
TIED: Settings = {"tie_word_embeddings": True}
UNTIED: Settings = {"tie_word_embeddings": False}
PADS: Settings = {"pad_token_id": 0}
FULL: Settings = {"layer_types": ["full_attention"] * 2}
SOME: Settings = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
"""A window in one of two layers."""
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LATENT: Settings = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip
GRANITE: Settings = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.07,
    "logits_scaling": 6.0,
}  # fmt: skip
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "olmo2": (ODD | UNTIED, TIED | {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": (SOME | UNTIED | {"rope_scaling": YARN}, ODD | TIED | {"layer_types": None}),
    "smollm3": (
        ODD | TIED | PADS | {"no_rope_layers": [1, 0], "mlp_bias": True},
        SOME | UNTIED | PADS | {
            "use_sliding_window": True, "no_rope_layer_interval": 1, "attention_bias": True,
        },
    ),
    "granite": (
        GRANITE | TIED,
        ONE_KEY | UNTIED | {
            "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2,
        },
    ),
    "hyperclovax": (
        GRANITE | ODD | TIED | {"num_attention_heads": 4},
        ONE_KEY | UNTIED | {"use_post_norm": False, "logits_scaling": 0.125},
    ),
    "seed_oss": (
        ODD | UNTIED | {"attention_dropout": 0.0, "residual_dropout": 0.0},
        ONE_KEY | TIED | {
            "head_dim": 16, "attention_out_bias": True, "attention_bias": False, "mlp_bias": True,
            "attention_dropout": 0.0, "residual_dropout": 0.0,
        },
    ),
    "glm": (
        ODD | PADS | {"head_dim": 16},
        ONE_KEY | TIED | PADS | {"head_dim": 16, "attention_bias": False},
    ),
    "glm4": (
        ODD | PADS | {"head_dim": 16},
        ONE_KEY | TIED | PADS | {
            "head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False,
        },
    ),
    "gemma": (ODD | {"head_dim": 18}, ONE_KEY | UNTIED | {"head_dim": 16, "attention_bias": True}),
    "vaultgemma": (
        ODD | SOME | {"num_attention_heads": 4, "query_pre_attn_scalar": 20},
        ONE_KEY | UNTIED | {"head_dim": 16, "final_logit_softcapping": None, "sliding_window": 64},
    ),
    "hunyuan_v1_dense": (
        ODD | UNTIED | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        ONE_KEY | TIED | {"head_dim": 16, "attention_bias": True},
    ),
    "ernie4_5": (ODD | TIED, ONE_KEY | UNTIED | {"head_dim": 16, "use_bias": True}),
    "ministral": (ODD | SOME, ONE_KEY | TIED | FULL | {"head_dim": 16}),
    "ministral3": (
        ODD | {"rope_parameters": YARN | {"rope_theta": 5e4, "llama_4_scaling_beta": 0.3}},
        ONE_KEY | TIED | {
            "head_dim": 16, "sliding_window": 8,
            "rope_parameters": YARN | {
                "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "max_position_embeddings": 64,
            },
        },
    ),
    "exaone4": (ODD | SOME, ONE_KEY | TIED | FULL | {"head_dim": 16, "sliding_window": None}),
    "arcee": (
        ODD | UNTIED | {"num_attention_heads": 4},
        ONE_KEY | TIED | {"attention_bias": True, "mlp_bias": True},
    ),
    "jais2": (ODD | UNTIED | {"num_attention_heads": 4}, ONE_KEY | TIED | {"mlp_bias": False}),
    "helium": (
        {"head_dim": 16},
        ONE_KEY | TIED | {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "cwm": (
        ODD | SOME | {"num_attention_heads": 4, "rope_parameters": LLAMA3 | {"rope_theta": 5e4}},
        ONE_KEY | TIED | FULL | {"head_dim": 16, "mlp_bias": True},
    ),
    "internlm3": (
        ODD | {"num_attention_heads": 4},
        ONE_KEY | TIED | {"head_dim": 16, "qkv_bias": True, "bias": True},
    ),
    "granite_swa": (
        GRANITE | SOME | TIED | {"layer_rope_theta": [1e4, 5e5]},
        ONE_KEY | UNTIED | {
            "sliding_window": 8, "layer_types": ["sliding_attention"] * 2,
            "layer_rope_theta": [0, 300.0], "attention_multiplier": 0.2,
        },
    ),
    "youtu": (
        LATENT | UNTIED | {"q_lora_rank": 20, "num_key_value_heads": 4},
        LATENT | TIED | {"q_lora_rank": None, "num_key_value_heads": 4, "rope_scaling": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 0.7,
        }},
    ),
    "apertus": (ODD | UNTIED, ONE_KEY | TIED | {"attention_bias": True}),
    "minicpm": (
        TIED | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
        ONE_KEY | UNTIED | {
            "scale_emb": 3.5, "scale_depth": 2.0, "dim_model_base": 25, "attention_bias": True,
        },
    ),
    "olmo": (UNTIED, ONE_KEY | TIED | {"attention_bias": True}),
}  # fmt: skip
