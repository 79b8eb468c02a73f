"""MiniCPM 1 to 4: Llama with factors of embeddings, branches and logits, which its sizes scale.

transformers does not know these models, whose code comes with their folders. Granite's class
computes the same from the factors themselves.
"""

import math
from typing import Any

from megatron_ext.text.convert.entries import Converted, Translated
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read(settings: Settings) -> Fields:
    layers = settings["num_hidden_layers"]
    return {
        "residual_multiplier": float(settings["scale_depth"]) / math.sqrt(layers),
        "logits_scaling": settings["hidden_size"] / float(settings["dim_model_base"]),
    }


def _write(gpt: Gpt) -> dict[str, Any]:
    depth = gpt.block.residual_multiplier * math.sqrt(gpt.model.num_layers or 1)
    base = (gpt.model.hidden_size or 1) / gpt.block.logits_scaling
    return {
        # Enough digits for every published value, without the rounding of the square root.
        "scale_depth": round(depth, 12),
        "dim_model_base": int(base) if base == int(base) else base,
    }


FAMILY = llama.BASE.but(
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    says="factors of embeddings, branches and logits; the folder's code is copied, not run",
    entries=(
        Converted("embedding_multiplier", "scale_emb"),
        Translated(
            ("residual_multiplier", "logits_scaling"),
            ("scale_depth", "dim_model_base"),
            _read,
            _write,
        ),
        llama.ATTENTION_BIAS,
    ),
    only={"sparse_config": None},
    known_as="granite",
    defaults={"tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
)
