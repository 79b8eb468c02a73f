"""Arcee (AFM): Llama with squared ReLU in place of gates."""

from megatron_ext.text.convert.families import llama

FAMILY = llama.FAMILY.but(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    says="squared ReLU without gates",
    fixed={"swiglu": False, "squared_relu": True},
    only={"hidden_act": "relu2"},
    weights=llama.WEIGHTS.but(layer={"mlp.linear_fc1.{kind}": "mlp.up_proj.{kind}"}),
)
