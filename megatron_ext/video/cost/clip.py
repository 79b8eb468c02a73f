"""Cost formulas that all video networks share; each is for clips of one bucket, hence one shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.network import Flops, Network, ring
from megatron_ext.planning.stages import FP32, LayerBytes, Ranks, Stage
from megatron_ext.planning.weights import Weight


@dataclass(frozen=True)
class Clip:
    """The shape of the clips of one bucket, and how many micro-batches come from this bucket.

    Attributes:
        name: name of the bucket.
        frames, rows, columns: tokens of a clip in time, height and width.
        num_text: text tokens of a clip, padding included.
        micro_batch_size: clips of a micro-batch on one rank.
        share: fraction of an epoch's micro-batches that come from this bucket.
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
        """Return the number of image tokens of a clip."""
        return self.frames * self.rows * self.columns


@dataclass(frozen=True)
class BlockBytes:
    """Sizes in bytes of the tensors of a transformer block on one rank.

    Attributes:
        ranks: the run's parallel sizes, and ``width``, the bytes of a number in activations.
        h: hidden size.
        rows: tokens of a micro-batch on a context-parallel rank, ``s * b``.
    """

    ranks: Ranks
    h: int
    rows: int

    @property
    def stream(self) -> int:
        """Return the bytes of the residual stream ``[s, b, h]`` on one rank.

        Sequence parallelism splits its tokens over ranks.
        """
        return self.rows // self.ranks.sequence_size * self.h * self.ranks.width

    @property
    def whole(self) -> int:
        """Return the bytes of the residual stream ``[s, b, h]`` with all s tokens on one rank.

        Under sequence parallelism, a rank has all s tokens only after the stream is gathered.
        """
        return self.rows * self.h * self.ranks.width

    def cut(self, width: int) -> int:
        """Return the bytes on one rank of a tensor that has ``width`` features per token in all.

        The features are split over the tensor-parallel ranks; the tokens are not.
        """
        return self.rows * width // self.ranks.tp * self.ranks.width

    def matrix(self, rows: int, columns: int) -> int:
        """Return the bytes of the gradient of a weight on one rank.

        The weight ``[rows, columns]`` is split over the tensor-parallel ranks.
        """
        return rows * columns // self.ranks.tp * self.ranks.width

    def gradients(self, width: int) -> int:
        """Return the peak bytes of gradients in the backward pass of attention and its projection.

        The projection computes ``width`` features per token from the residual stream, such as 3 h
        for queries, keys and values. The backward pass of attention holds two tensors of ``width``
        features per token; that of the projection, the gradients of its weight and input. The
        peak is the larger of the two.
        """
        return max(self.matrix(width, self.h) + self.whole, 2 * self.cut(width))

    @property
    def statistics(self) -> int:
        """Return the bytes of mean and deviation that a LayerNorm of the residual stream keeps."""
        return 2 * (self.rows // self.ranks.sequence_size) * FP32

    def exchanged(self, trades_heads: bool) -> int:
        """Return the extra bytes that attention keeps for backward because of context parallelism.

        ``trades_heads`` tells whether ranks trade heads for tokens by all-to-all (Ulysses), or
        each gathers the keys and values of all.
        """
        if self.ranks.cp == 1:
            return 0
        return self.cut(self.h) if trades_heads else 2 * (self.ranks.cp - 1) * self.cut(self.h)


@dataclass(frozen=True)
class ClipNetwork(Network):
    """Formulas for the cost of a video network on one rank, for one micro-batch of a bucket.

    ``sizes`` holds the run's parallel sizes and micro-batch size, ``model`` the network's sizes.
    """

    config: RunConfig
    sizes: Ranks
    model: Any
    clip: Clip
    # Torch's own layers draw their weights as they are built.
    draws_by_name: ClassVar[bool] = False

    @property
    @abstractmethod
    def block_bytes(self) -> BlockBytes:
        """Return the sizes of a block's tensors in bytes."""

    @abstractmethod
    def sample_flops(self) -> float:
        """Return the FLOPs of one clip, forward and backward, without recomputation."""

    def frozen(self, weights: list[Weight]) -> list[Weight]:
        """Return the weights of a stage; mark those that the flags freeze."""
        if not self.config.freeze.is_used:
            return weights
        from megatron_ext.planning.frozen import marked

        return marked(self.config.freeze, weights)

    def of_trained(self, flops: Flops, stage: Stage) -> Flops:
        """Return a stage's operations without the gradients of frozen weights."""
        if not self.config.freeze.is_used:
            return flops
        from megatron_ext.planning.frozen import trained_share, without_frozen

        return without_frozen(flops, trained_share(self.parameters(stage)))

    @property
    def tokens(self) -> int:
        """Return the number of text and image tokens of a clip."""
        return self.clip.num_text + self.clip.num_image

    @property
    def layer_input(self) -> int:
        """Return the bytes of a block's input, the residual stream."""
        return self.block_bytes.stream

    @abstractmethod
    def blocks_of_stages(self, num_stages: int) -> Sequence[range]:
        """Return the range of block indices of each pipeline stage, virtual stages included."""

    def stages(self) -> list[Stage]:
        """Return all pipeline stages of the network, first to last."""
        place = Layout.from_config(self.config.parallel).placement
        count = place.num_stages
        return [
            Stage.of_layers(blocks, i, count, rank=place.rank_of(i), chunk=place.chunk_of(i))
            for i, blocks in enumerate(self.blocks_of_stages(count))
        ]

    def step_flops(self) -> float:
        """Return the FLOPs of a training step on all ranks together, without recomputation."""
        x = self.sizes
        micro, batch = self.config.training.batch_sizes
        clips = batch // (micro * self.config.parallel.data_parallel_size) * x.b * x.dp
        return self.sample_flops() * clips

    @property
    def trades_heads(self) -> bool:
        """Return whether context-parallel ranks trade heads for tokens by all-to-all (Ulysses)."""
        return self.config.parallel.cp_comm_type[0] == "a2a"

    def context_bytes(self) -> float:
        """Return the bytes that a rank sends for context parallelism in a block's forward pass."""
        x = self.sizes
        head = self.block_bytes.cut(self.block_bytes.h)
        return 4 * ring(x.cp) * head if self.trades_heads else 2.0 * (x.cp - 1) * head

    def mlp(self, inner: int) -> LayerBytes:
        """Return the memory of an MLP of width ``inner``; it keeps the outputs of fc1 and GELU."""
        width = self.block_bytes
        x = self.sizes
        tensor = width.cut(inner)
        weight = width.matrix(inner, width.h)
        emulated = self.config.fp8.fp8_format is not None and not x.gpu
        # On a CPU both factors of an 8-bit product, and the product, are made in fp32.
        more = 3 * width.rows * inner // x.tp * FP32 * emulated
        return LayerBytes(2 * tensor, max(tensor + weight, weight + width.whole - tensor) + more)

    def kept_in_8_bits(self, block: LayerBytes, *, alone: int, shared: int) -> LayerBytes:
        """Return the memory of a block in which linear layers keep inputs in 8 bits, if they do.

        They do in an fp8 run with ``--fp8-wgrad``; otherwise the result is ``block``, which is the
        memory of the block with all inputs kept in the dtype of the run.

        Args:
            alone: bytes in ``block`` of inputs that only a linear layer keeps; these shrink.
            shared: bytes in ``block`` of inputs that another operation keeps as well; for these,
                8-bit copies are added.
        """
        fp8 = self.config.fp8
        width = self.sizes.width
        if fp8.fp8_format is None or not fp8.fp8_wgrad:
            return block
        saved = alone * (width - 1) // width - shared // width
        return LayerBytes(block.kept - saved, block.transient)

    def in_8_bits(self, block: Flops) -> Flops:
        """Return the FLOPs of ``block``; in an fp8 run, count those of linear layers as 8-bit.

        Even in an fp8 run, the matrix products that compute weight gradients count as 8-bit only
        with ``--fp8-wgrad``.
        """
        fp8 = self.config.fp8
        if fp8.fp8_format is None:
            return block
        weights, fp8_weights = (0.0, block.weights) if fp8.fp8_wgrad else (block.weights, 0.0)
        return Flops(
            fp8=block.linear, scores=block.scores, weights=weights, fp8_weights=fp8_weights
        )

    def velocity_loss(self, rows: int) -> LayerBytes:
        """Return the memory of the loss on the velocities of ``rows`` image tokens.

        For the backward pass, the loss keeps an fp32 tensor of the velocities' shape and, in a
        16-bit run, also a 16-bit tensor of this shape.
        """
        error = rows * self.model.token_width * FP32
        half = rows * self.model.token_width * self.sizes.width if self.sizes.half else 0
        return LayerBytes(error + half, 3 * error)


@dataclass(frozen=True)
class StreamedCost(ClipNetwork):
    """Cost formulas of a network that ``--task streaming`` runs both with and without gradient."""

    @abstractmethod
    def without_gradient(self) -> int:
        """Return the peak bytes of activations in a forward pass that computes no gradient."""
