"""The weights of a model as its ranks hold them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.config.lora_targets import adapts, trains_whole
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.planning.products import Linear

LINEAR = re.compile(
    r"\.(linear_(qkv|proj|fc1|fc2|(q|kv)(|_proj|_down_proj|_up_proj)|wq_b|wk|weights_proj)"
    r"|(in|out|[fg]_[ab])_proj)\.weight$"
)
"""Matches the names of weights whose matrix products may be in 8 bits."""


@lru_cache(maxsize=1 << 16)
def is_linear(name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer, as `LINEAR` says."""
    return LINEAR.search(name) is not None


QUANTIZED_BLOCK = 64
"""Elements of a weight in 4 bits that share a float32 factor (`layers.quantized`)."""
ROUTED = ".experts."
"""The text that the name of every routed expert's weight contains."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as a rank holds it.

    Attributes:
        name: name of the parameter in the module of its stage.
        numel: elements on this rank.
        parts: number of ranks over which the parameter is divided. For experts, ranks with other
            experts count too, so ``numel * parts`` are the elements in the whole model.
        expert: whether the parameter belongs to experts. Parameters of experts have
            expert-data-parallel replicas and a separate buffer.
        shared: whether it is a word embedding with copies on other stages.
        frozen: whether it is not trained; it then has no gradient, optimizer state or average.
        fp8: whether it is stored, and gathered, in 8 bits.
        matrix: rows and columns over all ranks if ``--optimizer muon`` updates the weight
            (`optim.matrices`); else None.
    """

    name: str
    numel: int
    parts: int = 1
    expert: bool = False
    shared: bool = False
    frozen: bool = False
    fp8: bool = False
    matrix: tuple[int, int] | None = None


PROJECTIONS = {"linear_qkv": 3, "linear_kv": 2, "linear_vision_kv": 2}
"""The number of projections that a linear layer joins, by its name; of others, one."""


def inner_width(lora: LoraConfig, layer: str, *, gated: bool = False) -> int:
    """Return the number of rows of matrix A of a linear layer's adapter; 0 without adapters.

    Args:
        layer: the layer's name or kind, such as "self_attention.linear_qkv".
        gated: whether its outputs are a gate and what it multiplies.
    """
    joined = 2 if gated else PROJECTIONS.get(layer.rpartition(".")[2], 1)
    separate = lora.lora_separate_projections and ROUTED not in f".{layer}"
    return (lora.lora_rank or 0) * (joined if separate else 1)


def weights_of(linear: Linear, lora: LoraConfig, module: str = "") -> list[Weight]:
    """Return a rank's weight, bias and adapter's tensors of a linear layer, in module order.

    The adapter (`layers.lora`, `layers.adapter_start`) is there if the flags give the layer one.
    ``module`` is the name of the module that holds the layer, with a dot at its end.
    """
    weights = list(_plain_weights(linear, module))
    name = module + linear.name
    if lora.lora_rank and adapts(lora, name):
        inner = inner_width(lora, name, gated=linear.gated)
        height = linear.outputs // linear.rows
        matrices = (
            ("a", inner * linear.inputs // linear.columns, linear.columns),
            ("b", height * lora.lora_rank, linear.rows),
        )
        tensors = list(matrices)
        if lora.lora_use_dora:
            tensors.append(("magnitude", height, linear.rows))
        if lora.is_principal:
            tensors += [(f"removed.{kind}", numel, ranks) for kind, numel, ranks in matrices]
        for kind, numel, ranks in tensors:
            parts = ranks * linear.copies
            weights.append(Weight(f"{name}.lora.{kind}", numel, parts, linear.expert))
    return weights


@lru_cache(maxsize=1 << 16)
def _plain_weights(linear: Linear, module: str) -> tuple[Weight, ...]:
    """Return weight and bias of a linear layer.

    They are made once for the thousands of experts that a search lists in each of its layouts.
    """
    name = module + linear.name
    height = linear.outputs // linear.rows
    numel = height * linear.inputs // linear.columns
    ranks = linear.rows * linear.columns * linear.copies
    matrix = linear.outputs, linear.inputs
    weight = Weight(f"{name}.weight", numel, ranks, linear.expert, matrix=matrix)
    if not linear.bias:
        return (weight,)
    return weight, Weight(f"{name}.bias", height, linear.rows * linear.copies, linear.expert)


def with_frozen(lora: LoraConfig, weights: Iterable[Weight]) -> list[Weight]:
    """Return the weights; if the run trains LoRA adapters, mark other weights as frozen.

    Those of ``--lora-modules-to-save`` are not.
    """
    if lora.lora_rank is None:
        return list(weights)
    adapter = re.compile(r"\.lora\.(?!removed)")

    def is_trained(weight: Weight) -> bool:
        tied = weight.shared and weight.name.startswith("output_layer.")
        of_adapter = adapter.search(weight.name) is not None
        return of_adapter or trains_whole(lora, weight.name, tied=tied)

    return [w if is_trained(w) else dataclasses.replace(w, frozen=True) for w in weights]


def bytes_of_frozen(weight: Weight, lora: LoraConfig, width: int) -> int:
    """Return the bytes of a frozen weight, whose elements have ``width`` bytes unless in 4 bits."""
    if lora.lora_quantize_weights is None or not is_linear(weight.name):
        return weight.numel * width
    return weight.numel // 2 + -(-weight.numel // QUANTIZED_BLOCK) * 4


def distinct(chunks: Iterable[Iterable[Weight]]) -> int:
    """Return the number of parameters of the whole model.

    ``chunks`` holds, for each stage, the weights of one of its ranks; `Weight.parts` says over
    how many ranks each is divided. Copies of the word embedding count once.
    """
    weights = [weight for chunk in chunks for weight in chunk]
    first_copy = [weight for weight in weights if weight.shared][:1]
    own = [weight for weight in weights if not weight.shared]
    return sum(weight.numel * weight.parts for weight in own + first_copy)
