"""GPT-BigCode (StarCoder): GPT-2 with one key head, and weights stored ``[out, in]``."""

from typing import Any

from megatron_ext.text.convert.entries import ACTIVATIONS, Choice, Translated
from megatron_ext.text.convert.families import gpt2
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read_heads(settings: Settings) -> Fields:
    heads = int(settings["n_head"])
    shared = bool(settings["multi_query"]) and heads > 1
    return {
        "num_attention_heads": heads,
        "group_query_attention": shared,
        "num_query_groups": 1 if shared else None,
        "kv_channels": settings["n_embd"] // heads,
    }


def _write_heads(gpt: Gpt) -> dict[str, Any]:
    return {"n_head": gpt.model.num_attention_heads, "multi_query": gpt.model.num_query_groups == 1}


HEADS = Translated(
    ("num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels"),
    ("n_head", "multi_query"),
    _read_heads,
    _write_heads,
)
FAMILY = gpt2.FAMILY.but(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    says="one key head, weights stored `[out, in]`",
    entries=(HEADS, Choice("activation_function", ACTIVATIONS)),
    only={"add_cross_attention": False, "scale_attn_weights": True},
    without=("scale_attn_by_inverse_layer_idx",),
    weights=gpt2.WEIGHTS.but(
        layer={
            "self_attention.linear_qkv.{kind}": "attn.c_attn.{kind}",
            "self_attention.linear_proj.{kind}": "attn.c_proj.{kind}",
            "mlp.linear_fc1.{kind}": "mlp.c_fc.{kind}",
            "mlp.linear_fc2.{kind}": "mlp.c_proj.{kind}",
        }
    ),
)
