"""Joint bidirectional attention of [text; image], and rotary positions over three axes.

Rotary positions (RoFormer, arXiv:2104.09864) have three axes: latent frame, row and column.
Adjacent features (2j, 2j + 1) of a head form the pair that frequency j of an axis rotates, as in
FLUX and in Wan. Other implementations rotate the pairs (j, d / 2 + j). Their weights can be used
after output channels j and d / 2 + j of each head are moved to 2j and 2j + 1 in the query and key
projections.

Context-parallel ranks hold equal contiguous slices of the sequence. All queries see the same keys,
so these slices cost the same, and the zig-zag order of causal attention is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers import sdpa
from megatron_ext.layers.context_parallel import heads_to_sequence, sequence_to_heads
from megatron_ext.layers.norms import NormSpec as Norm
from megatron_ext.layers.norms import RMSNorm, spec_of, weights_of
from megatron_ext.video.config.sizes import EPSILON
from megatron_ext.video.model.chunk import Blueprint, Part

Table = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles of a head's d / 2 feature pairs, ``[..., d / 2]`` each."""


def rotary_table(ids: Tensor, axes_dim: Sequence[int], head_dim: int, theta: float) -> Table:
    """Return float32 cosines and sines ``[s, b, 1, d / 2]`` for text and image tokens.

    Args:
        ids: frame, row and column of each token, ``[b, s, 3]``; text tokens have 0 in all three, so
            they are not rotated.
        axes_dim: number of features of a head that each axis rotates; each number is even.
        theta: base of the frequencies.

    Raises:
        ConfigError: the widths of the axes do not sum to ``head_dim``.
    """
    if sum(axes_dim) != head_dim or len(axes_dim) != ids.size(-1):
        raise ConfigError(
            f"`axes_dim` {tuple(axes_dim)} must be {ids.size(-1)} widths whose sum is the size of "
            f"a head ({head_dim})."
        )
    angle = _angles(ids, axes_dim, theta, torch.float32).transpose(0, 1).unsqueeze(2)
    return angle.cos(), angle.sin()


def frame_rotary_table(
    positions: Tensor, axes_dim: Sequence[int], theta: float, dtype: torch.dtype
) -> Table:
    """Return cosines and sines ``[t, m, 1, 1, d / 2]`` for m tokens in each of t frames.

    ``positions`` are frame, row and column, ``[t, m, 3]``. Angles are computed in float64, so that
    frame 1000 is as exact as frame 0. The result has ``dtype``, but at least float32.
    """
    angle = _angles(positions, axes_dim, theta, torch.float64)[:, :, None, None]
    exact = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(exact), angle.sin().to(exact)


def _angles(positions: Tensor, axes_dim: Sequence[int], theta: float, dtype: torch.dtype) -> Tensor:
    """Return the rotary angles ``[..., sum(axes_dim) / 2]`` of ``positions [..., number of axes]``.

    The angle for feature pair j of axis i is ``positions[..., i] * theta ** (-2j / axes_dim[i])``.
    The pairs of the first axis come first.
    """
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
        angles.append(positions[..., axis].to(dtype).unsqueeze(-1) * theta**-exponents)
    return torch.cat(angles, dim=-1)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate the feature pairs of queries or keys ``[..., d]`` by the angles of ``table``.

    The table broadcasts with ``[..., d / 2]``. The rotation is computed in the dtype of the table;
    the result has the dtype of ``x``.
    """
    cos, sin = table
    first, second = torch.unflatten(x.to(cos.dtype), -1, (x.size(-1) // 2, 2)).unbind(-1)
    turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
    return turned.flatten(-2).to(x.dtype)


QKV = tuple[Tensor, Tensor, Tensor]


class QKNorm(Part):
    """RMSNorm of the queries and keys of each head, with scales that the heads share.

    A tensor-parallel rank has only its own heads, so the gradients of the scales must be summed
    over the tensor-parallel ranks. megatron-core's ``finalize_model_grads`` does this, with and
    without sequence parallelism, if the TransformerConfig has ``qk_layernorm=True``. It finds the
    scales by the names ``q_layernorm`` and ``k_layernorm``.
    """

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        self.q_layernorm = RMSNorm(plan.config.kv_channels, EPSILON, zero_centered=False)
        self.k_layernorm = RMSNorm(plan.config.kv_channels, EPSILON, zero_centered=False)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the scales of queries and of keys, each ``[d]``."""
        return weights_of(self.q_layernorm)[0], weights_of(self.k_layernorm)[0]

    @property
    def spec(self) -> Norm:
        """Return the settings of the two norms, which are the same for queries and keys."""
        return spec_of(self.q_layernorm)


def trades_heads(plan: Blueprint) -> bool:
    """Return whether context-parallel ranks split attention by heads instead of by queries.

    That is Ulysses (arXiv:2309.14509), which ``cp_comm_type`` "a2a" chooses.

    Raises:
        ConfigError: "a2a" is chosen, but these ranks cannot split the heads equally.
    """
    heads = plan.sizes.num_heads // plan.groups.tp.size()
    cp = plan.groups.cp.size()
    trades: bool = plan.options.cp_comm_type == "a2a" and cp > 1
    if trades and heads % cp:
        raise ConfigError(
            f"`cp_comm_type` a2a needs the attention heads of a tensor-parallel rank ({heads}) to "
            f"be divisible by `--context-parallel-size` ({cp}); use all_gather."
        )
    return trades


class JointAttention:
    """Attention of this context-parallel rank's tokens to all tokens of the sequence.

    The ranks gather the keys and values of all tokens or, if `trades_heads`, exchange data so that
    each rank computes some heads for all tokens.

    Raises:
        ConfigError: the heads cannot be split equally among the tensor-parallel ranks, or among the
            context-parallel ranks that trade heads.
    """

    def __init__(self, plan: Blueprint) -> None:
        heads = plan.sizes.num_heads
        tp = plan.groups.tp.size()
        if heads % tp:
            raise ConfigError(
                f"the attention heads ({heads}) must be divisible by "
                f"`--tensor-model-parallel-size` ({tp})."
            )
        self.cp_group = plan.groups.cp
        self.trades_heads = trades_heads(plan)

    def __call__(self, qkv: QKV, keys: Tensor | None = None) -> Tensor:
        """Attend with queries, keys, values ``[s/cp, b, n, d]``; return ``[s/cp, b, n * d]``.

        ``keys``, ``[b, s]``, is True at the tokens of the sequence to attend to; None means all.
        """
        query, key, value = qkv
        if self.trades_heads:
            stacked = torch.stack((query, key, value), dim=3)
            traded = heads_to_sequence(stacked, self.cp_group, zigzag=False)
            query, key, value = traded.unbind(3)
            attended = _attend(query, key, value, keys)
            return sequence_to_heads(attended, self.cp_group, zigzag=False).flatten(2)
        if self.cp_group.size() > 1:
            key, value = gather_from_sequence_parallel_region(
                torch.stack((key, value), dim=1),
                tensor_parallel_output_grad=True,
                group=self.cp_group,
            ).unbind(1)
        return _attend(query, key, value, keys).flatten(2)


def _attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None) -> Tensor:
    """Return ``softmax(q k / sqrt(d)) v`` over ``keys``; all others are ``[tokens, b, n, d]``."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    # All queries share the mask, of which a kernel expands no copy.
    mask = None if keys is None else keys[:, None, None]
    return sdpa.attend(q, k, v, mask=mask).permute(2, 0, 1, 3)
