"""Factors that every count of floating-point operations shares.

Floating-point operations of a stage, forward, for one micro-batch on one rank.

Matrix products only, two operations for each multiplication and addition, causal attention counted
half. The sum over stages and ranks, times three for the backward pass, is what Megatron-LM counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import Sizes, Stage
from megatron_ext.planning.parameters import in_8_bits

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

MULTIPLY_AND_ADD = 2
"""Operations for each product of two numbers that is added to a sum."""

FORWARD_AND_BACKWARD = 3
"""Matrix products of a training step for each one forward: backward there are two, of the
gradients of the input and of the weight."""


CASTS = {"delayed": 4, "tensorwise": 6, "rowwise": 8}
"""Bytes that a cast to 8 bits in both layouts reads and writes for each number, by recipe, as
`layers.fp8` does it; Transformer Engine's recipes are taken for tensorwise."""


@dataclass(frozen=True)
class Operated:
    """Operations of one micro-batch.

    Attributes:
        linear: products with weights, forward, in 16 or 32 bits.
        fp8: those in 8 bits.
        scores: products without weights, forward: those of attention.
        again: what the backward pass runs again, in 16 or 32 bits.
        fp8_again: the same in 8 bits.
        weights, fp8_weights: of the weights' gradients.
        cast: bytes that casts to 8 bits read and write, in all passes together.
    """

    linear: float = 0.0
    fp8: float = 0.0
    scores: float = 0.0
    again: float = 0.0
    fp8_again: float = 0.0
    weights: float = 0.0
    fp8_weights: float = 0.0
    cast: float = 0.0

    @property
    def forward(self) -> float:
        """Of the forward pass, in any format."""
        return self.linear + self.fp8 + self.scores

    def __add__(self, other: Operated) -> Operated:
        both = {x.name: getattr(self, x.name) + getattr(other, x.name) for x in fields(self)}
        return Operated(**both)


@dataclass(frozen=True)
class Operations:
    """Formulas of one run; results are operations of one micro-batch on one rank."""

    config: RunConfig
    sizes: Sizes

    def projections(self) -> float:
        """To queries, keys and values, and from the heads, of one layer, forward."""
        x = self.sizes
        return self._per_token(x.h * x.d * (2 * x.n + 2 * x.g))

    def scores(self) -> float:
        """Products of one layer with the scores, forward."""
        # Two products of s by s by d for each head, of which causality leaves half.
        x = self.sizes
        return self._per_token(float(x.n * x.d * x.s))

    def mlp(self, experts: bool) -> float:
        """The MLP of one layer, or what a token's experts do, forward."""
        x, moe = self.sizes, self.config.moe
        width = x.f
        if experts:
            width = (moe.moe_ffn_hidden_size or x.f) * moe.moe_router_topk
            width += moe.moe_shared_expert_intermediate_size or 0
        return self._per_token(x.h * width * (3 if self.config.model.gated else 2))

    def layer(self, number: int) -> Operated:
        """One layer of the decoder, numbered from 0, with what its backward pass runs again."""
        linear = self.projections() + self.mlp(self.sizes.experts[number])
        scores, fp8 = self.scores(), self.config.fp8
        if not in_8_bits(self.config, number):
            return Operated(linear, scores=scores, weights=self._trained(linear))
        weights = self._trained(linear)
        return Operated(
            fp8=linear,
            scores=scores,
            weights=0.0 if fp8.fp8_wgrad else weights,
            fp8_weights=weights if fp8.fp8_wgrad else 0.0,
            cast=self._cast(number),
        )

    def _cast(self, number: int) -> float:
        """Bytes of the casts of inputs and of gradients of outputs of one layer."""
        x, gated = self.sizes, 2 if self.config.model.gated else 1
        numbers = x.h + (x.n + 2 * x.g) * x.d + x.n * x.d + x.h + x.h + gated * x.f + x.f + x.h
        per_number = CASTS.get(self.config.fp8.fp8_recipe, CASTS["tensorwise"])
        return float(numbers * x.tokens // x.tp * per_number)

    def _trained(self, linear: float) -> float:
        """Of the gradients of weights; those of adapters are negligible."""
        return linear if self.config.lora.lora_rank is None else 0.0

    def depth(self) -> Operated:
        """One depth of multi-token prediction without its logits, in 16 or 32 bits."""
        x = self.sizes
        linear = self.projections() + self.mlp(x.experts[-1]) + self._per_token(2 * x.h * x.h)
        return Operated(linear, scores=self.scores(), weights=self._trained(linear))

    def head(self) -> Operated:
        """The logits of the model and of each depth."""
        linear = self._per_token(self.sizes.h * self.sizes.v) * (1 + self.sizes.depths)
        return Operated(linear, weights=self._trained(linear))

    def stage(self, stage: Stage) -> Operated:
        """All of a stage."""
        total = Operated()
        for number in stage.layers:
            total += self.layer(number)
        for _ in range(stage.depths):
            total += self.depth()
        return total + self.recomputed(stage) + (self.head() if stage.head else Operated())

    def recomputed(self, stage: Stage) -> Operated:
        """What the backward pass of a stage runs again."""
        model, total = self.config.model, Operated()
        if model.recompute_granularity is None and not self.config.moe.moe_layer_recompute:
            return total
        count = len(stage.layers)
        if model.recompute_granularity == "full" and model.recompute_method == "block":
            count = min(count, model.recompute_num_layers or 0)
        for number in stage.layers[:count]:
            linear, scores = self._again(number)
            eight = linear if in_8_bits(self.config, number) else 0.0
            total += Operated(again=linear - eight + scores, fp8_again=eight)
        return total

    def _again(self, number: int) -> tuple[float, float]:
        """Of one layer, products with weights and others that are run again."""
        model, experts = self.config.model, self.sizes.experts[number]
        if model.recompute_granularity == "full":
            return self.projections() + self.mlp(experts), self.scores()
        modules = model.recompute_modules or ["core_attn"]
        selective = model.recompute_granularity == "selective"
        attention = selective and "core_attn" in modules
        of_experts = self.config.moe.moe_layer_recompute or (selective and "moe" in modules)
        inner = of_experts if experts else selective and "mlp" in modules
        return self.mlp(experts) if inner else 0.0, self.scores() if attention else 0.0

    def _per_token(self, products: float) -> float:
        return MULTIPLY_AND_ADD * products * self.sizes.tokens / self.sizes.tp


def step_flops(config: RunConfig, sizes: Sizes, stages: list[Stage]) -> float:
    """Of a whole training step on all ranks, recomputation not counted."""
    operations = Operations(config, sizes)
    forward = sum(operations.stage(stage).forward for stage in stages) * sizes.tp * sizes.cp
    sequences = config.training.batch_sizes[1]
    return FORWARD_AND_BACKWARD * forward / sizes.b * sequences
