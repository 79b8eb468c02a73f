"""The clips of a bucket as a plan sees them, and what the formulas of both models share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.contents import FP32, LayerBytes, Ranks, Stage, ranks_of
from megatron_ext.planning.flops import Operated

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class Clip:
    """The clips of a bucket.

    Attributes:
        name: of the bucket.
        frames, rows, columns: of the tokens of a clip, t × rows × columns.
        num_text: text tokens of its sequence, padding included.
        micro_batch_size: of the bucket.
        share: of the steps of an epoch.
    """

    name: str
    frames: int
    rows: int
    columns: int
    num_text: int
    micro_batch_size: int
    share: float = 1.0

    @property
    def num_image(self) -> int:
        """Image tokens."""
        return self.frames * self.rows * self.columns


@dataclass(frozen=True)
class Width:
    """Bytes of the tensors of a transformer block on one rank, by the tokens that they span.

    Attributes:
        ranks: of the run.
        h: hidden size.
        chunk: rows ``s * b`` that attention and MLPs see: those of a context-parallel rank.
    """

    ranks: Ranks
    h: int
    chunk: int

    @property
    def stream(self) -> int:
        """The residual stream between the parallel layers, ``[s, b, h]``."""
        return self.chunk // self.ranks.sharing * self.h * self.ranks.width

    @property
    def whole(self) -> int:
        """As the parallel layers see it, also under sequence parallelism."""
        return self.chunk * self.h * self.ranks.width

    def cut(self, width: int) -> int:
        """A tensor of ``width`` features in all, of which a tensor-parallel rank has its part."""
        return self.chunk * width // self.ranks.tp * self.ranks.width

    def matrix(self, rows: int, columns: int) -> int:
        """A weight's gradient, of a matrix that the tensor-parallel ranks share."""
        return rows * columns // self.ranks.tp * self.ranks.width

    @property
    def statistics(self) -> int:
        """Of a LayerNorm of the stream."""
        return 2 * (self.chunk // self.ranks.sharing) * FP32

    def exchanged(self, trades_heads: bool) -> int:
        """Beyond queries, keys, values and output: what context parallelism makes of them."""
        if self.ranks.cp == 1:
            return 0
        return self.cut(self.h) if trades_heads else 2 * (self.ranks.cp - 1) * self.cut(self.h)


def in_8_bits(config: RunConfig, block: Operated) -> Operated:
    """The products with weights of a block as the run multiplies them."""
    fp8 = config.fp8
    if fp8.fp8_format is None:
        return block
    weights = (0.0, block.weights) if fp8.fp8_wgrad else (block.weights, 0.0)
    return Operated(
        fp8=block.linear, scores=block.scores, weights=weights[0], fp8_weights=weights[1]
    )


def saved_in_8_bits(config: RunConfig, width: Width, *, alone: int, shared: int) -> int:
    """Bytes that a block keeps less of the inputs of its linear layers.

    Args:
        config: of the run.
        width: of the block.
        alone: bytes of inputs that one linear layer keeps and nothing else.
        shared: of those that something else keeps too, so that their 8-bit copy comes on top.
    """
    if config.fp8.fp8_format is None or not config.fp8.fp8_wgrad:
        return 0
    bytes_of = width.ranks.width
    return alone * (bytes_of - 1) // bytes_of - shared // bytes_of


def mlp(config: RunConfig, width: Width, inner: int) -> LayerBytes:
    """From fc1's output to fc2's input, and the gradients around them; GELU in between."""
    tensor, weight = width.cut(inner), width.matrix(inner, width.h)
    of_fc1 = weight + width.whole - tensor
    emulated = config.fp8.fp8_format is not None and not width.ranks.gpu
    # On a CPU both factors of an 8-bit product, and the product, are made in fp32.
    more = 3 * width.chunk * inner // width.ranks.tp * FP32 * emulated
    return LayerBytes(2 * tensor, max(tensor + weight, of_fc1) + more)


def loss(ranks: Ranks, rows: int, token_width: int) -> LayerBytes:
    """Velocity and error of the image tokens, ``[b, n, d]``: one in fp32 is kept."""
    error = rows * token_width * FP32
    half = rows * token_width * ranks.width if ranks.half else 0
    return LayerBytes(error + half, 3 * error)


def ranks_for(config: RunConfig, clip: Clip) -> Ranks:
    """How a run is cut, with the micro-batches of a bucket."""
    return Ranks(**{**ranks_of(config), "b": clip.micro_batch_size})


def dealt(config: RunConfig, blocks: Sequence[range]) -> list[Stage]:
    """Stages that hold these blocks.

    Args:
        config: of the run.
        blocks: of each stage, along the model.
    """
    placement = Layout.from_config(config.parallel).placement
    last = len(blocks) - 1
    return [
        Stage(
            index=index,
            rank=placement.rank_of(index),
            chunk=placement.chunk_of(index),
            layers=tuple(numbers),
            depths=0,
            embedding=index == 0,
            final_norm=index == last,
            head=index == last,
        )
        for index, numbers in enumerate(blocks)
    ]


def num_stages(config: RunConfig) -> int:
    """Pipeline stages, virtual ones included."""
    return Layout.from_config(config.parallel).placement.num_stages
