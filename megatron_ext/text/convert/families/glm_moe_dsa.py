"""GLM-5: DeepSeek-V3.2's architecture, whose indexer rotates neighbouring pairs of channels."""

from typing import Any

from megatron_ext.text.convert.entries import Translated
from megatron_ext.text.convert.families import deepseek_v32
from megatron_ext.text.convert.family import Fields, Gpt, Settings

_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")


def _read_types(settings: Settings) -> Fields:
    # transformers derives the types from a schedule where they are not given.
    settings.read.update(_SCHEDULE)
    if set(settings["indexer_types"] or ()) - {"full"}:
        settings.refuse(
            "indexer_types", "shared", "use a model in which each layer has its own indexer"
        )
    return {"dsa_indexer_rope_interleaved": True}


def _write_types(gpt: Gpt) -> dict[str, Any]:
    return {"indexer_types": ["full"] * (gpt.model.num_layers or 0)}


TYPES = Translated(
    ("dsa_indexer_rope_interleaved",),
    ("indexer_types", *_SCHEDULE),
    _read_types,
    _write_types,
    ("`indexer_types` with shared",),
)
"""The types of indexers, of which each layer must have its own."""

FAMILY = deepseek_v32.FAMILY.but(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    says="sparse attention with an indexer, latent attention, sigmoid scores, bias of experts, "
    "multi-token prediction",
    entries=(TYPES,),
    without=("scoring_func", "topk_method"),
    weights=deepseek_v32.WEIGHTS,
)
