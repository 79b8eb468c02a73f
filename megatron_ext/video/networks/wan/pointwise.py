"""The pointwise parts of a Wan network: modulation and gates for each frame, and norms.

Tokens are ``[s, b, h]``, frame after frame. Shifts, scales and gates, ``[f, 1, b, h]``, are the sum
of a learned table and a projection of the frame's timestep; f is 1 if all frames share them.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.layers.compiled import compiled
from megatron_ext.layers.fused_residual import FusedResidual
from megatron_ext.layers.heads_norm import HeadsWeight, exact, squares, summed
from megatron_ext.layers.norms import NormSpec as Norm
from megatron_ext.layers.norms import norm
from megatron_ext.video.model.attention import rotate
from megatron_ext.video.model.chunk import Blueprint, Part
from megatron_ext.video.model.linear import mark_replicated, modulated
from megatron_ext.video.model.tokens import frames_first


class ModulationTable(torch.nn.Module):
    """A learned table ``[num_parts, h]``, added to the modulation computed from the timesteps.

    A block has 6 parts (shift, scale, gate of the attention, then of the feed-forward layers), the
    output head 2 (shift, scale). The initial table is normal, with standard deviation 1 / sqrt(h).
    """

    def __init__(self, config: TransformerConfig, num_parts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_parts, config.hidden_size))
        self.weight.is_table = True  # type: ignore[attr-defined]
        self.reset_parameters()
        mark_replicated(self, config)

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=self.weight.size(-1) ** -0.5)

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """Return table + ``time``, split into ``num_parts`` tensors ``[f, 1, b, h]``.

        ``time`` comes from f timesteps: ``[f, b, num_parts, h]``, a vector for each part, or
        ``[f, b, 1, h]``, one vector for all parts.
        """
        return (self.weight + time).unsqueeze(1).unbind(3)


def modulated_frames(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``(1 + scale) * LN(x) + shift`` for x ``[s, b, h]``, the tokens of f frames.

    Each frame has its own shift and scale, ``[f, 1, b, h]``.
    """
    return modulated(_frames(x, shift), shift, scale).flatten(0, 1)


modulated_frames_alone = compiled(modulated_frames)


def add_gated(x: Tensor, output: Tensor, gate: Tensor) -> Tensor:
    """Return ``x + gate * output``, given ``[s, b, h]`` and each frame's gate, ``[f, 1, b, h]``."""
    return x + (gate * _frames(output, gate)).flatten(0, 1)


def _frames(x: Tensor, part: Tensor) -> Tensor:
    """Return x ``[s, b, h]`` as ``[f, s / f, b, h]``, where ``part`` is ``[f, ...]``."""
    return torch.unflatten(x, 0, (part.size(0), -1))


class FullWidthRMSNorm(HeadsWeight, Part):
    """RMSNorm of queries or keys over the features of all heads; ranks hold different heads.

    In ``y = x / sqrt(mean(x^2) + eps) * weight`` (arXiv:1910.07467) the mean covers all h features,
    so the tensor-parallel ranks sum their squares. Each rank holds the scales of its own heads,
    ``[h / tp]``, whose gradients need no sum over these ranks.
    """

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        self.width = plan.config.hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // plan.groups.tp.size()))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Normalize the heads of this rank, ``[s, b, n, d]``, after the bias ``[n * d]`` is added.

        If ``x`` is None, return the scales ``[h / tp]``, for a caller that normalizes by itself. Do
        not read ``weight`` instead: sharded weights are gathered only when the module is called.
        """
        if x is None:
            return self.weight
        eps = self.config.layernorm_epsilon
        if self.tp_group.size() == 1:
            return _whole_norm(x, bias, self.weight, self.width, eps)
        total = summed(_squares(x, bias), self.tp_group)
        return _scaled(x, bias, total, self.weight, self.width, eps)


def scaled(x: Tensor, total: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
    """Return ``x``, ``[..., n, d]``, RMS-normalized and multiplied by ``weight``.

    ``total`` holds each token's sum of squares ``[...]`` over all ``width`` features, including
    those of heads on other ranks.
    """
    scale = torch.rsqrt(total / width + eps)
    return (x.to(exact(x)) * scale[..., None, None]).to(x.dtype) * weight.view(x.shape[-2:])


@compiled
def _whole_norm(x: Tensor, bias: Tensor | None, weight: Tensor, width: int, eps: float) -> Tensor:
    whole = _with_bias(x, bias)
    return scaled(whole, squares(whole), weight, width, eps)


@compiled
def _squares(x: Tensor, bias: Tensor | None) -> Tensor:
    return squares(_with_bias(x, bias))


@compiled
def _scaled(
    x: Tensor, bias: Tensor | None, total: Tensor, weight: Tensor, width: int, eps: float
) -> Tensor:
    return scaled(_with_bias(x, bias), total, weight, width, eps)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.view(x.shape[-2:])


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (modulated_frames(x, shift, scale),)


residual_and_modulated = FusedResidual(_modulated)
"""A function of (x, shift, scale) that returns (x, ``modulated_frames(x, shift, scale)``).

