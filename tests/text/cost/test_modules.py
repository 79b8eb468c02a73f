"""Planned weights and activations of a GPT beside those of its modules, in a fake world."""

from typing import Any

import pytest
import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.planning.fake_world import enter_fake_world, kept
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


NEARLY = ("cp2", "sinks", "mla", "fp8", "dropout", "deepseek")
"""Words of runs whose layers keep a few small tensors that the plan leaves out."""


def slack(name: str, experts: bool) -> float:
    """Return the share by which a layer may keep more or less; experts get unequal numbers."""
    if experts:
        return 0.06
    return 0.03 if any(word in name for word in NEARLY) else 0.0


def built(config: RunConfig, pp_rank: int) -> list[Any]:
    """Return the chunks of a pipeline rank."""
    context = enter_fake_world(config, pp_rank)
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(build_gpt_chunk, config, transformer_config, context)
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    return [chunk.to(dtype) for chunk in chunks]


@ranks()
def test_weights_are_the_parameters_of_the_modules(context: ParallelContext) -> None:
    for name, flags in RUNS.items():
        config = configuration(flags)
        network = GptNetwork.of(config)
        x = network.sizes
        for pp_rank in range(x.pp):
            stages = network.stages_of(pp_rank)
            for chunk, stage in zip(built(config, pp_rank), stages, strict=True):
                parameters = [
                    (
                        key,
                        value.numel(),
                        not getattr(value, "allreduce", True),
                        not value.requires_grad,
                        getattr(value, "shared_embedding", False),
                    )
                    for key, value in chunk.named_parameters()
                ]
                planned = [
                    (w.name, w.numel, w.expert, w.frozen, w.shared) for w in network.weights(stage)
                ]
                assert planned == parameters, (name, pp_rank)


@ranks()
def test_a_layer_keeps_the_planned_bytes(context: ParallelContext) -> None:
    for name, flags in RUNS.items():
        config = configuration(flags)
        network = GptNetwork.of(config)
        x = network.sizes
        (chunk, *_), (stage, *_) = built(config, 0), network.stages_of(0)
        shape = x.residual_tokens // x.b, x.b, x.h
        dtype = torch.bfloat16 if x.half else torch.float32
        rotates = config.model.position_embedding_type == "rope" and x.latent is None
        angles = chunk.rotary_pos_emb(x.s) if rotates else None
        for number, layer in zip(stage.layers, chunk.decoder.layers, strict=True):
            hidden = torch.randn(shape, dtype=dtype, requires_grad=True)
            with kept(list(chunk.parameters())) as storages:
                outputs = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
            found = sum(storage.nbytes() for storage in storages.values())
            planned = network.layer_bytes(number).kept
            assert found == pytest.approx(planned, rel=slack(name, x.experts[number])), (
                name,
                number,
            )
            del outputs
