"""The clips of a bucket as a plan sees them, and the formulas that both networks share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.network import Flops, Network, ring
from megatron_ext.planning.stages import FP32, LayerBytes, Ranks, Stage


@dataclass(frozen=True)
class Clip:
    """The clips of the bucket ``name``.

    Attributes:
        frames, rows, columns: tokens of a clip along each side, t × rows × columns.
        num_text: text tokens of its sequence, padding included.
        micro_batch_size: clips at a time.
        share: share of the steps of an epoch.
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
        """Return the number of image tokens."""
        return self.frames * self.rows * self.columns


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of the tensors of a transformer block of hidden size h on one rank.

    Attributes:
        rows: rows ``s * b`` that attention and MLPs see: those of a context-parallel rank.
    """

    ranks: Ranks
    h: int
    rows: int

    @property
    def stream(self) -> int:
        """Return the residual stream between the parallel layers, ``[s, b, h]``."""
        return self.rows // self.ranks.sequence_size * self.h * self.ranks.width

    @property
    def whole(self) -> int:
        """Return the stream as the parallel layers see it, also under sequence parallelism."""
        return self.rows * self.h * self.ranks.width

    def cut(self, width: int) -> int:
        """Return a rank's part of a tensor of ``width`` features that the ranks share."""
        return self.rows * width // self.ranks.tp * self.ranks.width

    def matrix(self, rows: int, columns: int) -> int:
        """Return the gradient of a matrix that the tensor-parallel ranks share."""
        return rows * columns // self.ranks.tp * self.ranks.width

    def gradients(self, width: int) -> int:
        """Return the gradients of ``width`` features of attention, or of the matrix before them."""
        return max(self.matrix(width, self.h) + self.whole, 2 * self.cut(width))

    @property
    def statistics(self) -> int:
        """Return the statistics of a LayerNorm of the stream."""
        return 2 * (self.rows // self.ranks.sequence_size) * FP32

    def exchanged(self, trades_heads: bool) -> int:
        """Return what context parallelism adds to queries, keys, values and output."""
        if self.ranks.cp == 1:
            return 0
        return self.cut(self.h) if trades_heads else 2 * (self.ranks.cp - 1) * self.cut(self.h)


@dataclass(frozen=True)
class ClipNetwork(Network):
    """A video network, whose sizes are ``model``, on the clips of one bucket; see `Network`."""

    config: RunConfig
    sizes: Ranks
    model: Any
    clip: Clip

    @property
    @abstractmethod
    def block_bytes(self) -> BlockBytes:
        """Return the tensors of a block."""

    @abstractmethod
    def sample_flops(self) -> float:
        """Return the operations of a clip, forward and backward, as the log counts them."""

    @property
    def tokens(self) -> int:
        """Return the tokens of text and image."""
        return self.clip.num_text + self.clip.num_image

    @property
    def layer_input(self) -> int:
        """Return the bytes of the residual stream."""
        return self.block_bytes.stream

    @abstractmethod
    def blocks_of_stages(self, num_stages: int) -> Sequence[range]:
        """Return the numbers of the blocks of each pipeline stage, virtual ones included."""

    def stages(self) -> list[Stage]:
        """See `Network.stages`."""
        place = Layout.from_config(self.config.parallel).placement
        count = place.num_stages
        return [
            Stage.of_layers(blocks, i, count, rank=place.rank_of(i), chunk=place.chunk_of(i))
            for i, blocks in enumerate(self.blocks_of_stages(count))
        ]

    def step_flops(self) -> float:
        """See `Network.step_flops`."""
        x = self.sizes
        micro, batch = self.config.training.batch_sizes
        clips = batch // (micro * self.config.parallel.data_parallel_size) * x.b * x.dp
        return self.sample_flops() * clips

    @property
    def trades_heads(self) -> bool:
        """Return whether context parallelism trades heads for tokens."""
        return self.config.parallel.cp_comm_type[0] == "a2a"

    def context_bytes(self) -> float:
        """Return what the self-attention of one block sends between context ranks, forward."""
        x, head = self.sizes, self.block_bytes.cut(self.block_bytes.h)
        return 4 * ring(x.cp) * head if self.trades_heads else 2.0 * (x.cp - 1) * head

    def mlp(self, inner: int) -> LayerBytes:
        """Return fc1's output, GELU and fc2's input, of width ``inner``, and their gradients."""
        width, x = self.block_bytes, self.sizes
        tensor, weight = width.cut(inner), width.matrix(inner, width.h)
        emulated = self.config.fp8.fp8_format is not None and not x.gpu
        # On a CPU both factors of an 8-bit product, and the product, are made in fp32.
        more = 3 * width.rows * inner // x.tp * FP32 * emulated
        return LayerBytes(2 * tensor, max(tensor + weight, weight + width.whole - tensor) + more)

    def kept_in_8_bits(self, block: LayerBytes, *, alone: int, shared: int) -> LayerBytes:
        """Return a block whose linear layers keep their inputs in 8 bits, where the run asks so.

        Args:
            alone: bytes of inputs that one linear layer keeps and nothing else.
            shared: bytes of inputs that something else keeps too, so that their 8-bit copy comes on
                top.
        """
        fp8, width = self.config.fp8, self.sizes.width
        if fp8.fp8_format is None or not fp8.fp8_wgrad:
            return block
        saved = alone * (width - 1) // width - shared // width
        return LayerBytes(block.kept - saved, block.transient)

    def in_8_bits(self, block: Flops) -> Flops:
        """Return a block with its products with weights in 8 bits, where the run asks for it."""
        fp8 = self.config.fp8
        if fp8.fp8_format is None:
            return block
        weights, fp8_weights = (0.0, block.weights) if fp8.fp8_wgrad else (block.weights, 0.0)
        return Flops(
            fp8=block.linear, scores=block.scores, weights=weights, fp8_weights=fp8_weights
        )

    def velocity_loss(self, rows: int) -> LayerBytes:
        """Return velocity and error of image tokens, ``[b, n, d]``: one in fp32 is kept."""
        error = rows * self.model.token_width * FP32
        half = rows * self.model.token_width * self.sizes.width if self.sizes.half else 0
        return LayerBytes(error + half, 3 * error)
