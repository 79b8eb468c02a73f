"""Floating-point operations of a stage, forward, for one micro-batch on one rank.

Matrix products only, two operations for each multiplication and addition, causal attention counted
half. The sum over stages and ranks, times three for the backward pass, is what Megatron-LM counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import Sizes, Stage

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

MULTIPLY_AND_ADD = 2
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Operations:
    """Formulas of one run; results are operations of one micro-batch's forward pass on one rank."""

    config: RunConfig
    sizes: Sizes

    def attention(self) -> float:
        """Projections and products with the scores of one layer."""
        x = self.sizes
        projections = x.h * x.d * (2 * x.n + 2 * x.g)
        # Two products of s by s by d for each head, of which causality leaves half.
        return self._per_token(projections + self.score_products())

    def score_products(self) -> float:
        """Per token and layer: the part of `attention` without projections."""
        return float(self.sizes.n * self.sizes.d * self.sizes.s)

    def mlp(self, experts: bool) -> float:
        """The MLP of one layer, or what a token's experts do."""
        x, moe = self.sizes, self.config.moe
        width = x.f
        if experts:
            width = (moe.moe_ffn_hidden_size or x.f) * moe.moe_router_topk
            width += moe.moe_shared_expert_intermediate_size or 0
        return self._per_token(x.h * width * (3 if self.config.model.gated else 2))

    def layer(self, experts: bool) -> float:
        """One transformer layer."""
        return self.attention() + self.mlp(experts)

    def depth(self) -> float:
        """One depth of multi-token prediction without its logits."""
        x = self.sizes
        return self.layer(x.experts[-1]) + self._per_token(2 * x.h * x.h)

    def head(self) -> float:
        """The logits once."""
        return self._per_token(self.sizes.h * self.sizes.v)

    def stage(self, stage: Stage) -> float:
        """All of a stage."""
        layers = sum(self.layer(self.sizes.experts[layer]) for layer in stage.layers)
        head = self.head() * (1 + self.sizes.depths) if stage.head else 0.0
        return layers + stage.depths * self.depth() + head

    def recomputed(self, stage: Stage) -> float:
        """What the backward pass of a stage runs again."""
        model, found = self.config.model, 0.0
        modules = model.recompute_modules or ["core_attn"]
        if model.recompute_granularity is None and not self.config.moe.moe_layer_recompute:
            return found
        full, count = model.recompute_granularity == "full", len(stage.layers)
        if full and model.recompute_method == "block":
            count = min(count, model.recompute_num_layers or 0)
        for layer in stage.layers[:count]:
            experts = self.sizes.experts[layer]
            if full:
                found += self.layer(experts)
                continue
            if model.recompute_granularity == "selective" and "core_attn" in modules:
                found += self._per_token(self.score_products())
            recomputes = "moe" in modules or self.config.moe.moe_layer_recompute
            if recomputes if experts else "mlp" in modules:
                found += self.mlp(experts)
        return found

    def _per_token(self, products: float) -> float:
        return MULTIPLY_AND_ADD * products * self.sizes.tokens / self.sizes.tp


def step_flops(config: RunConfig, sizes: Sizes, stages: list[Stage]) -> float:
    """Of a whole training step on all ranks, recomputation not counted."""
    operations = Operations(config, sizes)
    forward = sum(operations.stage(stage) for stage in stages) * sizes.tp * sizes.cp
    sequences = config.training.batch_sizes[1]
    return FORWARD_AND_BACKWARD * forward / sizes.b * sequences
