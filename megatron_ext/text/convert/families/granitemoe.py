"""Granite with experts: factors of embeddings, branches, scores and logits; stacked experts."""

from megatron_ext.text.convert.entries import Translated
from megatron_ext.text.convert.families import granite, granite_swa, llama, mixtral
from megatron_ext.text.convert.family import Fields, Settings
from megatron_ext.text.convert.weights import Given, whole

_SHARED = "moe_shared_expert_intermediate_size"
EXPERTS: Given = {
    "mlp.experts.experts.linear_fc1.weight": whole(
        "block_sparse_moe.input_linear.weight", stacked=True
    ),
    "mlp.experts.experts.linear_fc2.weight": whole(
        "block_sparse_moe.output_linear.weight", stacked=True
    ),
    "mlp.router.weight": "block_sparse_moe.router.layer.weight",
    "mlp.shared_experts.linear_fc1.weight": "shared_mlp.input_linear.weight",
    "mlp.shared_experts.linear_fc2.weight": "shared_mlp.output_linear.weight",
}
"""The sources of experts, each projection of which is one tensor, and of the shared expert."""


def _read_shared(settings: Settings) -> Fields:
    return {_SHARED: settings["shared_intermediate_size"] or None}


SHARED = Translated(
    (_SHARED,),
    ("shared_intermediate_size",),
    _read_shared,
    lambda gpt: {"shared_intermediate_size": gpt.value(_SHARED) or 0},
)
PLAIN = granite.GRANITE.but(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    says="Granite's factors, experts in every layer",
    entries=(*mixtral.ROUTER, mixtral.WIDTH),
    without=("mlp_bias",),
    fixed={"moe_router_pre_softmax": False},
    weights=llama.WEIGHTS.but(layer=EXPERTS),
)
WINDOWED = granite_swa.FAMILY.but(
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    says="Granite's factors, experts, windows, sinks, rotary bases by layer",
    entries=(*mixtral.ROUTER, mixtral.WIDTH, SHARED),
    without=("mlp_bias",),
    fixed={"moe_router_pre_softmax": False},
    # Its files have the names of transformers' class.
    weights=granite_swa.FAMILY.weights.but(
        layer={
            **EXPERTS,
            "mlp.experts.experts.linear_fc1.weight": whole(
                "block_sparse_moe.experts.gate_up_proj", stacked=True
            ),
            "mlp.experts.experts.linear_fc2.weight": whole(
                "block_sparse_moe.experts.down_proj", stacked=True
            ),
            "mlp.router.weight": "block_sparse_moe.router.weight",
        }
    ),
    read_too=(granite_swa.FAMILY.weights.but(layer=EXPERTS),),
)
FAMILIES = (
    PLAIN,
    WINDOWED,
    PLAIN.but(
        model_type="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        says="Granite's factors, experts in every layer, a shared expert",
        entries=(SHARED,),
        weights=PLAIN.weights,
    ),
)
