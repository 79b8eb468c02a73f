"""Floating-point operations of a GPT: of a sequence, for the log, and of a stage, for a plan.

Matrix products only, two operations for each multiplication and addition, causal attention counted
half. The forward pass of all stages and ranks, times three for the backward pass, is what the log
counts, and what Megatron-LM counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Flops
from megatron_ext.planning.stages import Stage
from megatron_ext.text.cost.parameters import in_8_bits
from megatron_ext.text.cost.sizes import Sizes, expert_layers

CASTS = {"delayed": 4, "tensorwise": 6, "rowwise": 8}
"""Bytes that a cast to 8 bits in both layouts reads and writes for each number, by recipe, as
`layers.fp8` does it; Transformer Engine's recipes are taken for tensorwise."""


@dataclass(frozen=True)
class TokenProducts:
    """Multiplications of one token in a forward pass.

    Attributes:
        projections: queries, keys and values of one layer, and the projection of its heads.
        scores: the scores of one layer and their product with the values, half of all pairs.
        dense, experts: the MLP of one layer, or the experts that a token goes through.
        depth: the projection before the layer of a depth of multi-token prediction.
        logits: the output layer, once.
    """

    projections: int
    scores: int
    dense: int
    experts: int
    depth: int
    logits: int

    @classmethod
    def of(cls, config: RunConfig, *, gated: bool) -> TokenProducts:
        """Count the products of a resolved run.

        Args:
            gated: MLPs have a third matrix, that of their gate.
        """
        model, moe = config.model, config.moe
        h, f = model.hidden_size or 0, model.ffn_hidden_size or 0
        n, d = model.num_attention_heads or 0, model.kv_channels or 0
        groups = model.num_query_groups or n
        routed = (moe.moe_ffn_hidden_size or f) * moe.moe_router_topk
        shared = moe.moe_shared_expert_intermediate_size or 0
        matrices = 3 if gated else 2
        return cls(
            projections=h * d * (2 * n + 2 * groups),
            scores=n * d * (model.seq_length or 0),
            dense=h * f * matrices,
            experts=h * (routed + shared) * matrices,
            depth=2 * h * h,
            logits=h * (model.padded_vocab_size or 0),
        )

    def mlp(self, experts: bool) -> int:
        """Return the products of the MLP of one layer, or of its experts."""
        return self.experts if experts else self.dense


def flops_per_sample(config: RunConfig) -> float:
    """Return the operations of one sequence through the model, forward and backward.

    Recomputation is not counted. The figure is Megatron-LM's, so that the two compare: of all gated
    MLPs it counts the gate of SwiGLU alone, and it counts the norms of the depths.
    """
    model = config.model
    products, depths = TokenProducts.of(config, gated=model.swiglu), model.mtp_num_layers or 0
    layers = expert_layers(config.moe, model.num_layers or 0)
    layers += layers[-1:] * depths
    per_token = sum(products.projections + products.scores + products.mlp(x) for x in layers)
    per_token += depths * (3 * (model.hidden_size or 0) + products.depth)
    per_token += products.logits * (depths + 1)
    sequence = model.seq_length or 0
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * sequence * per_token)


