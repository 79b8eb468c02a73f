"""OLMo 3: OLMo 2 with windows in most layers, whose positions are not scaled."""

from megatron_ext.text.convert.entries import Window
from megatron_ext.text.convert.families import gemma3, olmo2

FAMILY = olmo2.FAMILY.but(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    says="windows in most layers, whose positions are not scaled",
    entries=(Window(types="always", keeps=True), gemma3.TWO_BASES),
)
