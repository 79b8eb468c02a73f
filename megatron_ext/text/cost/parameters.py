"""Every parameter of a stage of a GPT on one rank, counted from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.stages import Stage
from megatron_ext.planning.state import LINEAR, Linear, Weight, with_frozen
from megatron_ext.text.cost.sizes import Sizes


def in_8_bits(config: RunConfig, number: int) -> bool:
    """Return whether the linear layers of a layer, numbered from 0, multiply in 8 bits."""
    layers = config.model.num_layers or 0
    return config.fp8.fp8_format is not None and not config.fp8.keeps_bf16(number + 1, layers)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a run in the order in which its modules register them."""

    config: RunConfig
    sizes: Sizes

    def stage(self, stage: Stage) -> list[Weight]:
        """Return the parameters of a stage on one rank."""
        found = list(self._embedding(stage))
        for position, number in enumerate(stage.layers):
            layer = self._layer(f"decoder.layers.{position}", self.sizes.experts[number])
            found += self._gathered(layer) if in_8_bits(self.config, number) else layer
        if stage.final_norm:
            found += self._norm("decoder.final_layernorm")
        for depth in range(stage.depths):
            found += self._depth(f"mtp.layers.{depth}")
        found += self._head(stage)
        return with_frozen(self.config.lora, found)

    def _gathered(self, layer: list[Weight]) -> list[Weight]:
        """Return the weights of an 8-bit layer; ``--fp8-param-gather`` holds matrices in 8 bits."""
        gathers = self.config.fp8.fp8_param_gather
        return [
            dataclasses.replace(weight, fp8=gathers and LINEAR.search(weight.name) is not None)
            for weight in layer
        ]

    @property
    def _tied(self) -> bool:
        return not self.config.model.untie_embeddings_and_output_weights

    def _embedding(self, stage: Stage) -> Iterator[Weight]:
        if not (stage.embedding or stage.depths):
            return
        x, model = self.sizes, self.config.model
        # Copies are kept equal where the model has several stages; see core's LanguageModule.
        copied = x.pp > 1 and (self._tied or x.depths > 0)
        shared = copied and not (stage.embedding and stage.head)
        yield Weight("embedding.word_embeddings.weight", x.v // x.tp * x.h, x.tp, shared=shared)
        if model.position_embedding_type == "learned_absolute":
            positions = model.max_position_embeddings or 0
            yield Weight("embedding.position_embeddings.weight", positions * x.h)

    def _head(self, stage: Stage) -> Iterator[Weight]:
        x = self.sizes
        if stage.head and not (self._tied and (stage.embedding or stage.depths)):
            yield Weight("output_layer.weight", x.v // x.tp * x.h, x.tp, shared=self._tied)

    def _norm(self, name: str, size: int | None = None) -> Iterator[Weight]:
        """Yield the parameters of a norm of the hidden size, or of another size."""
        size = self.sizes.h if size is None else size
        yield Weight(f"{name}.weight", size)
        if self.config.model.normalization == "LayerNorm":
            yield Weight(f"{name}.bias", size)

    def _linear(self, linear: Linear) -> list[Weight]:
        return linear.weights(self.config.lora)

    def _layer(self, name: str, experts: bool) -> list[Weight]:
        """Return one transformer layer."""
        x = self.sizes
        found = [*self._norm(f"{name}.input_layernorm"), *self._attention(f"{name}.self_attention")]
        found += self._norm(f"{name}.pre_mlp_layernorm")
        if experts:
            return found + self._experts(f"{name}.mlp")
        return found + self._mlp(Linear(f"{name}.mlp", x.f, x.h, rows=x.tp))

    def _attention(self, name: str) -> list[Weight]:
        x, model = self.sizes, self.config.model
        qkv, out = (x.n + 2 * x.g) * x.d, x.n * x.d
        proj = Linear(f"{name}.linear_proj", x.h, out, columns=x.tp, bias=model.add_bias_linear)
        fused = Linear(f"{name}.linear_qkv", qkv, x.h, rows=x.tp, bias=bool(model.add_qkv_bias))
        found = [*self._linear(proj), *self._linear(fused)]
        if model.qk_layernorm:
            found += self._norm(f"{name}.q_layernorm", x.d)
            found += self._norm(f"{name}.k_layernorm", x.d)
        return found

    def _mlp(self, like: Linear) -> list[Weight]:
        """Return the two matrices of an MLP.

        Args:
            like: the MLP's name, its width as outputs, and how many ranks share them.
        """
        model, width = self.config.model, like.outputs
        inner = width * (2 if model.gated else 1)
        name, bias = like.name, model.add_bias_linear
        fc1 = dataclasses.replace(like, name=f"{name}.linear_fc1", outputs=inner, bias=bias)
        fc2 = dataclasses.replace(
            fc1,
            name=f"{name}.linear_fc2",
            outputs=self.sizes.h,
            inputs=width,
            rows=1,
            columns=like.rows,
        )
        return [*self._linear(fc1), *self._linear(fc2)]

    def _experts(self, name: str) -> list[Weight]:
        """Return router, the experts of this rank, and the shared expert."""
        x, moe = self.sizes, self.config.moe
        count, width = moe.num_experts or 0, moe.moe_ffn_hidden_size or x.f
        bias = self.config.model.add_bias_linear
        found = self._linear(Linear(f"{name}.router", count, x.h, bias=bias))
        apart = x.ep > 1 or x.etp != x.tp
        for expert in range(count // x.ep):
            local = f"{name}.experts.local_experts.{expert}"
            found += self._mlp(Linear(local, width, x.h, rows=x.etp, copies=x.ep, expert=apart))
        shared = moe.moe_shared_expert_intermediate_size
        if shared:
            if moe.moe_shared_expert_gate:
                found.append(Weight(f"{name}.shared_experts.gate_weight", x.h))
            found += self._mlp(Linear(f"{name}.shared_experts", shared, x.h, rows=x.tp))
        return found

    def _depth(self, name: str) -> list[Weight]:
        """Return one depth of multi-token prediction; its layer is like the decoder's last."""
        x = self.sizes
        found = [*self._norm(f"{name}.enorm"), *self._norm(f"{name}.hnorm")]
        projection = Linear(f"{name}.eh_proj", x.h, 2 * x.h, rows=x.tp, bias=False)
        found += self._linear(projection)
        found += self._layer(f"{name}.transformer_layer", x.experts[-1])
        found += self._norm(f"{name}.final_layernorm")
        return found
