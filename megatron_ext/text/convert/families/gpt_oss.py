"""gpt-oss: attention sinks, windows in every other layer, experts with clamped gates and biases.

The tensors of all experts are stacked. An expert's ``gate_up_proj`` is stored ``[h, 2 * ffn]``,
with the columns of the gate at even indices.
"""

from megatron_ext.text.convert.entries import Converted, Requires, Window
from megatron_ext.text.convert.families import llama, mixtral
from megatron_ext.text.convert.weights import alternating, whole

QUICK_GELU = 1.702
"""The factor within the sigmoid of an expert's gate, the same as in quick GELU."""
EXPERTS = "mlp.experts.experts"

FAMILY = llama.BASE.but(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    says="sinks, stacked experts with clamped gates and biases, YaRN",
    entries=(
        *mixtral.ROUTER,
        mixtral.WIDTH,
        Window(types="always"),
        Requires("swiglu_alpha", QUICK_GELU),
        Converted("activation_func_clamp_value", "swiglu_limit", 7.0),
    ),
    fixed={
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "add_proj_bias": True,
        "moe_router_pre_softmax": False,
    },
    only={"attention_bias": True},
    weights=llama.WEIGHTS.but(
        layer={
            "self_attention.core_attention.softmax_offset": "self_attn.sinks",
            f"{EXPERTS}.linear_fc1.weight": alternating(
                "mlp.experts.gate_up_proj", transposed=True, stacked=True
            ),
            f"{EXPERTS}.linear_fc1.bias": alternating(
                "mlp.experts.gate_up_proj_bias", stacked=True
            ),
            f"{EXPERTS}.linear_fc2.weight": whole(
                "mlp.experts.down_proj", transposed=True, stacked=True
            ),
            f"{EXPERTS}.linear_fc2.bias": whole("mlp.experts.down_proj_bias", stacked=True),
            "mlp.router.{kind}": "mlp.router.{kind}",
        }
    ),
)
