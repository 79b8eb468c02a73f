"""StarCoder2: LayerNorm, an MLP without a gate, biases, and a window in every layer."""

from megatron_ext.text.convert.entries import (
    ACTIVATIONS,
    Choice,
    Copy,
    Dropout,
    Heads,
    Switch,
    Window,
)
from megatron_ext.text.convert.families import gpt_neox, llama

FAMILY = llama.BASE.but(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    says="LayerNorm, no gates, biases, windows",
    entries=(
        Heads(size=None),
        Copy("norm_epsilon", "norm_epsilon"),
        Choice("hidden_act", ACTIVATIONS),
        Switch("use_bias", ("add_bias_linear", "add_qkv_bias", "add_proj_bias")),
        Window(),
        Dropout("hidden_dropout", "residual_dropout"),
    ),
    fixed=gpt_neox.UNGATED,
    weights=llama.WEIGHTS.but(
        renamed={"mlp.down_proj": "mlp.c_proj"},
        layer={"mlp.linear_fc1.{kind}": "mlp.c_fc.{kind}"},
    ),
)
