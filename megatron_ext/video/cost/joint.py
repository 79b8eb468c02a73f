"""The cost formulas of networks of double and single blocks on [text; image].

They count parameters, activations, operations and messages. A network adds what it has beside the
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from typing_extensions import Self

from megatron_ext.config.lora_targets import adapts
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import Flops, Volume, ring
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import (
    FP32,
    LayerBytes,
    Ranks,
    Stage,
    in_order,
    recomputed,
    rms_norm,
)
from megatron_ext.planning.weights import Weight, inner_width, weights_of, with_frozen
from megatron_ext.video.config.joint import JointConfig, JointSizes
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.cost.clip import BlockBytes, Clip, ClipNetwork
from megatron_ext.video.model.joint_blocks import stage_blocks

_DOUBLE = ("double_blocks.img", "double_blocks.txt")
_SINGLE = ("single_blocks",)
"""The kinds of the streams of a double and of a single block (`config.lora_targets`)."""


def flops_of_clip(sizes: JointSizes, num_text: int, num_image: int) -> float:
    """Return the floating-point operations of such a network on one clip, forward and backward.

    One linear layer embeds the text; a network that has more adds it.
    """
    h = sizes.hidden_size
    m = sizes.mlp_size
    tokens = num_text + num_image
    # Queries, keys, values and projection, both MLP matrices, scores and their product with
    # values; the same in blocks of both kinds.
    block = tokens * (4 * h * h + 2 * h * m + 2 * tokens * h)
    modulation = h * h * (12 * sizes.num_double_blocks + 3 * sizes.num_single_blocks + 2)
    embedders = num_image * sizes.token_width * h * 2 + num_text * sizes.text_width * h
    embedders += (TIMESTEP_WIDTH + sizes.pooled_width + 2 * h) * h
    if sizes.cond_embed:
        embedders += num_image * sizes.cond_width * h
    if sizes.guidance_embed:
        embedders += (TIMESTEP_WIDTH + h) * h
    products = block * sizes.num_blocks + modulation + embedders
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * products)


@dataclass(frozen=True)
class JointNetwork(ClipNetwork):
    """Formulas for the cost of double and single blocks on the clips of one bucket.

    One linear layer embeds the text; a network that has more overrides what counts it.

    Context-parallel ranks hold equally many tokens, but different numbers of text tokens. Text and
    image tokens cost the same, so the formulas hold for every rank.

    Attributes:
        cond_bias: whether the layer that embeds reference frames has a bias.
    """

    model: JointSizes
    cond_bias: ClassVar[bool] = True

    @classmethod
    def of(cls, config: RunConfig, sizes: JointSizes, clip: Clip) -> Self:
        """Return the cost formulas for a network of these sizes, on the clips of one bucket.

        The section ``model`` of ``config`` must have been filled in from the sizes.
        """
        return cls(config, replace(Ranks.of(config), b=clip.micro_batch_size), sizes, clip)

    def blocks_of_stages(self, num_stages: int) -> Sequence[range]:
        """Return the range of block indices of each stage; stages have about equal cost."""
        cost = self.config.section(JointConfig).double_block_cost
        return stage_blocks(self.model, num_stages, cost)

    @cached_property
    def block_bytes(self) -> BlockBytes:
        """Return the bytes of a block's tensors on one rank, for the sequence [text; image]."""
        x = self.sizes
        return BlockBytes(x, self.model.hidden_size, self.tokens // x.cp * x.b)

    @property
    def boundary(self) -> int:
        """Return the bytes sent to the next stage, ``[s + 1, b, h]``: hidden states and ``vec``."""
        return self.block_bytes.stream + self._vector

    @property
    def _vector(self) -> int:
        """Return the bytes of a tensor with one vector per clip, such as ``vec``, ``[b, h]``."""
        return self.sizes.b * self.model.hidden_size * self.sizes.width

    def _is_double(self, number: int) -> bool:
        return number < self.model.num_double_blocks

    def weights(self, stage: Stage) -> list[Weight]:
        """Return the parameters of a stage, in the order of ``parameters()`` of its module."""
        model = self.model
        h = self.model.hidden_size
        weights = self._embedding() if stage.embedding else []
        for number in stage.layers:
            if self._is_double(number):
                for stream in ("txt", "img"):
                    weights += self._layers(f"double_blocks.{number}.{stream}", double=True)
            else:
                name = f"single_blocks.{number - model.num_double_blocks}"
                weights += self._layers(name, double=False)
        if stage.head:
            weights += self.whole("final_layer.modulation", h, 2 * h)
            weights += self.whole("final_layer.linear", h, model.token_width)
        return self.frozen(with_frozen(self.config.lora, weights))

    def whole(self, name: str, inputs: int, outputs: int) -> list[Weight]:
        """Return the parameters of a linear layer that each rank holds as a whole."""
        return weights_of(Linear(name, outputs, inputs), self.config.lora)

    def _embedding(self) -> list[Weight]:
        x = self.model
        h = self.model.hidden_size
        vectors = {"time_in": TIMESTEP_WIDTH, "pooled_in": x.pooled_width}
        if x.guidance_embed:
            vectors["guidance_in"] = TIMESTEP_WIDTH
        weights = self.whole("embedding.img_in", x.token_width, h)
        weights += self.text_weights()
        for name, width in vectors.items():
            weights += self.whole(f"embedding.{name}.linear_in", width, h)
            weights += self.whole(f"embedding.{name}.linear_out", h, h)
        if x.cond_embed:
            cond = Linear("embedding.cond_in", h, x.cond_width, bias=self.cond_bias)
            weights += weights_of(cond, self.config.lora)
        return weights

    def text_weights(self) -> list[Weight]:
        """Return the parameters of the module that embeds the text tokens."""
        return self.whole("embedding.txt_in", self.model.text_width, self.model.hidden_size)

    def text_memory(self) -> LayerBytes:
        """Return the memory of that module's activations, beyond those of one linear layer."""
        return LayerBytes(0, 0)

    def _layers(self, name: str, *, double: bool) -> list[Weight]:
        """Return the parameters of a single block or, if ``double``, of one double-block stream.

        ``name`` is the beginning of the parameters' names.
        """
        x = self.model
        tp = self.sizes.tp
        lora = self.config.lora
        h = x.hidden_size
        m = x.mlp_size
        qkv = weights_of(Linear(f"{name}.linear_qkv", 3 * h, h, rows=tp, bias=x.qkv_bias), lora)
        fc1 = weights_of(Linear(f"{name}.linear_fc1", m, h, rows=tp), lora)
        fc2 = weights_of(Linear(f"{name}.linear_fc2", h, m, columns=tp, bias=double), lora)
        proj = weights_of(Linear(f"{name}.linear_proj", h, h, columns=tp), lora)
        norm = [Weight(f"{name}.norm.{x}_layernorm.weight", self.model.head_dim) for x in "qk"]
        rest = [*norm, *proj, *fc1, *fc2] if double else [*fc1, *norm, *proj, *fc2]
        return [*self.whole(f"{name}.modulation", h, (6 if double else 3) * h), *qkv, *rest]

    def activations(self, stage: Stage) -> LayerBytes:
        """Return the memory of one micro-batch's activations in a stage."""
        x = self.sizes
        model = self.model
        table = self.block_bytes.rows * model.head_dim * FP32
        parts = [self._entering() if stage.embedding else LayerBytes(0, 0), LayerBytes(table, 0)]
        doubles = [self._double() for number in stage.layers if self._is_double(number)]
        singles = [self._single_block()] * (len(stage.layers) - len(doubles))
        for blocks, limit in zip((doubles, singles), self._recomputed(stage), strict=True):
            parts += recomputed(blocks, self.block_bytes.stream, size=1, limit=limit)
        if stage.head:
            # Of the rank that holds most of the image tokens.
            rows = min(self.clip.num_image * x.b, self.block_bytes.rows)
            parts += [self._final(), self.velocity_loss(rows)]
        return in_order(*parts)

    def layer(self) -> LayerBytes:
        """Return the memory of a typical block: single if most blocks are, else double."""
        singles = self.model.num_single_blocks > self.model.num_double_blocks
        return self._single_block() if singles else self._double()

    def _recomputed(self, stage: Stage) -> tuple[int, int]:
        """Return the numbers of double and single blocks of a stage that are recomputed."""
        flags = self.config.section(JointConfig)
        first = min(stage.layers)
        doubles = sum(map(self._is_double, stage.layers))
        # Blocks count along the whole model: those of the stages before come first.
        before = min(first, self.model.num_double_blocks)

        def among(count: int, before: int, limit: int | None) -> int:
            return count if limit is None else max(0, min(count, limit - before))

        return (
            among(doubles, before, flags.recompute_double_blocks),
            among(len(stage.layers) - doubles, first - before, flags.recompute_single_blocks),
        )

    def _entering(self) -> LayerBytes:
        """Return the memory of the embedders' activations.

        In 16-bit runs these include 16-bit copies of the inputs, kept for the backward pass.
        """
        x = self.sizes
        model = self.model
        share = x.cp * x.sequence_size
        features = self.clip.num_image * (model.token_width + model.cond_embed * model.cond_width)
        features += self.clip.num_text * model.text_width
        copies = x.b * features // share * x.width if x.half else 0
        weight = max(model.text_width, model.pooled_width, model.hidden_size) * model.hidden_size
        inputs = LayerBytes(copies + 6 * self._vector, weight * x.width + self.block_bytes.stream)
        return in_order(inputs, self.text_memory())

    def _modulation(self, parts: int) -> LayerBytes:
        """Return the memory of a modulation ``Linear(SiLU(vec))`` that gives ``parts`` vectors."""
        weight = parts * self.model.hidden_size**2 * self.sizes.width
        scales = parts // 3
        return LayerBytes((1 + parts + scales) * self._vector, weight + self.block_bytes.stream)

    def _attended(self, *, joins: bool) -> int:
        """Return the bytes that a block's attention keeps for the backward pass.

        ``joins`` tells whether queries, keys and values of text and image are concatenated first,
        as in a double block.
        """
        width = self.block_bytes
        h = self.model.hidden_size
        rows = width.rows * self.model.num_heads // self.sizes.tp
        kept = width.cut(3 * h) + 2 * rms_norm(self.sizes, rows, self.model.head_dim)
        kept += width.cut((3 if joins else 2) * h) + width.cut(h) + rows * FP32
        return kept + width.exchanged(self.trades_heads)

    @property
    def _moved(self) -> int:
        """Return the bytes that a gate keeps for its own gradient, and a modulated norm for its.

        Nothing is kept if shifts, scales and gates have no gradient: their weights are frozen, and
        no earlier stage is sent the gradient of ``vec``.
        """
        adapted = any(
            adapts(self.config.lora, f"{block}.modulation") for block in (*_DOUBLE, *_SINGLE)
        )
        has_gradient = self.trains or adapted or self.sizes.pp > 1
        return self.block_bytes.stream * has_gradient

    def _adapters(self, streams: Sequence[str]) -> int:
        """Return the bytes of the products ``A x`` that a block's LoRA adapters keep.

        ``streams`` are the kinds of the block's streams. Text and image have adapters of their own,
        but each token goes through one of them.
        """
        lora = self.config.lora
        layers = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        own = [x for x in layers if any(adapts(lora, f"{stream}.{x}") for stream in streams)]
        return self.block_bytes.rows * sum(inner_width(lora, x) for x in own) * self.sizes.width

    def _double(self) -> LayerBytes:
        width = self.block_bytes
        # What goes through the gate is kept for the gradient of the gate.
        entering = width.stream + width.statistics + width.whole + 2 * self._moved
        attention = LayerBytes(
            entering + self._attended(joins=True) + self._adapters(_DOUBLE),
            width.stream + width.gradients(3 * width.h),
        )
        inner = self.mlp(self.model.mlp_size)
        second = LayerBytes(entering + inner.kept, width.stream + inner.transient)
        both = self._modulation(6)
        vectors = LayerBytes(2 * both.kept, both.transient)
        # Each layer has an input of its own; attention keeps its output as well.
        alone = 2 * width.whole + width.cut(self.model.mlp_size)
        block = in_order(vectors, attention, second)
        if not self.trains:
            return block
        return self.kept_in_8_bits(block, alone=alone, shared=width.cut(width.h))

    def _single_block(self) -> LayerBytes:
        width = self.block_bytes
        inner = self.mlp(self.model.mlp_size)
        kept = width.stream + width.statistics + width.whole + 2 * self._moved
        kept += self._attended(joins=False) + inner.kept + self._adapters(_SINGLE)
        transient = max(width.gradients(3 * width.h), inner.transient + width.whole)
        both = in_order(self._modulation(3), LayerBytes(kept, width.stream + transient))
        if not self.trains:
            return both
        # Two layers keep their own copy of one input, which takes as much as the input did.
        alone = width.cut(self.model.mlp_size)
        return self.kept_in_8_bits(both, alone=alone, shared=width.cut(width.h))

    def _final(self) -> LayerBytes:
        width = self.block_bytes
        output = width.rows * self.model.token_width * self.sizes.width
        weight = 2 * width.h**2 * self.sizes.width
        return LayerBytes(3 * width.stream + width.statistics + output, 2 * width.stream + weight)

    def _block_flops(self) -> Flops:
        """Return the FLOPs of a block without its modulation, for one micro-batch on one rank.

        Double and single blocks need equally many.
        """
        h = self.model.hidden_size
        m = self.model.mlp_size
        rows = MULTIPLY_AND_ADD * self.block_bytes.rows / self.sizes.tp
        linear = rows * (4 * h * h + 2 * h * m)
        scores = rows * 2 * self.tokens * h
        block = Flops(linear, scores=scores, weights=linear * self.trains)
        return self.in_8_bits(block)

    def flops(self, stage: Stage) -> Flops:
        """Return the FLOPs of a stage's blocks for one micro-batch on one rank."""
        h = self.model.hidden_size
        total = Flops()
        for number in stage.layers:
            parts = 12 if self._is_double(number) else 3
            vectors = MULTIPLY_AND_ADD * self.sizes.b * parts * h * h
            total += self._block_flops() + Flops(vectors, weights=vectors * self.trains)
        total = self.of_trained(total, stage)
        return total + self._block_flops().recomputed(sum(self._recomputed(stage)))

    def sample_flops(self) -> float:
        """Return the floating-point operations of one clip, forward and backward.

        Recomputation is not counted.
        """
        return flops_of_clip(self.model, self.clip.num_text, self.clip.num_image)

    def traffic(self, stage: Stage) -> Volume:
        """Return the bytes that a rank of a stage sends for one micro-batch, forward and backward.

        In each direction a single block needs one gather and one reduce-scatter (or one all-reduce)
        over the tensor-parallel ranks. A double block needs two of each, for attention and MLP.
        """
        halves = sum(2 if self._is_double(number) else 1 for number in stage.layers)
        # A gather and a reduce-scatter, or one all-reduce; in each direction.
        forward = halves * 2 * ring(self.sizes.tp) * self.block_bytes.whole
        context = len(stage.layers) * self.context_bytes()
        passes = FORWARD_AND_BACKWARD - 1 + sum(self._recomputed(stage)) / len(stage.layers)
        return Volume(
            tensor=forward * passes, context=context * passes, pipeline=self.messages(stage)
        )
