"""The text part of Qwen3-VL with experts: Qwen3-MoE with the tensors of all experts stacked.

Where there are no images, the three coordinates of a token's position are the same, so that the
positions are Qwen3's. An expert's ``gate_up_proj`` is published as ``[h, 2 * ffn]``, gates first;
transformers writes it as ``[2 * ffn, h]``, and reads both.
"""

from megatron_ext.text.convert.families import qwen3_moe
from megatron_ext.text.convert.weights import Weights, whole


def _stacked(*, transposed: bool) -> Weights:
    return qwen3_moe.FAMILY.weights.but(
        layer={
            "mlp.experts.experts.linear_fc1.weight": whole(
                "mlp.experts.gate_up_proj", transposed=transposed, stacked=True
            ),
            "mlp.experts.experts.linear_fc2.weight": whole(
                "mlp.experts.down_proj", transposed=transposed, stacked=True
            ),
        }
    )


FAMILY = qwen3_moe.FAMILY.but(
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    says="Qwen3-MoE with stacked experts; only within a qwen3_vl_moe folder",
    fixed={"moe_router_pre_softmax": False},
    weights=_stacked(transposed=True),
    read_too=(_stacked(transposed=False),),
)
