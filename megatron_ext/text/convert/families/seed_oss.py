"""Seed-OSS: Llama with biases of queries, keys and values."""

from megatron_ext.text.convert.entries import Switch, Translated
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Settings


def _note_dropout(settings: Settings) -> Fields:
    """Note that ``residual_dropout``, which spares the embeddings, is not that of a run."""
    if settings["residual_dropout"]:
        settings.ignored.append("residual_dropout")
    return {}


FAMILY = llama.BASE.but(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    says="biases of queries, keys and values; other biases",
    entries=(
        Switch("attention_bias", ("add_qkv_bias",)),
        Switch("attention_out_bias", ("add_proj_bias",)),
        Switch("mlp_bias", ("add_mlp_bias",)),
        Translated((), ("residual_dropout",), _note_dropout, lambda gpt: {}),
    ),
)
