"""Command R and R7B: attention and gated MLP beside each other, and scaled logits."""

from megatron_ext.text.convert.entries import Converted, Copy, Heads, RotaryInWindows
from megatron_ext.text.convert.families import llama

LOGIT_SCALE = Converted("logits_scaling", "logit_scale", 1.0, lambda x: 1 / x, lambda x: 1 / x)
"""The factor of the logits, of which ours is the divisor."""
COHERE = llama.BASE.but(
    model_type="cohere",
    architecture="CohereForCausalLM",
    says="attention and MLP side by side behind one LayerNorm without bias; scaled logits",
    entries=(
        Heads(size=None),
        Copy("norm_epsilon", "layer_norm_eps"),
        llama.ATTENTION_BIAS,
        LOGIT_SCALE,
    ),
    fixed={
        "normalization": "LayerNorm",
        "norm_bias": False,
        "rotary_interleaved": True,
        "use_parallel_residual": True,
        "shared_input_norm": True,
    },
    only={"use_qk_norm": False},
)
FAMILIES = (
    COHERE,
    COHERE.but(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        says="no positions in layers without a window",
        entries=(RotaryInWindows(rotates_without=False, also=("sliding_window_pattern",)),),
        without=("use_qk_norm",),
    ),
)
