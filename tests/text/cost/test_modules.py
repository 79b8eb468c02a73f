"""Planned weights, state and activations of a GPT beside those of its modules, in a fake world."""

import torch

from megatron_ext.config.layers import has_experts
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.task import GPT
from tests.planning.fake_world import built, check_state, enter_fake_world, kept
from tests.planning.measure import configuration
from tests.ranks import ParallelContext, ranks
from tests.text.cost import layouts

DEEPSEEK = (
    f"{layouts.LATENT} --q-lora-rank 48 --mtp-num-layers 1 --num-experts 4 --moe-layer-freq "
    "[0,0,1,1] --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96 "
    "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Ettt|tmL --bf16 --nproc-per-node 4"
)
NAMES = [*layouts.LAYOUTS, *layouts.MORE, *layouts.PEAKS]
RUNS = {name: layouts.flags_of(name) for name in NAMES}
RUNS["deepseek"] = [*layouts.MODEL, *DEEPSEEK.split()]


NEARLY = ("cp2", "sinks", "mla", "fp8", "dropout", "deepseek", "xielu", "delta", "mamba")
"""Words of runs whose layers keep a few small tensors that the plan leaves out."""


def slack(name: str, experts: bool) -> tuple[float, float]:
    """Return the shares by which a layer may keep less and more than planned.

    Experts get unequal numbers of tokens.
    """
    if experts:
        return 0.06, 0.06
    share = 0.03 if any(word in name for word in NEARLY) else 0.0
    return share, share


@ranks()
def test_weights_and_state_are_exact_in_every_layout(context: ParallelContext) -> None:
    for flags in RUNS.values():
        check_state(GPT, GptNetwork.of(configuration(flags)))


@ranks()
def test_a_layer_keeps_the_planned_bytes(context: ParallelContext) -> None:
    for name, flags in RUNS.items():
        config = configuration(flags)
        network = GptNetwork.of(config)
        x = network.sizes
        (chunk, *_), _ = built(GPT, config, enter_fake_world(config, 0))
        (stage, *_) = network.stages_of(0)
        shape = x.residual_tokens // x.b, x.b, x.h
        dtype = torch.bfloat16 if x.half else torch.float32
        chunk.to(dtype)
        kind = config.section(PositionConfig).position_embedding_type
        rotates = kind == "rope" and x.latent is None
        angles = chunk.rotary_pos_emb(x.s) if rotates else None
        for number, layer in zip(stage.layers, chunk.decoder.layers, strict=True):
            hidden = torch.randn(shape, dtype=dtype, requires_grad=True)
            with kept(list(chunk.parameters())) as storages:
                outputs = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
            found = sum(storage.nbytes() for storage in storages.values())
            planned = network.layer_bytes(number).kept
            less, more = slack(name, has_experts(x.kinds[number]))
            assert (1 - less) * planned <= found <= (1 + more) * planned, (
                name,
                number,
                planned,
                found,
            )
            del outputs
