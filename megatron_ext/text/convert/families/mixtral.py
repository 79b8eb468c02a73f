"""Mixtral: Mistral with experts in every layer."""

from typing import Any

from megatron_ext.text.convert.families import llama, mistral
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Table, whole

EXPERTS = "block_sparse_moe"


def read(settings: Settings) -> Fields:
    # transformers renormalizes a softmax over all experts, which equals a softmax over the chosen.
    own = {"moe_router_pre_softmax": False, "moe_ffn_hidden_size": settings["intermediate_size"]}
    return mistral.read(settings) | own


def write(gpt: Gpt) -> dict[str, Any]:
    width = gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size
    return mistral.write(gpt) | {"intermediate_size": width}


def weights(gpt: Gpt, vocab_size: int) -> Table:
    layer = {
        **llama.norms(),
        **llama.attention(gpt),
        **llama.gated_mlp(
            "mlp.experts.experts", f"{EXPERTS}.experts.{{expert}}", ("w1", "w3", "w2")
        ),
        "mlp.router.weight": whole(f"{llama.LAYER}.{EXPERTS}.gate.weight"),
    }
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    {},
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    same=llama.SAME
    | {"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    read=read,
    write=write,
    weights=weights,
)
