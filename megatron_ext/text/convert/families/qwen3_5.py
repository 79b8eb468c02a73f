"""The text parts of Qwen3.5: Qwen3-Next with projections of its own, with and without experts.

Where there are no images, the three coordinates of a token's position are the same, so that the
positions are Qwen3-Next's. The tensors of all experts may be stacked, as published, or not.
"""

from typing import Any

from megatron_ext.config.layers import ATTENTION
from megatron_ext.text.convert.delta_rows import separate_projection
from megatron_ext.text.convert.entries import Requires, Translated
from megatron_ext.text.convert.families import qwen3_next
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Given, Weights, whole

DEPTHS = "mtp_num_hidden_layers"


def _layers(mlp: str) -> Translated:
    """Return the entry of the mixers of layers with MLPs or experts of one letter."""

    def read(settings: Settings) -> Fields:
        qwen3_next.read_interval(settings)
        kinds = [mixer + mlp for mixer in qwen3_next.mixers(settings, qwen3_next.DELTA)]
        return qwen3_next.with_depths(settings, kinds, DEPTHS, f"{ATTENTION}{mlp}")

    def write(gpt: Gpt) -> dict[str, Any]:
        depths = gpt.model.mtp_num_layers or 0
        return {"layer_types": qwen3_next.layer_types(gpt), DEPTHS: depths}

    return Translated(
        ("hybrid_layer_pattern", "moe_layer_freq", "mtp_num_layers"),
        ("layer_types", "full_attention_interval", DEPTHS),
        read,
        write,
        (qwen3_next.REFUSED_TYPES,),
    )


_GATED = {"attn_output_gate": True}
"""An entry that transformers' classes do not read, but other programs do."""
_PROJECTION: Given = {
    "self_attention.in_proj.weight": separate_projection(
        *(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    )
}
# Published folders keep these in float32.
_EXACT = ("linear_attn.A_log", "linear_attn.norm.weight")
_WEIGHTS = qwen3_next.FAMILY.weights.but(layer=_PROJECTION, exact=_EXACT)


def _stacked(*, transposed: bool) -> Weights:
    return _WEIGHTS.but(
        layer={
            "mlp.experts.experts.linear_fc1.weight": whole(
                "mlp.experts.gate_up_proj", transposed=transposed, stacked=True
            ),
            "mlp.experts.experts.linear_fc2.weight": whole(
                "mlp.experts.down_proj", transposed=transposed, stacked=True
            ),
        }
    )


FAMILIES = (
    qwen3_next.DENSE.but(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        says="gated DeltaNet between attention with gates",
        entries=(_layers("-"),),
        only=_GATED,
        weights=_WEIGHTS,
    ),
    qwen3_next.FAMILY.but(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        says="gated DeltaNet between attention with gates, experts, a shared expert behind a gate",
        entries=(_layers("E"), Requires("mlp_only_layers", [])),
        only={**_GATED, "norm_topk_prob": True},
        fixed={"moe_router_pre_softmax": False},
        without=("intermediate_size",),
        weights=_WEIGHTS,
        read_too=(_stacked(transposed=False), _stacked(transposed=True)),
    ),
)
