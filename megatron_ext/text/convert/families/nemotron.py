"""Nemotron 3 and 4, Minitron: LayerNorm whose gain is stored minus one, squared ReLU."""

from megatron_ext.text.convert.entries import ACTIVATIONS, Choice, Copy, Rotary, Switch
from megatron_ext.text.convert.families import gpt_neox, llama

FAMILY = llama.BASE.but(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    says="LayerNorm with its gain minus one, squared ReLU, partly rotary heads, biases",
    entries=(
        Copy("norm_epsilon", "norm_eps"),
        Choice("hidden_act", {"relu2": ACTIVATIONS["relu2"], **ACTIVATIONS}),
        Rotary(share_always=True),
        llama.ATTENTION_BIAS,
        Switch("mlp_bias", ("add_mlp_bias",)),
    ),
    fixed={**gpt_neox.UNGATED, "apply_layernorm_1p": True},
    weights=llama.WEIGHTS.but(layer={"mlp.linear_fc1.{kind}": "mlp.up_proj.{kind}"}),
)
