"""Every parameter of a pipeline stage on one rank, counted from the configuration.

The model itself is not built, so that thousands of layouts can be priced in seconds;
tests/planning compares the lists with the modules that training builds, name by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import Sizes, Stage

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

LINEAR = re.compile(r"\.linear_(qkv|proj|fc1|fc2|q|kv)\.weight$")
"""Names of the matrices that may multiply in 8 bits."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as a rank holds it.

    Attributes:
        name: in the module of its stage.
        numel: elements on this rank.
        parts: ranks that hold different parts of it; 1 where all of its ranks hold it whole.
        expert: its replicas are expert-data-parallel, it has a buffer of its own.
        shared: a copy of the word embedding that other stages hold too.
        frozen: it is not trained: no gradient, no optimizer, no average.
        eight: it is held, and gathered, in 8 bits.
    """

    name: str
    numel: int
    parts: int = 1
    expert: bool = False
    shared: bool = False
    frozen: bool = False
    eight: bool = False


@dataclass(frozen=True)
class Linear:
    """A matrix as ranks share it, perhaps with a bias and an adapter (`layers.lora`).

    Attributes:
        name: of the layer.
        outputs, inputs: of the whole matrix.
        rows, columns: ranks that cut its outputs, or its inputs.
        bias: it has one, cut as the outputs.
        copies: layers alike that other ranks hold, as experts are.
        expert: see `Weight`.
    """

    name: str
    outputs: int
    inputs: int
    rows: int = 1
    columns: int = 1
    bias: bool = True
    copies: int = 1
    expert: bool = False

    def weights(self, config: RunConfig) -> list[Weight]:
        """Weight, bias and the two matrices of an adapter, in the order of the module."""
        height, width = self.outputs // self.rows, self.inputs // self.columns
        found = [self._weight("weight", height * width, self.rows * self.columns)]
        if self.bias:
            found.append(self._weight("bias", height, self.rows))
        rank = config.lora.lora_rank
        if rank is not None and self.name.rpartition(".")[2] in self._targets(config):
            found.append(self._weight("lora.a", rank * width, self.columns))
            found.append(self._weight("lora.b", height * rank, self.rows))
        return found

    def _weight(self, name: str, numel: int, parts: int) -> Weight:
        return Weight(f"{self.name}.{name}", numel, parts * self.copies, self.expert)

    @staticmethod
    def _targets(config: RunConfig) -> list[str]:
        return config.lora.lora_target_modules or []


def with_frozen(config: RunConfig, weights: Iterable[Weight]) -> list[Weight]:
    """All weights but adapters frozen, where there are adapters."""
    if config.lora.lora_rank is None:
        return list(weights)
    return [w if ".lora." in w.name else dataclasses.replace(w, frozen=True) for w in weights]


def distinct(chunks: Iterable[Iterable[Weight]]) -> int:
    """Elements of the whole model, of the weights of each of its stages on one rank.

    A copy of the embedding counts once.
    """
    total = copies = 0
    for chunk in chunks:
        for weight in chunk:
            copies += weight.shared
            if not weight.shared or copies == 1:
                total += weight.numel * weight.parts
    return total


def weights(config: RunConfig, sizes: Sizes, stage: Stage) -> list[Weight]:
    """Parameters of a stage on one rank, in the order in which the module registers them."""
    found = list(_embedding(config, sizes, stage))
    for position, number in enumerate(stage.layers):
        layer = _layer(config, sizes, f"decoder.layers.{position}", sizes.experts[number])
        found += _in_8_bits(config, layer) if in_8_bits(config, number) else layer
    if stage.final_norm:
        found += _norm(config, "decoder.final_layernorm", sizes.h)
    for depth in range(stage.depths):
        found += _depth(config, sizes, f"mtp.layers.{depth}")
    found += _head(config, sizes, stage)
    return with_frozen(config, found)


def in_8_bits(config: RunConfig, number: int) -> bool:
    """Whether the linear layers of a layer, numbered from 0, multiply in 8 bits."""
    layers = config.model.num_layers or 0
    return config.fp8.fp8_format is not None and not config.fp8.keeps_bf16(number + 1, layers)


def _in_8_bits(config: RunConfig, layer: list[Weight]) -> list[Weight]:
    """The weights of such a layer, whose matrices ``--fp8-param-gather`` holds in 8 bits."""
    gathers = config.fp8.fp8_param_gather
    return [
        dataclasses.replace(weight, eight=gathers and LINEAR.search(weight.name) is not None)
        for weight in layer
    ]


def _embedding(config: RunConfig, sizes: Sizes, stage: Stage) -> Iterator[Weight]:
    if not (stage.embedding or stage.depths):
        return
    tied = not config.model.untie_embeddings_and_output_weights
    # Copies are kept equal where the model has several stages; see core's LanguageModule.
    copied = sizes.pp > 1 and (tied or sizes.depths > 0)
    shared = copied and not (stage.embedding and stage.head)
    name = "embedding.word_embeddings.weight"
    yield Weight(name, sizes.v // sizes.tp * sizes.h, sizes.tp, shared=shared)
    if config.model.position_embedding_type == "learned_absolute":
        positions = config.model.max_position_embeddings or 0
        yield Weight("embedding.position_embeddings.weight", positions * sizes.h)


def _head(config: RunConfig, sizes: Sizes, stage: Stage) -> Iterator[Weight]:
    tied = not config.model.untie_embeddings_and_output_weights
    if not stage.head or (tied and (stage.embedding or stage.depths)):
        return
    numel = sizes.v // sizes.tp * sizes.h
    yield Weight("output_layer.weight", numel, sizes.tp, shared=tied)


def _norm(config: RunConfig, name: str, size: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", size)
    if config.model.normalization == "LayerNorm":
        yield Weight(f"{name}.bias", size)


def _layer(config: RunConfig, sizes: Sizes, name: str, experts: bool) -> list[Weight]:
    """One transformer layer."""
    found = list(_norm(config, f"{name}.input_layernorm", sizes.h))
    found += _attention(config, sizes, f"{name}.self_attention")
    found += _norm(config, f"{name}.pre_mlp_layernorm", sizes.h)
    if experts:
        found += _experts(config, sizes, f"{name}.mlp")
    else:
        found += _mlp(config, sizes, Linear(f"{name}.mlp", sizes.f, sizes.h, rows=sizes.tp))
    return found


def _attention(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    h, d, tp, model = sizes.h, sizes.d, sizes.tp, config.model
    qkv, out = (sizes.n + 2 * sizes.g) * d, sizes.n * d
    proj = Linear(f"{name}.linear_proj", h, out, columns=tp, bias=model.add_bias_linear)
    fused = Linear(f"{name}.linear_qkv", qkv, h, rows=tp, bias=bool(model.add_qkv_bias))
    found = [*proj.weights(config), *fused.weights(config)]
    if config.model.qk_layernorm:
        found += _norm(config, f"{name}.q_layernorm", d)
        found += _norm(config, f"{name}.k_layernorm", d)
    return found


def _mlp(config: RunConfig, sizes: Sizes, like: Linear) -> list[Weight]:
    """Two matrices of an MLP.

    Args:
        config: of the run.
        sizes: of it.
        like: its name, its width as outputs, over as many ranks as it says.
    """
    width, ranks, bias = like.outputs, like.rows, config.model.add_bias_linear
    inner = width * (2 if config.model.gated else 1)
    fc1 = dataclasses.replace(like, name=f"{like.name}.linear_fc1", outputs=inner, bias=bias)
    fc2 = dataclasses.replace(
        fc1, name=f"{like.name}.linear_fc2", outputs=sizes.h, inputs=width, rows=1, columns=ranks
    )
    return [*fc1.weights(config), *fc2.weights(config)]


def _experts(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    """Router, the experts of this rank, and the shared expert."""
    moe, model = config.moe, config.model
    count = moe.num_experts or 0
    router = Linear(f"{name}.router", count, sizes.h, bias=model.add_bias_linear)
    found, width = router.weights(config), moe.moe_ffn_hidden_size or sizes.f
    apart = sizes.ep > 1 or sizes.etp != sizes.tp
    for expert in range(count // sizes.ep):
        local = f"{name}.experts.local_experts.{expert}"
        like = Linear(local, width, sizes.h, rows=sizes.etp, copies=sizes.ep, expert=apart)
        found += _mlp(config, sizes, like)
    shared = moe.moe_shared_expert_intermediate_size
    if shared:
        if moe.moe_shared_expert_gate:
            found.append(Weight(f"{name}.shared_experts.gate_weight", sizes.h))
        like = Linear(f"{name}.shared_experts", shared, sizes.h, rows=sizes.tp)
        found += _mlp(config, sizes, like)
    return found


def _depth(config: RunConfig, sizes: Sizes, name: str) -> list[Weight]:
    """One depth of multi-token prediction; its layer is like the decoder's last."""
    found = [*_norm(config, f"{name}.enorm", sizes.h), *_norm(config, f"{name}.hnorm", sizes.h)]
    projection = Linear(f"{name}.eh_proj", sizes.h, 2 * sizes.h, rows=sizes.tp, bias=False)
    found += projection.weights(config)
    found += _layer(config, sizes, f"{name}.transformer_layer", sizes.experts[-1])
    found += _norm(config, f"{name}.final_layernorm", sizes.h)
    return found
