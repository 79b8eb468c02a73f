"""Formulas of the MMDiT (`video.model.mmdit`): parameters, activations, operations, messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import (
    FORWARD_AND_BACKWARD,
    MULTIPLY_AND_ADD,
    Flops,
    Volume,
    ring,
)
from megatron_ext.planning.stages import (
    FP32,
    LayerBytes,
    Ranks,
    Stage,
    in_order,
    recomputed,
    rms_norm,
)
from megatron_ext.planning.state import Linear, Weight
from megatron_ext.video.config.mmdit import TIMESTEP_WIDTH, MMDiTConfig, MMDiTSizes
from megatron_ext.video.cost.clip import (
    BlockBytes,
    Clip,
    ClipNetwork,
    loss,
    num_stages,
    ranks_for,
    stages_of,
)
from megatron_ext.video.cost.flops import flops_of_clip
from megatron_ext.video.model.mmdit.options import stage_blocks


@dataclass(frozen=True)
class MMDiTNetwork(ClipNetwork):
    """An MMDiT on the clips of one bucket; see `Network`.

    The ranks of context parallelism hold unequal shares of text and image, but equal numbers of
    tokens, which cost the same.
    """

    config: RunConfig
    sizes: Ranks
    model: MMDiTSizes
    clip: Clip

    @classmethod
    def of(cls, config: RunConfig, clip: Clip) -> MMDiTNetwork:
        """Return the network of a resolved run on a bucket of its data."""
        return cls(
            config, ranks_for(config, clip), config.section(MMDiTConfig).sizes(config.model), clip
        )

    def stages(self) -> list[Stage]:
        """Return stages whose blocks are dealt by cost; double blocks come first."""
        cost = self.config.section(MMDiTConfig).double_block_cost
        return stages_of(self.config, stage_blocks(self.model, num_stages(self.config), cost))

    @cached_property
    def block_bytes(self) -> BlockBytes:
        """Return the tensors of a block, whose rows are text and image."""
        x = self.sizes
        return BlockBytes(x, self.model.hidden_size, self.tokens // x.cp * x.b)

    @property
    def boundary(self) -> int:
        """Return hidden states and the embedding of the timesteps, ``[s + 1, b, h]``."""
        return self.block_bytes.stream + self._vector

    @property
    def _vector(self) -> int:
        """Return one vector for each clip, ``[b, h]``."""
        return self.sizes.b * self.model.hidden_size * self.sizes.width

    def _is_double(self, number: int) -> bool:
        return number < self.model.num_double_blocks

    def weights(self, stage: Stage) -> list[Weight]:
        """See `Network.weights`."""
        found = self._embedding() if stage.embedding else []
        doubles = [number for number in stage.layers if self._is_double(number)]
        for number in doubles:
            for stream in ("txt", "img"):
                found += self._stream(f"double_blocks.{number}.{stream}")
        for number in stage.layers[len(doubles) :]:
            first = self.model.num_double_blocks
            found += self._single(f"single_blocks.{number - first}")
        if stage.head:
            h = self.model.hidden_size
            found += self._whole("final_layer.modulation", h, 2 * h)
            found += self._whole("final_layer.linear", h, self.model.token_width)
        return found

    def _whole(self, name: str, inputs: int, outputs: int) -> list[Weight]:
        return Linear(name, outputs, inputs).weights(self.config.lora)

    def _embedding(self) -> list[Weight]:
        x, h = self.model, self.model.hidden_size
        vectors = {"time_in": TIMESTEP_WIDTH, "pooled_in": x.pooled_width}
        if x.guidance_embed:
            vectors["guidance_in"] = TIMESTEP_WIDTH
        found = [*self._whole("embedding.img_in", x.token_width, h)]
        found += self._whole("embedding.txt_in", x.text_width, h)
        for name, width in vectors.items():
            found += self._whole(f"embedding.{name}.linear_in", width, h)
            found += self._whole(f"embedding.{name}.linear_out", h, h)
        if x.cond_embed:
            found += self._whole("embedding.cond_in", x.cond_width, h)
        return found

    def _layers(self, name: str, *, fc2_bias: bool) -> dict[str, list[Weight]]:
        """Return the layers that a stream and a single block have in common, by their names."""
        h, m, d, tp = (
            self.model.hidden_size,
            self.model.mlp_size,
            self.model.head_dim,
            self.sizes.tp,
        )
        bias = self.model.qkv_bias
        layers = {
            "linear_qkv": Linear(f"{name}.linear_qkv", 3 * h, h, rows=tp, bias=bias),
            "linear_proj": Linear(f"{name}.linear_proj", h, h, columns=tp),
            "linear_fc1": Linear(f"{name}.linear_fc1", m, h, rows=tp),
            "linear_fc2": Linear(f"{name}.linear_fc2", h, m, columns=tp, bias=fc2_bias),
        }
        found = {key: layer.weights(self.config.lora) for key, layer in layers.items()}
        norms = [Weight(f"{name}.norm.{x}_layernorm.weight", d) for x in "qk"]
        return {**found, "norm": norms}

    def _stream(self, name: str) -> list[Weight]:
        """Return one stream of a double block."""
        h, layers = self.model.hidden_size, self._layers(name, fc2_bias=True)
        order = "linear_qkv norm linear_proj linear_fc1 linear_fc2".split()
        found = self._whole(f"{name}.modulation", h, 6 * h)
        return found + [weight for key in order for weight in layers[key]]

    def _single(self, name: str) -> list[Weight]:
        h, layers = self.model.hidden_size, self._layers(name, fc2_bias=False)
        order = "linear_qkv linear_fc1 norm linear_proj linear_fc2".split()
        found = self._whole(f"{name}.modulation", h, 3 * h)
        return found + [weight for key in order for weight in layers[key]]

    def activations(self, stage: Stage) -> LayerBytes:
        """See `Network.activations`."""
        x, model, flags = self.sizes, self.model, self.config.section(MMDiTConfig)
        table = self.block_bytes.rows * model.head_dim * FP32
        parts = [self._entering() if stage.embedding else LayerBytes(0, 0), LayerBytes(table, 0)]
        doubles = [self._double() for number in stage.layers if self._is_double(number)]
        singles = [self._single_block()] * (len(stage.layers) - len(doubles))
        # Blocks count along the whole model: those of the stages before come first.
        for blocks, kind, asked, total in (
            (doubles, True, flags.recompute_double_blocks, model.num_double_blocks),
            (singles, False, flags.recompute_single_blocks, model.num_single_blocks),
        ):
            before = self._before(stage, double=kind)
            limit = max(0, (total if asked is None else asked) - before)
            parts += recomputed(blocks, self.block_bytes.stream, size=1, limit=limit)
        if stage.head:
            parts.append(self._final())
            parts.append(loss(x, self._image_rows, model.token_width))
        return in_order(*parts)

    def layer(self) -> LayerBytes:
        """Return a block of the more frequent kind."""
        singles = self.model.num_single_blocks > self.model.num_double_blocks
        return self._single_block() if singles else self._double()

    def _before(self, stage: Stage, *, double: bool) -> int:
        """Return the number of blocks of a kind on the stages before."""
        first = min(stage.layers)
        doubles = min(first, self.model.num_double_blocks)
        return doubles if double else first - doubles

    @property
    def _image_rows(self) -> int:
        """Return the image tokens of the rank that holds most of them."""
        return min(self.clip.num_image * self.sizes.b, self.block_bytes.rows)

    def _entering(self) -> LayerBytes:
        """Return the embedders, which keep their inputs, in 16 bits a copy of them."""
        x, model = self.sizes, self.model
        share = x.cp * x.sequence_size
        features = self.clip.num_image * (model.token_width + model.cond_embed * model.cond_width)
        features += self.clip.num_text * model.text_width
        copies = x.b * features // share * x.width if x.half else 0
        weight = max(model.text_width, model.pooled_width, model.hidden_size) * model.hidden_size
        return LayerBytes(copies + 6 * self._vector, weight * x.width + self.block_bytes.stream)

    def _modulation(self, parts: int) -> LayerBytes:
        """Return ``Linear(SiLU(vec))``, whose weight's gradient is the last of the block."""
        weight = parts * self.model.hidden_size**2 * self.sizes.width
        scales = parts // 3
        return LayerBytes((1 + parts + scales) * self._vector, weight + self.block_bytes.stream)

    def _attended(self, *, joins: bool) -> int:
        """Return queries, keys, values, their norms and output; ``joins`` copies two streams."""
        width, h = self.block_bytes, self.model.hidden_size
        rows = width.rows * self.model.num_heads // self.sizes.tp
        kept = width.cut(3 * h) + 2 * rms_norm(self.sizes, rows, self.model.head_dim)
        kept += width.cut((3 if joins else 2) * h) + width.cut(h) + rows * FP32
        return kept + width.exchanged(self.trades_heads)

    def _attention_transient(self) -> int:
        """Return the gradients of queries, keys and values, or of the matrix before them."""
        width, h = self.block_bytes, self.model.hidden_size
        return max(width.matrix(3 * h, h) + width.whole, 2 * width.cut(3 * h))

    def _double(self) -> LayerBytes:
        width = self.block_bytes
        entering = 2 * width.stream + width.statistics + width.whole
        # What goes through the gate is kept for the gradient of the gate.
        attention = LayerBytes(
            entering + self._attended(joins=True) + width.stream,
            width.stream + self._attention_transient(),
        )
        inner = width.mlp(self.model.mlp_size, fp8=self.config.fp8.fp8_format is not None)
        second = LayerBytes(entering + inner.kept + width.stream, width.stream + inner.transient)
        both = self._modulation(6)
        vectors = LayerBytes(2 * both.kept, both.transient)
        # Each layer has an input of its own; attention keeps its output as well.
        alone = 2 * width.whole + width.cut(self.model.mlp_size)
        return self._kept_in_8_bits(in_order(vectors, attention, second), alone, width.cut(width.h))

    def _kept_in_8_bits(self, block: LayerBytes, alone: int, shared: int) -> LayerBytes:
        """See `BlockBytes.saved_in_8_bits`."""
        saved = self.block_bytes.saved_in_8_bits(self.config.fp8, alone=alone, shared=shared)
        return LayerBytes(block.kept - saved, block.transient)

    def _single_block(self) -> LayerBytes:
        width = self.block_bytes
        inner = width.mlp(self.model.mlp_size, fp8=self.config.fp8.fp8_format is not None)
        kept = 2 * width.stream + width.statistics + width.whole
        kept += self._attended(joins=False) + inner.kept + width.stream
        transient = max(self._attention_transient(), inner.transient + width.whole)
        both = in_order(self._modulation(3), LayerBytes(kept, width.stream + transient))
        # Two layers keep their own copy of one input, which takes as much as the input did.
        alone = width.cut(self.model.mlp_size)
        return self._kept_in_8_bits(both, alone, width.cut(width.h))

    def _final(self) -> LayerBytes:
        width, x, model = self.block_bytes, self.sizes, self.model
        output = width.rows * model.token_width * x.width
        kept = 3 * width.stream + width.statistics + output
        weight = 2 * model.hidden_size**2 * x.width
        return LayerBytes(kept, 2 * width.stream + weight)

    def _block(self) -> Flops:
        """Return a block of either kind without its modulation; see `flops_of_clip`."""
        h, m = self.model.hidden_size, self.model.mlp_size
        rows = MULTIPLY_AND_ADD * self.block_bytes.rows / self.sizes.tp
        linear = rows * (4 * h * h + 2 * h * m)
        block = Flops(linear, scores=rows * 2 * self.tokens * h, weights=linear)
        return self.in_8_bits(block)

    def flops(self, stage: Stage) -> Flops:
        """See `Network.flops`."""
        h, total = self.model.hidden_size, Flops()
        for number in stage.layers:
            parts = 12 if self._is_double(number) else 3
            vectors = MULTIPLY_AND_ADD * self.sizes.b * parts * h * h
            total += self._block() + Flops(vectors, weights=vectors)
        return total + Flops(again=self._block().forward * self._run_again(stage))

    def _run_again(self, stage: Stage) -> int:
        """Return how many blocks the backward pass runs again."""
        flags, doubles = self.config.section(MMDiTConfig), sum(map(self._is_double, stage.layers))
        limits = (flags.recompute_double_blocks, flags.recompute_single_blocks)
        found = 0
        for count, double, limit in zip(
            (doubles, len(stage.layers) - doubles), (True, False), limits, strict=True
        ):
            before = self._before(stage, double=double)
            found += count if limit is None else max(0, min(count, limit - before))
        return found

    def sample_flops(self) -> float:
        """See `flops_of_clip`."""
        return flops_of_clip(self.model, self.clip.num_text, self.clip.num_image)

    def traffic(self, stage: Stage) -> Volume:
        """Return the messages of a stage.

        Each half of a double block, and a single block, enters and leaves the ranks once.
        """
        halves = sum(2 if self._is_double(number) else 1 for number in stage.layers)
        # A gather and a reduce-scatter, or one all-reduce; in each direction.
        forward = halves * 2 * ring(self.sizes.tp) * self.block_bytes.whole
        context = len(stage.layers) * self.context_bytes()
        passes = FORWARD_AND_BACKWARD - 1 + self._run_again(stage) / len(stage.layers)
        messages = self.messages(stage)
        return Volume(tensor=forward * passes, context=context * passes, pipeline=messages)
