"""Formulas for a video DiT's parameters, activation memory, operations and communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_ext.config.lora_targets import adapts
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import Flops, Volume, ring
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import FP32, LayerBytes, Ranks, Stage, in_order, recomputed
from megatron_ext.planning.weights import Weight, inner_width, weights_of, with_frozen
from megatron_ext.video.config.window import WindowConfig
from megatron_ext.video.cost.clip import BlockBytes, Clip, StreamedCost
from megatron_ext.video.model.chunk import stage_blocks
from megatron_ext.video.model.window import window_of
from megatron_ext.video.networks.wan.attention import AttentionPlan
from megatron_ext.video.networks.wan.config import VideoDiTConfig, VideoDiTSizes, is_causal
from megatron_ext.video.networks.wan.convert.names import BLOCK_MODULES, shapes
from megatron_ext.video.networks.wan.flops import flops_of_sample


def dit_weights(lora: LoraConfig, sizes: VideoDiTSizes, tp: int, stage: Stage) -> list[Weight]:
    """Return a stage's parameters on one of ``tp`` ranks, in the order of the stage's module."""
    prefixes = [f"blocks.{number}." for number in stage.layers]
    prefixes += ["embedder."] * stage.embedding + ["head."] * stage.head
    weights = list[Weight]()
    for name, shape in shapes(sizes).items():
        layer, _, kind = name.rpartition(".")
        own = layer.rpartition(".")[2]
        if not name.startswith(tuple(prefixes)):
            continue
        if own in ("modulation", "vision_in") or own.endswith("norm"):
            parts = tp if own.endswith(("q_norm", "k_norm")) else 1
            weights.append(Weight(name, math.prod(shape) // parts, parts=parts))
        elif kind == "weight":  # the bias comes with it
            ranks = tp if name.startswith("blocks.") else 1
            outputs, inputs = shape
            cut = (1, ranks) if own in ("linear_proj", "linear_fc2") else (ranks, 1)
            weights += weights_of(Linear(layer, outputs, inputs, *cut), lora)
    return with_frozen(lora, weights)


@dataclass(frozen=True)
class DiTNetwork(StreamedCost):
    """Formulas for the cost of a video DiT on clips of one shape.

    Attributes:
        plan: which frames, new or cached, each block of new frames attends to.
        num_times: number f of timesteps of a clip: 1, or as many as it has frames.
        num_vision: number k of vision tokens of a clip.
    """

    model: VideoDiTSizes
    plan: AttentionPlan
    num_times: int = 1
    num_vision: int = 0

    @classmethod
    def of(cls, config: RunConfig, clip: Clip) -> DiTNetwork:
        """Return the cost formulas for the video DiT of ``config``, on clips like ``clip``.

        The section ``model`` of ``config`` must already hold the network's sizes (`rules.resolve`).
        """
        plan = AttentionPlan.bidirectional(clip.frames)
        dit = config.section(VideoDiTConfig)
        if is_causal(config):
            window = window_of(config.section(WindowConfig))
            plan = AttentionPlan.causal(window, 0, clip.frames, ())
        times = clip.frames if dit.has_frame_timesteps else 1
        ranks = replace(Ranks.of(config), b=clip.micro_batch_size)
        return cls(config, ranks, dit.sizes, clip, plan, times, dit.num_vision)

    def blocks_of_stages(self, num_stages: int) -> Sequence[range]:
        """Return the range of block indices of each stage; stages differ by at most one block."""
        return stage_blocks(self.model.num_blocks, num_stages)

    def weights(self, stage: Stage) -> list[Weight]:
        """Return the parameters of a stage, in the order of ``parameters()`` of its module."""
        return self.frozen(dit_weights(self.config.lora, self.model, self.sizes.tp, stage))

    @cached_property
    def block_bytes(self) -> BlockBytes:
        """Return the sizes of a block's tensors in bytes, for all image tokens."""
        x = self.sizes
        return BlockBytes(x, self.model.hidden_size, self.clip.num_image // x.cp * x.b)

    @property
    def _text_rows(self) -> int:
        return self.clip.num_text * self.sizes.b

    @property
    def _vision_rows(self) -> int:
        return self.num_vision * self.sizes.b

    @property
    def boundary(self) -> int:
        """Return the bytes of the tensor sent to the next stage, ``[s + 7 f + l + k, b, h]``.

        Its rows are s image tokens, f timesteps with 7 rows each (the embedding and 6 modulation
        vectors), l text tokens and k vision tokens.
        """
        rows = 7 * self.num_times * self.sizes.b + self._text_rows + self._vision_rows
        return self.block_bytes.stream + rows * self.model.hidden_size * self.sizes.width

    @property
    def _vector(self) -> int:
        """Return the bytes of one shift, scale or gate of the modulation, ``[f, b, h]``."""
        rows = self.num_times * self.sizes.b
        return rows * self.model.hidden_size * self.sizes.width

    def activations(self, stage: Stage) -> LayerBytes:
        """Return the memory of one micro-batch's activations in a stage."""
        x = self.sizes
        model = self.model
        table = self.block_bytes.rows // x.b * model.head_dim * FP32
        parts = [self._entering() if stage.embedding else LayerBytes(0, 0), LayerBytes(table, 0)]
        blocks = [self.layer()] * len(stage.layers)
        limit = self._run_again(stage)
        parts += recomputed(blocks, self.block_bytes.stream, size=1, limit=limit)
        if stage.head:
            parts += [self._final(), self.velocity_loss(self.clip.num_image * x.b)]
        return in_order(*parts)

    def _entering(self) -> LayerBytes:
        """Return the memory that the first stage needs to embed latents, text and timesteps."""
        x = self.sizes
        model = self.model
        h = self.model.hidden_size
        latents = (
            self.clip.num_image * x.b // (x.cp * x.sequence_size) * model.input_width * x.width
        )
        text = self._text_rows * 3 * h * x.width
        copies = self._text_rows * model.text_width * x.width if x.half else 0
        # The inputs of both norms and both layers, and of the activation between these.
        vision = self._vision_rows * (4 * model.vision_width + 2 * h) * x.width
        weight = max(6 * h, model.text_width, model.vision_width) * h * x.width
        return LayerBytes(
            latents + text + copies + vision + 10 * self._vector,
            weight + self.block_bytes.stream,
        )

    def _selected(self) -> int:
        """Return how many frames' keys and values attention copies, because it concatenates them.

        A frame counts once for each copy of it.
        """
        frames = sum(_count(seen) for _, seen in self.plan.blocks if len(seen) > 1)
        if self.plan.past:
            frames += len(self.plan.past) + self.clip.frames
        return frames

    def _self_attention(self) -> int:
        """Return the bytes that self-attention keeps for its backward pass, apart from its input.

        They are the tensors from the output of ``linear_qkv`` to the input of ``linear_proj``.
        """
        x = self.sizes
        width = self.block_bytes
        h = self.model.hidden_size
        wide = 2 * width.rows * h // x.tp * FP32 if x.half else 0
        rows = width.rows * self.model.num_heads // x.tp
        # The scaled queries and keys, for the weights of their norms.
        scaled = 2 * width.cut(h) * self.trains + 3 * width.rows * FP32
        kept = width.cut(3 * h) + wide + scaled + 2 * width.cut(h) + 2 * width.cut(h) + rows * FP32
        # Values, and the outputs, in another order: by frames, and by ranks.
        kept += 2 * width.cut(h) * (x.sequence_size > 1)
        shared = x.cp if not self.trades_heads else 1
        kept += 2 * self._selected() * width.cut(h) // self.clip.frames * shared
        return kept + width.exchanged(self.trades_heads)

    def _cross_attention(self) -> int:
        """Return the bytes that cross-attention (with its norms) keeps for the backward pass."""
        x = self.sizes
        width = self.block_bytes
        h = self.model.hidden_size
        of_text = self._text_rows * h // x.tp
        wide = (width.rows * h // x.tp + of_text) * FP32 if x.half else 0
        rows = width.rows * self.model.num_heads // x.tp
        queries = (3 + self.trains) * width.cut(h) + (2 * width.rows + self._text_rows) * FP32
        kept = queries + wide + (3 + self.trains) * of_text * x.width + rows * FP32
        return kept + self._vision_attention()

    def _vision_attention(self) -> int:
        """Return the bytes that attention to the vision tokens keeps beside that to the text."""
        if not self.num_vision:
            return 0
        x = self.sizes
        width = self.block_bytes
        h = self.model.hidden_size
        of_vision = self._vision_rows * h // x.tp
        wide = of_vision * FP32 if x.half else 0
        rows = width.rows * self.model.num_heads // x.tp
        # Its outputs and their sum with those of the attention to the text.
        outputs = 2 * width.cut(h) + rows * FP32
        keys = (3 + self.trains) * of_vision * x.width + self._vision_rows * FP32
        return outputs + keys + wide

    def _adapters(self) -> int:
        """Return the bytes of the products ``A x`` that a block's LoRA adapters keep."""
        lora = self.config.lora
        width = self.block_bytes
        others = {"linear_kv": self._text_rows, "linear_vision_kv": self._vision_rows}
        kept = 0
        for layer in BLOCK_MODULES:
            name = layer.rpartition(".")[2]
            if name.startswith("linear") and adapts(lora, f"blocks.{layer}"):
                kept += others.get(name, width.rows) * inner_width(lora, name)
        return kept * self.sizes.width

    def layer(self) -> LayerBytes:
        """Return the memory of one block's activations for a micro-batch."""
        width = self.block_bytes
        h = self.model.hidden_size
        vectors = LayerBytes(8 * self._vector, width.stream + 6 * self._vector)
        modulation = LayerBytes(vectors.kept + self._adapters(), vectors.transient)
        # The input and the modulated norm that the layer takes; where timesteps have a gradient
        # the norm itself, and what the gate scales.
        moved = self.trains * width.stream
        entering = 2 * width.stream + width.statistics + moved
        attention = LayerBytes(
            entering + self._self_attention() + moved, width.stream + width.gradients(3 * h)
        )
        crossed = LayerBytes(
            2 * width.stream + width.statistics + self._cross_attention(),
            width.stream + width.gradients(h),
        )
        inner = self.mlp(self.model.ffn_size)
        fed = LayerBytes(entering + inner.kept + moved, width.stream + inner.transient)
        # Where heads lie on several ranks, a CPU adds the biases of qkv and queries twice.
        twice = 4 * width.cut(h) * (self.sizes.tp > 1 and not self.sizes.gpu)
        block = in_order(LayerBytes(twice, 0), modulation, attention, crossed, fed)
        if not self.trains:
            return block
        # Into qkv, queries and fc1, fc2, and both times the heads, which attention keeps too.
        alone = 3 * width.stream + width.cut(self.model.ffn_size) + width.cut(h)
        return self.kept_in_8_bits(block, alone=alone, shared=width.cut(h))

    def without_gradient(self) -> int:
        """Return the peak bytes of activations in a forward pass that computes no gradient."""
        width = self.block_bytes
        h = self.model.hidden_size
        wide = 2 * width.cut(3 * h) if self.sizes.half else 0
        past = 2 * self._selected() * width.cut(h) // self.clip.frames
        attention = width.cut(3 * h) + 4 * width.cut(h) + past + wide
        return 3 * width.stream + max(attention, 2 * width.cut(self.model.ffn_size))

    def _final(self) -> LayerBytes:
        width = self.block_bytes
        output = self.clip.num_image * self.sizes.b * self.model.token_width * self.sizes.width
        kept = 3 * width.stream + width.statistics + output + 3 * self._vector
        return LayerBytes(kept, 2 * width.stream)

    def _attended(self) -> list[tuple[int, int]]:
        """Return, for each block of frames, (number of its tokens, number they attend to)."""
        per_frame = self.clip.rows * self.clip.columns
        return [
            ((own.stop - own.start) * per_frame, _count(seen) * per_frame)
            for own, seen in self.plan.blocks
        ]

    def _block_flops(self) -> Flops:
        """Return the operations of a block for one micro-batch on one rank."""
        h = self.model.hidden_size
        x = self.sizes
        text = self.clip.num_text + self.num_vision
        tokens = self.clip.num_image / x.cp
        linear = tokens * (6 * h * h + 2 * h * self.model.ffn_size) + 2 * text * h * h
        pairs = sum(queries * keys for queries, keys in self._attended())
        scores = 2 * h * (pairs / x.cp + tokens * text)
        both = [MULTIPLY_AND_ADD * count * x.b / x.tp for count in (linear, scores)]
        block = Flops(both[0], scores=both[1], weights=both[0] * self.trains)
        return self.in_8_bits(block)

    def _run_again(self, stage: Stage) -> int:
        """Return the number of a stage's blocks that are recomputed in the backward pass."""
        limit = self.config.section(WindowConfig).recompute_blocks - min(stage.layers)
        return max(0, min(len(stage.layers), limit))

    def flops(self, stage: Stage) -> Flops:
        """Return the operations of a stage's blocks for one micro-batch on one rank."""
        block = self._block_flops()
        total = sum((block for _ in stage.layers), Flops())
        total = self.of_trained(total, stage)
        return total + block.recomputed(self._run_again(stage))

    def sample_flops(self) -> float:
        """Return the floating-point operations of one clip, forward and backward.

        Recomputation is not counted.
        """
        return FORWARD_AND_BACKWARD * flops_of_sample(
            self.model, self._attended(), num_text=self.clip.num_text, num_times=1,
            num_vision=self.num_vision,
        )  # fmt: skip

    def traffic(self, stage: Stage) -> Volume:
        """Return the bytes that a rank of a stage sends for one micro-batch, forward and backward.

        Over the tensor-parallel ranks, self-attention, cross-attention and the feed-forward layers
        each need one gather and one reduce-scatter (or one all-reduce) per direction. Sequence
        parallelism adds one gather for each of them in the backward pass.
        """
        x = self.sizes
        count = len(stage.layers)
        gathers = 6 * ring(x.tp) * self.block_bytes.whole
        # Under sequence parallelism the inputs of three matrices are gathered once more.
        backward = gathers * (1.5 if x.sequence_parallel else 1.0)
        again = self._run_again(stage) / count
        context = self.context_bytes() * (2 + again)
        messages = self.messages(stage)
        tensor = count * (gathers * (1 + again) + backward)
        return Volume(tensor=tensor, context=count * context, pipeline=messages)


def _count(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)
