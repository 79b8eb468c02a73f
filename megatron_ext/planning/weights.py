"""The weights of a model as its ranks hold them, and the operations of products with them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.config.optimizer import LoraConfig

MULTIPLY_AND_ADD = 2
"""Floating-point operations of one multiply-add."""

FORWARD_AND_BACKWARD = 3
"""Matrix products in training per forward product: itself, and one for each factor's gradient."""

LINEAR = re.compile(r"\.linear_(qkv|proj|fc1|fc2|(q|kv)(|_proj|_down_proj|_up_proj))\.weight$")
"""Matches the names of weights whose matrix products may be in 8 bits."""


@lru_cache(maxsize=1 << 16)
def is_linear(name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer, as `LINEAR` says."""
    return LINEAR.search(name) is not None


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


@dataclass(frozen=True)
class Linear:
    """A linear layer sharded over ranks, with an optional bias and LoRA adapter (`layers.lora`).

    Attributes:
        outputs, inputs: features of the whole layer.
        rows, columns: numbers of ranks over which its outputs and its inputs are sharded.
        copies: number of ranks that each hold another layer of this kind: the expert-parallel size
            for experts, else 1.
        expert: whether it belongs to experts.
        gated: whether the outputs are a gate and what it multiplies.
    """

    name: str
    outputs: int
    inputs: int
    rows: int = 1
    columns: int = 1
    bias: bool = True
    copies: int = 1
    expert: bool = False
    gated: bool = False

    @property
    def products(self) -> int:
        """Return the multiplications per token in the whole layer, on all ranks together."""
        return self.outputs * self.inputs

    def weights(self, lora: LoraConfig, module: str = "") -> list[Weight]:
        """Return a rank's weight, bias and two adapter matrices, if any, in the module's order.

        ``module`` is the name of the module that holds the layer, with a dot at its end.
        """
        if lora.lora_rank is None:
            return list(_plain_weights(self, module))
        return self._listed(module, lora)

    def _listed(self, module: str, lora: LoraConfig | None) -> list[Weight]:
        height = self.outputs // self.rows
        width = self.inputs // self.columns
        name = module + self.name
        matrix = self.outputs, self.inputs
        parts = self.rows * self.columns * self.copies
        weights = [Weight(f"{name}.weight", height * width, parts, self.expert, matrix=matrix)]

        def add(kind: str, numel: int, ranks: int) -> None:
            weights.append(Weight(f"{name}.{kind}", numel, ranks * self.copies, self.expert))

        if self.bias:
            add("bias", height, self.rows)
        targets = [] if lora is None else lora.lora_target_modules or []
        if lora is not None and lora.lora_rank and name.rpartition(".")[2] in targets:
            inner = lora.inner_width(self.name.rpartition(".")[2], gated=self.gated)
            add("lora.a", inner * width, self.columns)
            add("lora.b", height * lora.lora_rank, self.rows)
        return weights


@lru_cache(maxsize=1 << 16)
def _plain_weights(linear: Linear, module: str) -> tuple[Weight, ...]:
    """Return the parameters of a layer without adapters.

    They are made once for the thousands of experts that a search lists in each of its layouts.
    """
    return tuple(linear._listed(module, None))


def with_frozen(lora: LoraConfig, weights: Iterable[Weight]) -> list[Weight]:
    """Return the weights; if the run trains LoRA adapters, mark all other weights as frozen."""
    if lora.lora_rank is None:
        return list(weights)
    return [w if ".lora." in w.name else dataclasses.replace(w, frozen=True) for w in weights]


def distinct(chunks: Iterable[Iterable[Weight]]) -> int:
    """Return the number of parameters of the whole model.

    ``chunks`` holds, for each stage, the weights of one of its ranks; `Weight.parts` says over
    how many ranks each is divided. Copies of the word embedding count once.
    """
    weights = [weight for chunk in chunks for weight in chunk]
    first_copy = [weight for weight in weights if weight.shared][:1]
    own = [weight for weight in weights if not weight.shared]
    return sum(weight.numel * weight.parts for weight in own + first_copy)
