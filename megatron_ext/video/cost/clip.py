"""The clips of a bucket as a plan needs them, and the formulas that both networks share."""

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
        frames, rows, columns: tokens of a clip in time, height and width.
        num_text: text tokens of a clip, padding included.
        micro_batch_size: clips of a micro-batch on one rank.
        share: fraction of an epoch's micro-batches that are of this bucket.
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
    """Bytes of the tensors of a transformer block on one rank.

    Attributes:
        h: hidden size.
        rows: tokens ``s * b`` of all samples that a context-parallel rank holds.
    """

    ranks: Ranks
    h: int
    rows: int

    @property
    def stream(self) -> int:
        """Return the bytes of the residual stream, cut by sequence parallelism, ``[s, b, h]``."""
        return self.rows // self.ranks.sequence_size * self.h * self.ranks.width

    @property
    def whole(self) -> int:
        """Return the bytes of the stream inside the parallel layers, where s is never cut."""
        return self.rows * self.h * self.ranks.width

    def cut(self, width: int) -> int:
        """Return a rank's bytes of ``width`` features that tensor-parallel ranks divide."""
        return self.rows * width // self.ranks.tp * self.ranks.width

    def matrix(self, rows: int, columns: int) -> int:
        """Return a rank's bytes of the gradient of a matrix that tensor-parallel ranks divide."""
        return rows * columns // self.ranks.tp * self.ranks.width

    def gradients(self, width: int) -> int:
        """Return the most bytes of gradients at a time around ``width`` features of attention.

        They are two of such features, or those of the projection before: its weight and input.
        """
        return max(self.matrix(width, self.h) + self.whole, 2 * self.cut(width))

    @property
    def statistics(self) -> int:
        """Return the bytes of mean and deviation that a LayerNorm of the stream keeps."""
        return 2 * (self.rows // self.ranks.sequence_size) * FP32

    def exchanged(self, trades_heads: bool) -> int:
        """Return the bytes that attention keeps in addition because of context parallelism."""
        if self.ranks.cp == 1:
            return 0
        return self.cut(self.h) if trades_heads else 2 * (self.ranks.cp - 1) * self.cut(self.h)


@dataclass(frozen=True)
class ClipNetwork(Network):
    """A video network on the clips of one bucket; ``model`` are its sizes. See `Network`."""

    config: RunConfig
    sizes: Ranks
    model: Any
    clip: Clip

    @property
    @abstractmethod
    def block_bytes(self) -> BlockBytes:
        """Return the byte counts of a block's tensors."""

    @abstractmethod
    def sample_flops(self) -> float:
        """Return the operations of a clip, forward and backward, by the formula of the log."""

    @property
    def tokens(self) -> int:
        """Return the number of text and image tokens of a clip."""
        return self.clip.num_text + self.clip.num_image

    @property
    def layer_input(self) -> int:
        """Return the bytes of the residual stream."""
        return self.block_bytes.stream

    @abstractmethod
    def blocks_of_stages(self, num_stages: int) -> Sequence[range]:
        """Return the range of blocks of each pipeline stage, virtual stages included."""

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
        """Return whether context parallelism trades heads for tokens by all-to-all."""
        return self.config.parallel.cp_comm_type[0] == "a2a"

    def context_bytes(self) -> float:
        """Return the bytes that a rank sends for context parallelism in a block's forward pass."""
        x, head = self.sizes, self.block_bytes.cut(self.block_bytes.h)
        return 4 * ring(x.cp) * head if self.trades_heads else 2.0 * (x.cp - 1) * head

    def mlp(self, inner: int) -> LayerBytes:
        """Return the memory of an MLP of width ``inner``; outputs of fc1 and GELU are kept."""
        width, x = self.block_bytes, self.sizes
        tensor, weight = width.cut(inner), width.matrix(inner, width.h)
        emulated = self.config.fp8.fp8_format is not None and not x.gpu
        # On a CPU both factors of an 8-bit product, and the product, are made in fp32.
        more = 3 * width.rows * inner // x.tp * FP32 * emulated
        return LayerBytes(2 * tensor, max(tensor + weight, weight + width.whole - tensor) + more)

    def kept_in_8_bits(self, block: LayerBytes, *, alone: int, shared: int) -> LayerBytes:
        """Return the memory of a block whose linear layers keep 8-bit inputs with ``--fp8-wgrad``.

        Args:
            alone: bytes of inputs that only one linear layer keeps.
            shared: bytes of inputs that another operation keeps too, so their 8-bit copy is extra.
        """
        fp8, width = self.config.fp8, self.sizes.width
        if fp8.fp8_format is None or not fp8.fp8_wgrad:
            return block
        saved = alone * (width - 1) // width - shared // width
        return LayerBytes(block.kept - saved, block.transient)

    def in_8_bits(self, block: Flops) -> Flops:
        """Return a block's operations; in an fp8 run, those of linear layers count as 8-bit.

        Gradients of weights do so only with ``--fp8-wgrad``.
        """
        fp8 = self.config.fp8
        if fp8.fp8_format is None:
            return block
        weights, fp8_weights = (0.0, block.weights) if fp8.fp8_wgrad else (block.weights, 0.0)
        return Flops(
            fp8=block.linear, scores=block.scores, weights=weights, fp8_weights=fp8_weights
        )

    def velocity_loss(self, rows: int) -> LayerBytes:
        """Return the memory of the loss on ``rows`` image tokens: velocities and errors.

        One of these tensors is kept in fp32, and in 16-bit precision another one in 16 bits.
        """
        error = rows * self.model.token_width * FP32
        half = rows * self.model.token_width * self.sizes.width if self.sizes.half else 0
        return LayerBytes(error + half, 3 * error)
