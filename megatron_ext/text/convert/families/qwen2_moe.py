"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and a shared expert behind a gate."""

from typing import Any

from megatron_ext.text.convert.families import llama, qwen2
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Parts, Table, whole

SAME = llama.SAME | {
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}


def read_experts(settings: Settings) -> Fields:
    """Return the configuration fields of the layers with experts and of the router's softmax.

    The softmax comes before the choice of experts unless ``norm_topk_prob`` is set.
    """
    step = settings["decoder_sparse_step"] or 1
    dense = settings["mlp_only_layers"] or []
    layers = range(settings["num_hidden_layers"])
    holds = [int(x not in dense and (x + 1) % step == 0) for x in layers]
    freq = "1" if all(holds) else llama.list_flag(holds)
    # Scores that are not renormalized come from a softmax over all experts, before the choice.
    return {"moe_layer_freq": freq, "moe_router_pre_softmax": not settings["norm_topk_prob"]}


def write_experts(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json that describe the experts of ``gpt``."""
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, experts in enumerate(holds) if not experts],
        "moe_intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size,
        "norm_topk_prob": not gpt.moe.moe_router_pre_softmax,
    }


def routed_experts(theirs: str = "mlp") -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensors hold each weight of a layer's MLP.

    The result covers a dense MLP, the routed experts and the router. ``theirs`` is the path of
    experts and router within a layer of the Hugging Face model.
    """
    return {
        **llama.gated_mlp(),
        **llama.gated_mlp("mlp.experts.experts", f"{theirs}.experts.{{expert}}"),
        "mlp.router.weight": whole(f"{llama.LAYER}.{theirs}.gate.weight"),
    }


def read(settings: Settings) -> Fields:
    if settings["qkv_bias"] is False:
        settings.refuse("qkv_bias", advice="use a model that has them")
    return qwen2.read(settings) | read_experts(settings)


def write(gpt: Gpt) -> dict[str, Any]:
    return qwen2.write(gpt) | write_experts(gpt) | {"qkv_bias": True}


def weights(gpt: Gpt, vocab_size: int) -> Table:
    gate = whole(f"{llama.LAYER}.mlp.shared_expert_gate.weight")
    layer = {
        **llama.norms(),
        **llama.attention(gpt),
        **routed_experts(),
        **llama.gated_mlp("mlp.shared_experts", "mlp.shared_expert"),
        "mlp.shared_experts.gate_weight": gate,
    }
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    {"add_qkv_bias": True, "moe_shared_expert_gate": True},
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    same=SAME | {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    read=read,
    write=write,
    weights=weights,
)
