"""Phi-3 and Phi-4: Llama with fused projections."""

from megatron_ext.text.convert.families import llama, mistral
from megatron_ext.text.convert.family import Gpt
from megatron_ext.text.convert.table import Table, fused_qkv, whole


def weights(gpt: Gpt, vocab_size: int) -> Table:
    layer = {
        **llama.norms(),
        "self_attention.linear_qkv.weight": fused_qkv(
            gpt.model, f"{llama.LAYER}.self_attn.qkv_proj.weight"
        ),
        "self_attention.linear_proj.weight": whole(f"{llama.LAYER}.self_attn.o_proj.weight"),
        "mlp.linear_fc1.weight": whole(f"{llama.LAYER}.mlp.gate_up_proj.weight"),
        "mlp.linear_fc2.weight": whole(f"{llama.LAYER}.mlp.down_proj.weight"),
    }
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    {},
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read=mistral.read,
    write=mistral.write,
    weights=weights,
)
