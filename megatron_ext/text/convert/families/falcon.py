"""Falcon with rotary positions, of both decoder architectures: 7B and 40B, 180B, Falcon 2 11B.

In all its forms a row of ``query_key_value`` has our own order: the queries of each group, its key
and its value.
"""

from typing import Any

from megatron_ext.text.convert.entries import (
    ACTIVATIONS,
    Choice,
    Copy,
    Rotary,
    Switch,
    Translated,
)
from megatron_ext.text.convert.families import gpt_neox, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Weights

_GROUPED = ("new_decoder_architecture", "num_kv_heads", "multi_query")
_NORMS = ("parallel_attn", "num_ln_in_parallel_attn")


def _read_layers(settings: Settings) -> Fields:
    """Return the fields of heads and branches, which differ between the architectures."""
    heads = int(settings["num_attention_heads"])
    newer = bool(settings["new_decoder_architecture"])
    parallel = bool(settings["parallel_attn"])
    norms = settings["num_ln_in_parallel_attn"] or (2 if newer else 1)
    kv_heads = int(settings["num_kv_heads"] or heads)
    groups = kv_heads if newer else 1 if settings["multi_query"] else heads
    if newer and not parallel:
        settings.refuse("parallel_attn", advice="use a model with true")
    if norms not in (1, 2) or (norms == 2 and parallel and not newer):
        settings.refuse("num_ln_in_parallel_attn", norms, "use a model of Falcon's own sizes")
    return {
        "num_attention_heads": heads,
        "kv_channels": settings["hidden_size"] // heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "use_parallel_residual": parallel,
        "shared_input_norm": parallel and norms == 1,
    }


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    heads = gpt.model.num_attention_heads
    groups = gpt.model.num_query_groups or heads
    parallel = gpt.block.use_parallel_residual
    two_norms = parallel and not gpt.block.shared_input_norm
    return {
        "num_attention_heads": heads,
        "num_kv_heads": groups,
        "multi_query": groups == 1,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "new_decoder_architecture": two_norms or (parallel and groups not in (1, heads)),
    }


LAYERS = Translated(
    (
        "num_attention_heads",
        "kv_channels",
        "group_query_attention",
        "num_query_groups",
        "use_parallel_residual",
        "shared_input_norm",
    ),
    ("num_attention_heads", *_GROUPED, *_NORMS),
    _read_layers,
    _write_layers,
    ("`new_decoder_architecture` without `parallel_attn`",),
)
WEIGHTS = llama.WEIGHTS.but(
    renamed={
        "model.layers": "transformer.h",
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    layer={
        "self_attention.linear_qkv.{kind}": "self_attention.query_key_value.{kind}",
        "mlp.linear_fc1.{kind}": "mlp.dense_h_to_4h.{kind}",
    },
)
_TWO_NORMS = WEIGHTS.but(
    renamed={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
)


def weights_of(gpt: Gpt) -> Weights:
    """Return the tensors, whose norms have other names where each branch has its own."""
    own_norms = gpt.block.use_parallel_residual and not gpt.block.shared_input_norm
    return _TWO_NORMS if own_norms else WEIGHTS


FAMILY = llama.BASE.but(
    model_type="falcon",
    architecture="FalconForCausalLM",
    says="attention and MLP side by side behind one LayerNorm or two; one key head or groups",
    entries=(
        LAYERS,
        Copy("ffn_hidden_size", "ffn_hidden_size"),
        Copy("norm_epsilon", "layer_norm_epsilon"),
        Choice("activation", ACTIVATIONS),
        Switch("bias", ("add_bias_linear", "add_qkv_bias", "add_proj_bias")),
        Rotary(),
    ),
    fixed=gpt_neox.UNGATED,
    only={"alibi": False, "hidden_dropout": 0.0},
    without=("hidden_act",),
    weights=WEIGHTS,
    weights_of=weights_of,
)