Use the returned x for the residual connection; see `FusedResidual`."""


@compiled
def gated(x: Tensor, output: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Return ``x + gate * (output + bias)``, with a gate ``[f, 1, b, h]`` for each frame."""
    return add_gated(x, output + bias, gate)


@compiled
def gated_and_normed(
    x: Tensor,
    output: Tensor,
    bias: Tensor,
    gate: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    spec: Norm,
) -> tuple[Tensor, Tensor]:
    """Return (y, norm of y), where y is ``x + gate * (output + bias)``.

    ``spec`` says which norm; ``weight`` and ``norm_bias`` are the parameters of this norm.
    """
    hidden = add_gated(x, output + bias, gate)
    return hidden, norm(hidden, weight, norm_bias, spec)


@compiled
def added_and_modulated(
    x: Tensor, output: Tensor, bias: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y, ``modulated_frames(y, shift, scale)``), where y is ``x + output + bias``."""
    hidden = x + (output + bias)
    return hidden, modulated_frames(hidden, shift, scale)


@compiled
def squares_of_heads(qkv: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """Return each token's sums of squares over this rank's heads, of query and key, ``[2, s, b]``.

    ``qkv`` is the projection's output ``[s, b, n * 3 * d]`` before the bias is added.
    """
    heads = torch.unflatten(qkv + bias, -1, (-1, 3, head_dim))
    return torch.stack([squares(x) for x in heads.unbind(-2)[:2]])


@compiled
def heads(
    qkv: Tensor,
    bias: Tensor,
    total: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, float],
    num_parts: int,
    num_frames: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and values, ``[t, P * m, b, n, d]`` each.

    The tokens were gathered from P = ``num_parts`` ranks (1 without sequence parallelism); each
    held m tokens of each of t = ``num_frames`` frames.

    Args:
        qkv: ``[s, b, n * 3 * d]`` with s = P * t * m; for each head its query, key and value.
        total: sums of squares of queries and keys, ``[2, s, b]``, over the heads of all ranks; None
            if this rank has all heads.
        q_weight, k_weight: scales of the norms, this rank's ``[n * d]``.
        cos, sin: cosines and sines of the rotary angles.
        sizes: head size d, hidden size h (all heads' width), and epsilon.
    """
    head_dim, width, eps = sizes
    query, key, value = torch.unflatten(qkv + bias, -1, (-1, 3, head_dim)).unbind(-2)
    of_query, of_key = (squares(query), squares(key)) if total is None else total.unbind(0)
    query, key = (
        scaled(x, sums, weight, width, eps)
        for x, sums, weight in ((query, of_query, q_weight), (key, of_key, k_weight))
    )
    q, k, v = (frames_first(x, num_parts, num_frames) for x in (query, key, value))
    # A compiled function may return no view of its argument.
    copied = v.clone(memory_format=torch.contiguous_format)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), copied
