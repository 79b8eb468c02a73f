"""Mixtral: Mistral with experts in every layer."""

from typing import Any

from megatron_ext.text.convert.entries import Translated, copies
from megatron_ext.text.convert.families import llama, mistral
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import joined


def _read_width(settings: Settings) -> Fields:
    width = settings["intermediate_size"]
    return {"ffn_hidden_size": width, "moe_ffn_hidden_size": width}


def _write_width(gpt: Gpt) -> dict[str, Any]:
    return {"intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size}


WIDTH = Translated(
    ("ffn_hidden_size", "moe_ffn_hidden_size"), ("intermediate_size",), _read_width, _write_width
)
"""The width of experts, in an entry that usually has the width of a dense MLP."""
ROUTER = copies({"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"})

FAMILY = mistral.FAMILY.but(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    says="experts in every layer",
    entries=(*ROUTER, WIDTH),
    # transformers renormalizes a softmax over all experts, which equals a softmax over the chosen.
    fixed={"moe_router_pre_softmax": False},
    weights=llama.WEIGHTS.but(
        without=("mlp.linear",),
        layer={
            "mlp.linear_fc1.layer_norm_{kind}": "post_attention_layernorm.{kind}",
            "mlp.experts.experts.linear_fc1.weight": joined(
                "block_sparse_moe.experts.{expert}.w1.weight",
                "block_sparse_moe.experts.{expert}.w3.weight",
            ),
            "mlp.experts.experts.linear_fc2.weight": (
                "block_sparse_moe.experts.{expert}.w2.weight"
            ),
            "mlp.router.weight": "block_sparse_moe.gate.weight",
        },
    ),
)
