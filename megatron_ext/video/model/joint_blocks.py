"""Blocks on [text; image]: double-stream and single-stream blocks, and the last layer.

A double block has separate weights for text and image, and one joint attention. A single block
runs attention and MLP side by side on the joint sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import GATHER
from megatron_ext.layers.linear import enter, leave
from megatron_ext.layers.pointwise import activated
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.model.attention import JointAttention, QKNorm, Table
from megatron_ext.video.model.chunk import Blueprint, Part
from megatron_ext.video.model.joint_pointwise import (
    add_and_modulate_streams,
    add_gated,
    add_streams,
    heads,
    joint_heads,
    residual_and_modulated,
    residual_and_modulated_streams,
)
from megatron_ext.video.model.linear import (
    ColumnPiece,
    Modulation,
    RowPiece,
    mark_replicated,
    modulated_alone,
    start_at_zero,
)
from megatron_ext.video.model.tokens import LocalTokens, TokenRange


@dataclass(frozen=True)
class JointOptions:
    """Options of double and single blocks that do not change the shape of any parameter.

    Attributes:
        adaln_zero: whether modulations and the last layer start at zero (DiT, arXiv:2212.09748), so
            that the untrained model predicts zero. This suits training from scratch; Open-Sora
            starts from the weights of FLUX instead.
        recompute_double_blocks, recompute_single_blocks: how many blocks of each kind, from the
            first on, save only their inputs and are recomputed in the backward pass.
        cp_comm_type: how context-parallel ranks attend to the whole sequence: ``all_gather`` (or
            ``p2p``) collects keys and values, ``a2a`` trades heads for tokens by all-to-all.
        double_block_cost: time of a double block divided by that of a single block, for the split
            into pipeline stages; 1 by default, since both do equally many operations per token. Use
            the measured ratio; or, to balance memory, 2.4, the ratio of their parameters.

    Raises:
        ConfigError: a value is out of its range.
    """

    adaln_zero: bool = False
    recompute_double_blocks: int = 0
    recompute_single_blocks: int = 0
    cp_comm_type: str = "all_gather"
    double_block_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recompute_double_blocks", "recompute_single_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be 0 or more; 0 recomputes nothing."
                )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )
        if not 0 < self.double_block_cost < float("inf"):
            raise ConfigError(
                f"`double_block_cost` ({self.double_block_cost}) must be a positive number; 1 if "
                "it was not measured."
            )


def stage_blocks(sizes: JointSizes, num_stages: int, double_block_cost: float) -> list[range]:
    """Return the range of block indices of each pipeline stage; stages have about equal cost.

    Double blocks come first; one of them costs ``double_block_cost`` single blocks.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if num_stages > sizes.num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {sizes.num_blocks} blocks "
            f"({sizes.num_double_blocks} double, {sizes.num_single_blocks} single); use a smaller "
            "`--pipeline-model-parallel-size`."
        )
    costs = [double_block_cost] * sizes.num_double_blocks + [1.0] * sizes.num_single_blocks
    return list(_deal(tuple(costs), num_stages))


@lru_cache(maxsize=16)
def _deal(costs: tuple[float, ...], num_stages: int) -> tuple[range, ...]:
    """Split blocks into contiguous stages so that the most costly stage is as cheap as possible.

    Each stage gets at least one block; ``costs`` are the blocks' costs. Ties are broken by the
    smallest sum of squared stage costs. The method is dynamic programming, where ``best[i]`` is the
    best split of the first i blocks: (largest cost, sum of squares, ends of the stages).
    """
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, num_stages + 1):
        last_end = len(costs) - (num_stages - stage)
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, last_end + 1):
            longer[end] = min(
                (max(largest, cost), squares + cost**2, (*ends, end))
                for start, (largest, squares, ends) in best.items()
                if start < end
                for cost in (sums[end] - sums[start],)
            )
        best = longer
    ends = best[len(costs)][2]
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


class Stream(Part):
    """The layers of a double block for one stream, text or image."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        h = plan.sizes.hidden_size
        m = plan.sizes.mlp_size
        self.modulation = Modulation(plan.config, 6, zero=plan.options.adaln_zero)
        self.linear_qkv = ColumnPiece(plan, h, 3 * h, bias=plan.sizes.qkv_bias)
        self.linear_qkv.fused_parts = (plan.sizes.head_dim,) * 3
        self.norm = QKNorm(plan)
        self.linear_proj = RowPiece(plan, h, h)
        self.linear_fc1 = ColumnPiece(plan, h, m)
        self.linear_fc2 = RowPiece(plan, m, h)

    def mlp(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return (this rank's partial sum of the MLP's output ``[s, b, h]``, bias to add)."""
        narrow = activated(*self.linear_fc1(x), None, "gelu_tanh", False)
        out: tuple[Tensor, Any] = self.linear_fc2(narrow)
        return out


