"""gpt-oss: attention sinks, windows in every other layer, experts with clamped gates and biases.

The tensors of all experts are stacked. An expert's ``gate_up_proj`` is stored ``[h, 2 * ffn]``,
with the columns of the gate at even indices.
"""

from typing import Any

from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Part, Parts, Table, whole

QUICK_GELU = 1.702
"""The factor within the sigmoid of an expert's gate, the same as in quick GELU."""


def read(settings: Settings) -> Fields:
    if settings["swiglu_alpha"] not in (None, QUICK_GELU):
        settings.refuse("swiglu_alpha")
    experts = {
        "moe_ffn_hidden_size": settings["intermediate_size"],
        "moe_router_pre_softmax": False,
        "activation_func_clamp_value": float(settings["swiglu_limit"] or 7.0),
    }
    return llama.read(settings) | llama.read_window(settings) | experts


def write(gpt: Gpt) -> dict[str, Any]:
    windows = llama.write_layer_types(gpt)
    if gpt.attention.window_size is not None:
        windows |= llama.write_window(gpt)
    return {
        **llama.write(gpt),
        **windows,
        "intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size,
        "swiglu_limit": gpt.model.activation_func_clamp_value,
    }


def weights(gpt: Gpt, vocab_size: int) -> Table:
    theirs = f"{llama.LAYER}.mlp.experts"
    ours = "mlp.experts.experts"
    layer: dict[str, Parts] = {
        **llama.norms(),
        **llama.attention(gpt),
        "self_attention.core_attention.softmax_offset": whole(f"{llama.LAYER}.self_attn.sinks"),
    }
    for kind, end in (("weight", ""), ("bias", "_bias")):
        stacked: dict[str, Any] = {"stacked": True, "transposed": kind == "weight"}
        gate = f"{theirs}.gate_up_proj{end}"
        layer[f"{ours}.linear_fc1.{kind}"] = tuple(
            Part(gate, start=start, step=2, **stacked) for start in (0, 1)
        )
        layer[f"{ours}.linear_fc2.{kind}"] = (Part(f"{theirs}.down_proj{end}", **stacked),)
        layer[f"mlp.router.{kind}"] = whole(f"{llama.LAYER}.mlp.router.{kind}")
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    {
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "add_proj_bias": True,
    },
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    same=llama.SAME
    | {"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    only=llama.ONLY | {"attention_bias": True},
    read=read,
    write=write,
    weights=weights,
)
