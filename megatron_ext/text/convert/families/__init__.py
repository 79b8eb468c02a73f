"""The families of Hugging Face models that can be converted, found by `model_type`.

A family's module is imported when its `model_type` is looked up. A module has a `FAMILY`, or
`FAMILIES` if it declares several.
"""

import importlib
from collections.abc import Iterator, Mapping

from megatron_ext.text.convert.family import Family
from megatron_ext.text.convert.multimodal import Multimodal

MODULES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "gpt_oss",
    "glm4_moe": "glm4_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    # dense decoders
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "smollm3": "smollm3",
    "granite": "granite",
    "hyperclovax": "granite",
    "seed_oss": "seed_oss",
    "glm": "glm",
    "glm4": "glm",
    "gemma": "gemma",
    "vaultgemma": "vaultgemma",
    "hunyuan_v1_dense": "hunyuan_v1_dense",
    "ernie4_5": "ernie4_5",
    "ministral": "ministral",
    "ministral3": "ministral",
    "exaone4": "exaone4",
    "arcee": "arcee",
    "jais2": "jais2",
    "helium": "helium",
    "cwm": "cwm",
    "internlm3": "internlm3",
    "olmo": "olmo",
    "granite_swa": "granite_swa",
    "youtu": "youtu",
    "minicpm": "minicpm",
    "apertus": "apertus",
    # decoders with experts
    "kimi_k2": "kimi_k2",
    "glm4_moe_lite": "glm4_moe_lite",
    "glm_moe_dsa": "glm_moe_dsa",
    "ernie4_5_moe": "ernie4_5_moe",
    "dots1": "dots1",
    "exaone_moe": "exaone_moe",
    "solar_open": "solar_open",
    "hy_v3": "hy_v3",
    "minimax_m2": "minimax_m2",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoe_swa": "granitemoe",
    "olmoe": "olmoe",
    "flex_olmo": "olmoe",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "mellum": "mellum",
    "afmoe": "afmoe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "mistral4": "mistral4",
    # older decoders
    "cohere": "cohere",
    "cohere2": "cohere",
    "falcon": "falcon",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neo": "gpt_neo",
    "gpt_neox": "gpt_neox",
    "nemotron": "nemotron",
    "persimmon": "persimmon",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    # decoders with recurrent layers
    "qwen3_next": "qwen3_next",
    "nemotron_h": "nemotron_h",
    "bamba": "bamba",
    "granitemoehybrid": "granitemoehybrid",
    "kimi_linear": "kimi_linear",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
"""The module of each `model_type`.

A model trained from scratch is exported as the first family that fits.
"""
LACKING: dict[str, str] = {
    # linear attention and state spaces
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), "the first Mamba"),
    "falcon_h1": "attention beside Mamba-2 in one layer",
    "mamba2": "a norm over all channels of Mamba-2",
    "zamba2": "attention whose weights several layers share",
    **dict.fromkeys(
        ("bailing_hybrid", "minimax", "olmo_hybrid"),
        "linear attention",
    ),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "recurrence instead of attention"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "convolutions instead of attention in some layers"),
    # older decoders
    **dict.fromkeys(("bloom", "mpt"), "scores that fall with the distance of tokens (ALiBi)"),
    **dict.fromkeys(("codegen", "gptj", "phi"), "a bias of the output layer"),
    **dict.fromkeys(("biogpt", "opt"), "learned positions that are counted from 2"),
    "xglm": "sine positions",
    # other
    "axk1": "a norm of the outputs of layers with experts alone",
    "cohere2_moe": "experts beside attention in one layer",
    "dbrx": "clipped queries, keys and values",
    "jetmoe": "experts of attention",
    "longcat_flash": "experts that return their input, and two attentions in a layer",
    "phimoe": "SparseMixer's choice of experts",
    "laguna": "numbers of heads that differ from layer to layer",
    "mimo_v2_flash": "values of another size than keys",
    # sparse attention
    "axk2": "gates on norms, and on the output of attention",
    "deepseek_v4": "attention to compressed tokens, and several residual streams",
    **dict.fromkeys(
        ("dots3_note", "dots3_note_text"), "layers with a window beside those with an indexer"
    ),
    **dict.fromkeys(
        ("glm5_next", "glm5_next_text"), "an indexer of groups of tokens, and residual streams"
    ),
    "hy_v4": "layers that share an indexer's choice, and several residual streams",
    **dict.fromkeys(
        ("minimax_m3_vl", "minimax_m3_vl_text", "step3p5", "step3p7"),
        "an indexer that chooses blocks of tokens",
    ),
    **dict.fromkeys(
        ("mistral_large4", "mistral_large4_text"), "layers that share keys and an indexer's choice"
    ),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"), "an indexer of blocks of tokens, and residual streams"
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "embeddings for each layer"),
    **dict.fromkeys(("gemma4", "gemma4_text"), "heads of another size in layers without a window"),
    **dict.fromkeys(("llama4", "llama4_text"), "attention within chunks of the sequence"),
    "minicpm3": "LongRoPE in latent attention",
    **dict.fromkeys(("mllama", "mllama_text_model"), "cross-attention to images"),
}
"""The part that no layer here has, in words, for each `model_type` that is refused by name."""


MULTIMODAL = {
    kind.model_type: kind
    for kind in (
        Multimodal("gemma3", "Gemma3ForConditionalGeneration", ("gemma3_text",)),
        Multimodal(
            "mistral3", "Mistral3ForConditionalGeneration", ("ministral3", "mistral", "mistral4")
        ),
        Multimodal(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            ("deepseek_v3", "kimi_k2"),
            also_named=("KimiK25ForConditionalGeneration",),
        ),
        Multimodal("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",)),
        Multimodal("qwen3_5", "Qwen3_5ForConditionalGeneration", ("qwen3_5_text",)),
        Multimodal("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",)),
    )
}
"""Multimodal models of which the text part can be converted, by `model_type`."""


class _Families(Mapping[str, Family]):
    """The families by `model_type`; each is imported when it is looked up."""

    def __getitem__(self, model_type: str) -> Family:
        module = importlib.import_module(f"{__name__}.{MODULES[model_type]}")
        families: tuple[Family, ...] = getattr(module, "FAMILIES", None) or (module.FAMILY,)
        return next(family for family in families if family.model_type == model_type)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FAMILIES: Mapping[str, Family] = _Families()
