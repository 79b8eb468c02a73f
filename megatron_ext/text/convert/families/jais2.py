"""Jais 2: Arcee with LayerNorm."""

from megatron_ext.text.convert.entries import Copy
from megatron_ext.text.convert.families import arcee

FAMILY = arcee.FAMILY.but(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    says="LayerNorm, squared ReLU without gates, biases",
    entries=(Copy("norm_epsilon", "layer_norm_eps"),),
    fixed={"normalization": "LayerNorm"},
)
