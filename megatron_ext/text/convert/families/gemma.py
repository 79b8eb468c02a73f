"""Gemma: Llama with GELU gates, scaled embeddings, and norms that store their weight minus one."""

from megatron_ext.text.convert.entries import Translated
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Settings


def _read_factor(settings: Settings) -> Fields:
    return {"embedding_multiplier": float(settings["hidden_size"]) ** 0.5}


FAMILY = llama.BASE.but(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    says="GELU gates, scaled embeddings",
    entries=(
        Translated(("embedding_multiplier",), (), _read_factor, lambda gpt: {}),
        llama.ATTENTION_BIAS,
    ),
    fixed={"swiglu": False, "geglu": True, "apply_layernorm_1p": True},
    only={
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
)
