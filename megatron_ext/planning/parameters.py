"""Every parameter of a pipeline stage on one rank, counted from the configuration.

The model itself is not built, so that thousands of layouts can be priced in seconds;
tests/planning compares the lists with the modules that training builds, name by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import Sizes, Stage

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as a rank holds it.

    Attributes:
        name: in the module of its stage.
        numel: elements on this rank.
        expert: its replicas are expert-data-parallel, it has a buffer of its own.
        shared: a copy of the word embedding that other stages hold too.
    """

    name: str
    numel: int
    expert: bool = False
    shared: bool = False


def weights(config: RunConfig, sizes: Sizes, stage: Stage) -> list[Weight]:
    """Parameters of a stage on one rank, in the order in which the module registers them."""
    found = list(_embedding(config, sizes, stage))
    for position, layer in enumerate(stage.layers):
        found += _layer(config, sizes, f"decoder.layers.{position}", sizes.experts[layer])
    if stage.final_norm:
        found += _norm(config, "decoder.final_layernorm", sizes.h)
    for depth in range(stage.depths):
        found += _depth(config, sizes, f"mtp.layers.{depth}")
    found += _head(config, sizes, stage)
    return found


def _embedding(config: RunConfig, sizes: Sizes, stage: Stage) -> Iterator[Weight]:
    if not (stage.embedding or stage.depths):
        return
    tied = not config.model.untie_embeddings_and_output_weights
    # Copies are kept equal where the model has several stages; see core's LanguageModule.
    copied = sizes.pp > 1 and (tied or sizes.depths > 0)
    shared = copied and not (stage.embedding and stage.head)
    name = "embedding.word_embeddings.weight"
    yield Weight(name, sizes.v // sizes.tp * sizes.h, shared=shared)
    if config.model.position_embedding_type == "learned_absolute":
        positions = config.model.max_position_embeddings or 0
        yield Weight("embedding.position_embeddings.weight", positions * sizes.h)


def _head(config: RunConfig, sizes: Sizes, stage: Stage) -> Iterator[Weight]:
    tied = not config.model.untie_embeddings_and_output_weights
    if not stage.head or (tied and (stage.embedding or stage.depths)):
        return
    yield Weight("output_layer.weight", sizes.v // sizes.tp * sizes.h, shared=tied)


def _norm(config: RunConfig, name: str, size: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", size)
    if config.model.normalization == "LayerNorm":
        yield Weight(f"{name}.bias", size)


def _linear(name: str, weight: int, bias: int, expert: bool = False) -> Iterator[Weight]:
    """A matrix and its bias, 0 for none."""
    yield Weight(f"{name}.weight", weight, expert)
    if bias:
        yield Weight(f"{name}.bias", bias, expert)


def _layer(config: RunConfig, sizes: Sizes, name: str, experts: bool) -> list[Weight]:
    """One transformer layer."""
    found = list(_norm(config, f"{name}.input_layernorm", sizes.h))
    found += _attention(config, sizes, f"{name}.self_attention")
    found += _norm(config, f"{name}.pre_mlp_layernorm", sizes.h)
    if experts:
        found += _experts(config, sizes, f"{name}.mlp")
    else:
        found += _mlp(config, sizes, f"{name}.mlp", sizes.f // sizes.tp)
    return found


def _attention(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    h, d, tp = sizes.h, sizes.d, sizes.tp
    qkv = (sizes.n + 2 * sizes.g) * d // tp
    bias = config.model.add_bias_linear
    found = list(_linear(f"{name}.linear_proj", h * sizes.n * d // tp, h * bias))
    found += _linear(f"{name}.linear_qkv", qkv * h, qkv * config.model.add_qkv_bias)
    if config.model.qk_layernorm:
        found += _norm(config, f"{name}.q_layernorm", d)
        found += _norm(config, f"{name}.k_layernorm", d)
    return found


def _mlp(
    config: RunConfig, sizes: Sizes, name: str, width: int, expert: bool = False
) -> list[Weight]:
    """Two matrices of an MLP that has ``width`` channels on this rank."""
    inner, bias = width * (2 if config.model.gated else 1), config.model.add_bias_linear
    return [
        *_linear(f"{name}.linear_fc1", inner * sizes.h, inner * bias, expert),
        *_linear(f"{name}.linear_fc2", sizes.h * width, sizes.h * bias, expert),
    ]


def _experts(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    """Router, the experts of this rank, and the shared expert."""
    moe, model = config.moe, config.model
    count = moe.num_experts or 0
    found = list(_linear(f"{name}.router", count * sizes.h, count * model.add_bias_linear))
    width = (moe.moe_ffn_hidden_size or sizes.f) // sizes.etp
    for expert in range(count // sizes.ep):
        local = f"{name}.experts.local_experts.{expert}"
        found += _mlp(config, sizes, local, width, expert=sizes.ep > 1)
    shared = moe.moe_shared_expert_intermediate_size
    if shared:
        if moe.moe_shared_expert_gate:
            found.append(Weight(f"{name}.shared_experts.gate_weight", sizes.h))
        found += _mlp(config, sizes, f"{name}.shared_experts", shared // sizes.tp)
    return found


def _depth(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    """One depth of multi-token prediction; its layer is like the decoder's last."""
    found = [*_norm(config, f"{name}.enorm", sizes.h), *_norm(config, f"{name}.hnorm", sizes.h)]
    found += _linear(f"{name}.eh_proj", sizes.h // sizes.tp * 2 * sizes.h, 0)
    found += _layer(config, sizes, f"{name}.transformer_layer", sizes.experts[-1])
    found += _norm(config, f"{name}.final_layernorm", sizes.h)
    return found