class DoubleBlock(Part):
    """Joint attention, then an MLP per stream; each output is gated and added to its stream."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        self.txt = Stream(plan)
        self.img = Stream(plan)
        self.attention = JointAttention(plan)

    def forward(self, hidden: Tensor, vec: Tensor, table: Table, tokens: LocalTokens) -> Tensor:
        """Return the block's output for this rank's tokens of [text; image], ``[s, b, h]``.

        ``vec`` is the conditioning ``[b, h]``, ``table`` the rotary table of ``tokens.cp_slice``.
        """
        txt, img = (stream.modulation.parts(vec) for stream in (self.txt, self.img))
        hidden, *normed = residual_and_modulated_streams(
            hidden, tokens.part.local_text, *txt[:2], *img[:2]
        )
        txt_qkv, img_qkv = (
            stream.linear_qkv(x) for stream, x in self._pairs(self._enter(normed, tokens))
        )
        weights = (*self.img.norm.weights, *self.txt.norm.weights)
        joint = joint_heads(*img_qkv, *txt_qkv, *weights, *table, self.img.norm.spec)
        attended = _split(self.attention(joint, tokens.keys), tokens.cp_slice)
        outputs = self._leave([s.linear_proj(x) for s, x in self._pairs(attended)], tokens)
        hidden, *normed = add_and_modulate_streams(
            hidden, *outputs, txt[2], img[2], *txt[3:5], *img[3:5]
        )
        entered = self._enter(normed, tokens)
        outputs = self._leave([s.mlp(x) for s, x in self._pairs(entered)], tokens)
        return add_streams(hidden, *outputs, txt[5], img[5])

    def _pairs(self, streams: Sequence[Tensor]) -> Iterable[tuple[Stream, Tensor]]:
        return zip((self.txt, self.img), streams, strict=True)

    def _enter(self, streams: Sequence[Tensor], tokens: LocalTokens) -> Sequence[Tensor]:
        """Give each tensor-parallel rank all tokens of ``tokens.cp_slice``; return (text, image).

        ``streams`` are the (text, image) tokens that this rank holds. Under sequence parallelism
        one collective gathers both.
        """
        if self.tp_group.size() == 1:
            return streams
        joint = enter(torch.cat(tuple(streams)), self.tp_group, self.config.sequence_parallel)
        return _split(joint, tokens.cp_slice)

    def _leave(
        self, partial_sums: Sequence[tuple[Tensor, Any]], tokens: LocalTokens
    ) -> tuple[Tensor, ...]:
        """Sum outputs over TP ranks; return (text sum, image sum, text bias, image bias).

        ``partial_sums`` has (this rank's partial sum, bias) of text, then of image. Under sequence
        parallelism the returned sums have only the tokens ``tokens.part``.
        """
        (txt, txt_bias), (img, img_bias) = partial_sums
        if self.tp_group.size() > 1:
            total = leave(torch.cat((txt, img)), self.tp_group, self.config.sequence_parallel)
            txt, img = _split(total, tokens.part)
        return txt, img, txt_bias, img_bias


def _split(joint: Tensor, part: TokenRange) -> Sequence[Tensor]:
    """Split ``joint``, tokens ``[s, b, h]`` of ``part``, into text and image; one may be empty."""
    return torch.split(joint, [part.local_text, joint.size(0) - part.local_text])


class SingleBlock(Part):
    """A block ``x + gate * W2 [attention; gelu(mlp)]`` on the joint sequence of text and image.

    W1 projects the modulated norm of x to queries, keys, values and the MLP's m features. Tensor
    parallelism splits the attention by heads and the MLP by width. Therefore FLUX's W1
    ``[3h + m, h]`` and W2 ``[h, h + m]`` are stored as two layers each: W1 as ``linear_qkv`` and
    ``linear_fc1``, W2 as ``linear_proj`` (with the bias) and ``linear_fc2``.
    """

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        h = plan.sizes.hidden_size
        m = plan.sizes.mlp_size
        self.modulation = Modulation(plan.config, 3, zero=plan.options.adaln_zero)
        self.linear_qkv = ColumnPiece(plan, h, 3 * h, bias=plan.sizes.qkv_bias)
        self.linear_qkv.fused_parts = (plan.sizes.head_dim,) * 3
        self.linear_fc1 = ColumnPiece(plan, h, m)
        self.norm = QKNorm(plan)
        self.linear_proj = RowPiece(plan, h, h, fan_in=h + m)
        self.linear_fc2 = RowPiece(plan, m, h, bias=False, fan_in=h + m)
        self.attention = JointAttention(plan)

    def forward(self, hidden: Tensor, vec: Tensor, table: Table, tokens: LocalTokens) -> Tensor:
        """Return the block's output for this rank's tokens of [text; image], ``[s, b, h]``.

        ``vec`` is the conditioning ``[b, h]``, ``table`` the rotary table of ``tokens.cp_slice``.
        """
        shift, scale, gate = self.modulation.parts(vec)
        hidden, normed = residual_and_modulated(hidden, shift, scale)
        joint = enter(normed, self.tp_group, self.config.sequence_parallel)
        qkv = heads(*self.linear_qkv(joint), *self.norm.weights, *table, self.norm.spec)
        attended = self.attention(qkv, tokens.keys)
        attention, bias = self.linear_proj(attended)
        mlp, _ = self.linear_fc2(activated(*self.linear_fc1(joint), None, "gelu_tanh", False))
        if self.tp_group.size() == 1:
            return add_gated(hidden, attention, mlp, bias, gate)
        total = leave(attention + mlp, self.tp_group, self.config.sequence_parallel)
        return add_gated(hidden, total, None, bias, gate)


class FinalLayer(Part):
    """The last layer: a modulated norm, then a projection of each token to p x p latent pixels."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        self.modulation = Modulation(plan.config, 2, zero=plan.options.adaln_zero)
        self.linear = torch.nn.Linear(plan.sizes.hidden_size, plan.sizes.token_width)
        if plan.options.adaln_zero:
            start_at_zero(self.linear)
        mark_replicated(self, plan.config)

    def forward(self, hidden: Tensor, vec: Tensor) -> Tensor:
        """Return each token's patch ``[s, b, channels * p * p]``, modulated by vec ``[b, h]``."""
        shift, scale = self.modulation.parts(vec)
        return self.linear(modulated_alone(hidden, shift, scale))  # type: ignore[no-any-return]
