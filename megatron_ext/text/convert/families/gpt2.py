"""GPT-2: learned positions, LayerNorm, biases, and projections that are stored ``[in, out]``."""

from typing import Any

from megatron_ext.text.convert.family import Family, Fields, Gpt, Settings
from megatron_ext.text.convert.table import Part, Parts, Table, fused_qkv, whole

LAYER = "transformer.h.{layer}"
_TANH = ("gelu_new", "gelu_pytorch_tanh")
"""transformers' names of the tanh approximation of GELU."""


def read(settings: Settings) -> Fields:
    activation = settings["activation_function"]
    if activation not in ("gelu", *_TANH):
        settings.refuse("activation_function")
    return {
        "openai_gelu": activation in _TANH,
        "ffn_hidden_size": settings["n_inner"] or 4 * settings["n_embd"],
        "untie_embeddings_and_output_weights": not settings["tie_word_embeddings"],
        "attention_dropout": float(settings["attn_pdrop"]),
        "hidden_dropout": float(settings["resid_pdrop"]),
    }


def write(gpt: Gpt) -> dict[str, Any]:
    return {
        "n_inner": gpt.model.ffn_hidden_size,
        "activation_function": "gelu_new" if gpt.model.openai_gelu else "gelu",
        "tie_word_embeddings": not gpt.model.untie_embeddings_and_output_weights,
    }


def weights(gpt: Gpt, vocab_size: int) -> Table:
    embedding, positions = "transformer.wte.weight", "transformer.wpe.weight"
    outer: dict[str, Parts] = {
        "embedding.word_embeddings.weight": (Part(embedding, vocab_size),),
        "embedding.position_embeddings.weight": whole(positions),
        "output_layer.weight": (Part("lm_head.weight", vocab_size),),
    }
    layer: dict[str, Parts] = {}
    for kind in ("weight", "bias"):
        outer[f"decoder.final_layernorm.{kind}"] = whole(f"transformer.ln_f.{kind}")
        layer |= {
            f"self_attention.linear_qkv.layer_norm_{kind}": whole(f"{LAYER}.ln_1.{kind}"),
            f"mlp.linear_fc1.layer_norm_{kind}": whole(f"{LAYER}.ln_2.{kind}"),
            f"self_attention.linear_qkv.{kind}": fused_qkv(
                gpt.model, f"{LAYER}.attn.c_attn.{kind}", transposed=kind == "weight"
            ),
        }
        for ours, theirs in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            tensor = f"{LAYER}.{theirs}.{kind}"
            layer[f"{ours}.{kind}"] = whole(tensor, transposed=kind == "weight")
    return Table(outer, layer)


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    same={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=read,
    write=write,
    weights=weights,
)
