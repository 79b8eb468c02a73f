"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that an indexer chooses."""

import dataclasses
from typing import Any

from megatron_ext.text.convert.entries import Translated, copies
from megatron_ext.text.convert.families import deepseek_v3
from megatron_ext.text.convert.family import Fields, Gpt, Settings

K_NORM_EPSILON = 1e-6
"""The epsilon that transformers gives to the norm of the indexer's keys in any case."""
_INDEXER = "self_attention.core_attention.indexer"


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    words = deepseek_v3.MLP_WORDS.write(gpt)
    # Other programs read the number of first dense layers.
    kinds = words["mlp_layer_types"]
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    return {**words, "first_k_dense_replace": first}


LAYERS = dataclasses.replace(deepseek_v3.MLP_WORDS, writer=_write_layers)
"""Which layers have experts, one word for each layer, and the number of first ones without."""


def _read_epsilon(settings: Settings) -> Fields:
    usual = settings["rms_norm_eps"] == K_NORM_EPSILON
    return {"dsa_indexer_k_norm_epsilon": None if usual else K_NORM_EPSILON}


INDEXER = (
    *copies(
        {
            "dsa_indexer_n_heads": "index_n_heads",
            "dsa_indexer_head_dim": "index_head_dim",
            "dsa_indexer_topk": "index_topk",
        }
    ),
    Translated(("dsa_indexer_k_norm_epsilon",), (), _read_epsilon, lambda gpt: {}),
)
"""The entries of the indexer."""
WEIGHTS = deepseek_v3.with_depths(
    deepseek_v3.LATENT_WEIGHTS.but(
        layer={
            f"{_INDEXER}.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
            f"{_INDEXER}.linear_wk.weight": "self_attn.indexer.wk.weight",
            f"{_INDEXER}.k_norm.{{kind}}": "self_attn.indexer.k_norm.{kind}",
            f"{_INDEXER}.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
        }
    )
)

FAMILY = deepseek_v3.FAMILY.but(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    says="sparse attention with an indexer, latent attention, groups of experts, multi-token "
    "prediction",
    entries=(*deepseek_v3.experts(ranking=2, layers=LAYERS), *INDEXER),
    fixed={"experimental_attention_variant": "dsa", "dsa_indexer_rope_interleaved": False},
    without=("rope_interleave",),
    weights=WEIGHTS,
)