@dataclass(frozen=True)
class GptFlops:
    """The operations of one micro-batch on one rank, layer by layer."""

    config: RunConfig
    sizes: Sizes
    products: TokenProducts

    @classmethod
    def of(cls, config: RunConfig, sizes: Sizes) -> GptFlops:
        """Return the formulas of a resolved run."""
        return cls(config, sizes, TokenProducts.of(config, gated=config.model.gated))

    def layer(self, number: int) -> Flops:
        """Return one layer of the decoder, numbered from 0, without recomputation."""
        linear = self._linear(self.sizes.experts[number])
        scores, fp8 = self._on_rank(self.products.scores), self.config.fp8
        weights = self._trained(linear)
        if not in_8_bits(self.config, number):
            return Flops(linear, scores=scores, weights=weights)
        return Flops(
            fp8=linear,
            scores=scores,
            weights=0.0 if fp8.fp8_wgrad else weights,
            fp8_weights=weights if fp8.fp8_wgrad else 0.0,
            cast=self._cast(),
        )

    def _linear(self, experts: bool) -> float:
        """Return the products with weights of one layer, forward."""
        return self._on_rank(self.products.projections) + self._on_rank(self.products.mlp(experts))

    def _cast(self) -> float:
        """Return the bytes of the casts of inputs and of gradients of outputs of one layer."""
        x, gated = self.sizes, 2 if self.config.model.gated else 1
        numbers = x.h + (x.n + 2 * x.g) * x.d + x.n * x.d + x.h + x.h + gated * x.f + x.f + x.h
        per_number = CASTS.get(self.config.fp8.fp8_recipe, CASTS["tensorwise"])
        return float(numbers * x.tokens // x.tp * per_number)

    def _trained(self, linear: float) -> float:
        """Return the products for the gradients of weights; those of adapters are negligible."""
        return linear if self.config.lora.lora_rank is None else 0.0

    def depth(self) -> Flops:
        """Return one depth of multi-token prediction without its logits, in 16 or 32 bits."""
        linear = self._linear(self.sizes.experts[-1]) + self._on_rank(self.products.depth)
        scores = self._on_rank(self.products.scores)
        return Flops(linear, scores=scores, weights=self._trained(linear))

    def head(self) -> Flops:
        """Return the logits of the model and of each depth."""
        linear = self._on_rank(self.products.logits) * (1 + self.sizes.depths)
        return Flops(linear, weights=self._trained(linear))

    def stage(self, stage: Stage) -> Flops:
        """Return all of a stage."""
        total = Flops()
        for number in stage.layers:
            total += self.layer(number)
        for _ in range(stage.depths):
            total += self.depth()
        return total + self.recomputed(stage) + (self.head() if stage.head else Flops())

    def recomputed(self, stage: Stage) -> Flops:
        """Return what the backward pass of a stage runs again."""
        model, total = self.config.model, Flops()
        if model.recompute_granularity is None and not self.config.moe.moe_layer_recompute:
            return total
        count = len(stage.layers)
        if model.recompute_granularity == "full" and model.recompute_method == "block":
            count = min(count, model.recompute_num_layers or 0)
        for number in stage.layers[:count]:
            linear, scores = self._again(number)
            fp8 = linear if in_8_bits(self.config, number) else 0.0
            total += Flops(again=linear - fp8 + scores, fp8_again=fp8)
        return total

    def _again(self, number: int) -> tuple[float, float]:
        """Return the products of one layer that are run again: with weights, and without."""
        model, experts = self.config.model, self.sizes.experts[number]
        scores = self._on_rank(self.products.scores)
        if model.recompute_granularity == "full":
            return self._linear(experts), scores
        modules = model.recompute_modules or ["core_attn"]
        selective = model.recompute_granularity == "selective"
        attention = selective and "core_attn" in modules
        of_experts = self.config.moe.moe_layer_recompute or (selective and "moe" in modules)
        inner = of_experts if experts else selective and "mlp" in modules
        mlp = self._on_rank(self.products.mlp(experts))
        return mlp if inner else 0.0, scores if attention else 0.0

    def _on_rank(self, products: int) -> float:
        """Return the operations of a rank's tokens on its share of the matrices."""
        return MULTIPLY_AND_ADD * products * self.sizes.tokens / self.sizes.tp


def step_flops(config: RunConfig, sizes: Sizes, stages: list[Stage]) -> float:
    """Return the operations of a training step on all ranks, recomputation not counted."""
    counted = GptFlops.of(config, sizes)
    forward = sum(counted.stage(stage).forward for stage in stages) * sizes.tp * sizes.cp
    return FORWARD_AND_BACKWARD * forward / sizes.b * config.training.batch_sizes[1]
