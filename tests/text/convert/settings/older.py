"""Settings of families of older decoders."""

from tests.text.convert.settings.kinds import Settings

_GPT = {"n_embd": 64, "n_layer": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NEO = {"num_layers": 2, "num_heads": 4, "bos_token_id": 0, "eos_token_id": 0}
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "cohere": (
        {"num_attention_heads": 8, "num_key_value_heads": 1, "logit_scale": 0.3},
        {"attention_bias": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-3},
    ),
    "cohere2": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
         "num_key_value_heads": 1, "logit_scale": 0.7},
        {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 5,
         "attention_bias": True, "num_attention_heads": 8},
    ),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 100, "bias": True},
        {"multi_query": True, "num_attention_heads": 8, "tie_word_embeddings": False},
    ),
    "gpt_bigcode": (
        {**_GPT, **_NO_DROPOUT, "n_head": 4, "n_inner": 100},
        {**_GPT, **_NO_DROPOUT, "n_head": 8, "multi_query": False, "tie_word_embeddings": False},
    ),
    "gpt_neo": (
        {**_NEO, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        {**_NEO, "attention_types": [[["local"], 2]], "window_size": 5, "intermediate_size": 90},
    ),
    "gpt_neox": (
        {"rotary_pct": 0.25, "num_attention_heads": 8, "rotary_emb_base": 5000},
        {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False,
         "hidden_act": "gelu_new", "tie_word_embeddings": True},
    ),
    "nemotron": (
        {"head_dim": 12, "num_key_value_heads": 1, "partial_rotary_factor": 0.5},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "persimmon": (
        {"partial_rotary_factor": 0.5, "num_attention_heads": 8},
        {"qk_layernorm": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-3},
    ),
    "stablelm": (
        {"use_parallel_residual": True, "use_qkv_bias": True, "num_key_value_heads": 1},
        {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "starcoder2": (
        {"sliding_window": 8, "num_key_value_heads": 1},
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
}  # fmt: skip
