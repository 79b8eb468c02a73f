"""EXAONE 4: norms of outputs only, and no positions in layers without a window."""

from megatron_ext.text.convert.entries import RotaryInWindows
from megatron_ext.text.convert.families import olmo2

FAMILY = olmo2.FAMILY.but(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    says="norms of each head, no positions in layers without a window",
    entries=(RotaryInWindows(also=("sliding_window_pattern",)),),
    fixed={"qk_layernorm_all_heads": False},
    without=("attention_bias",),
    weights=olmo2.FAMILY.weights.but(
        layer={
            "self_attention.q_layernorm.{kind}": "self_attn.q_norm.{kind}",
            "self_attention.k_layernorm.{kind}": "self_attn.k_norm.{kind}",
        },
        without=("self_attention.q_norm", "self_attention.k_norm"),
    ),
)
