"""Rotary positions (RoFormer, arXiv:2104.09864): frequencies of every kind, and their angles.

The kinds and their arithmetic are those of ``modeling_rope_utils`` in Hugging Face transformers,
bit for bit in float32. Layers with a window may have a separate base without scaling (Gemma 3). A
single tensor carries the angles for both kinds of layers; each layer selects its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding as CoreRotaryEmbedding,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from megatron_ext.layers.rope_scaling import RopeScaling, RotarySettings


def inverse_frequencies(
    head_dim: int,
    percent: float,
    base: float,
    scaling: RopeScaling | None = None,
    length: int | None = None,
) -> Tensor:
    """Return the angle per position of each pair of channels, float32 ``[rotated channels / 2]``.

    Args:
        percent: fraction of the ``head_dim`` channels to rotate.
        base: base of the frequencies.
        scaling: the scaling of the frequencies; None for none.
        length: length of the sequence, by which LongRoPE selects one of its two lists of divisors;
            None selects the one for short sequences.
    """
    kind = None if scaling is None else scaling.rope_type
    if scaling is None or kind is None:
        return 1.0 / _wavelengths(int(head_dim * percent), base)
    if kind == "proportional":
        # All channels are in the result, but the rest of them have angle zero.
        rotated = int(percent * head_dim // 2)
        frequencies = torch.zeros(head_dim // 2)
        frequencies[:rotated] = 1.0 / _wavelengths(head_dim, base)[:rotated]
        return frequencies / scaling.factor
    dim = int(head_dim * percent)
    wavelengths = _wavelengths(dim, base)
    if kind == "linear":
        return (1.0 / wavelengths) / scaling.factor
    if kind == "longrope":
        is_long = length is not None and length > scaling.original_max_position_embeddings
        divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
        return 1.0 / (divisors * wavelengths)
    if kind == "llama3":
        return _llama3(1.0 / wavelengths, scaling)
    assert kind == "yarn"
    return _yarn(wavelengths, dim, base, scaling)


def _wavelengths(dim: int, base: float) -> Tensor:
    """Return ``base ** (2 i / dim)`` for each pair i of channels, float32 ``[dim / 2]``."""
    wavelengths: Tensor = base ** (torch.arange(0, dim, 2).float() / dim)
    return wavelengths


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: low ones are divided by the factor, and high ones are kept.

    Frequencies in between are a blend of both.
    """
    original = scaling.original_max_position_embeddings
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    divided = torch.where(wavelength > original / low, frequencies / scaling.factor, frequencies)
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * divided / scaling.factor + share * divided
    is_between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_between, blended, divided)


def _yarn(wavelengths: Tensor, dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """Return YaRN's frequencies: low ones are divided by the factor, and high ones are kept.

    In between, a linear ramp over the channels blends the two (arXiv:2309.00071, eq. 23).
    """

    def channel(rotations: float) -> float:
        """Return the index (fractional) of the pair of channels that turns ``rotations`` times.

        The turns are counted over the original context length.
        """
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(base))

    low = channel(scaling.beta_fast)
    high = channel(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class RotaryEmbedding(CoreRotaryEmbedding):  # type: ignore[misc]
    """megatron-core's rotary embedding with scaled frequencies and an optional second base.

    The angles are ``[s, 1, k, d]`` with k = 1. With ``--rope-local-base-freq`` k is 2; the second
    angles are for layers with a window. If queries grow with their position, one table more, the
    last one, holds their factors instead of angles.
    """

    def __init__(
        self, settings: RotarySettings, transformer_config: TransformerConfig, cp_group: Any
    ):
        super().__init__(
            kv_channels=transformer_config.kv_channels,
            rotary_percent=settings.percent,
            rotary_interleaved=transformer_config.rotary_interleaved,
            rotary_base=settings.base,
            seq_len_interpolation_factor=settings.interpolation_factor,
            rope_scaling=settings.llama_factor is not None,
            rope_scaling_factor=settings.llama_factor or 1.0,
            use_cpu_initialization=transformer_config.use_cpu_initialization,
            cp_group=cp_group,
        )
        self.scaling = settings.scaling
        self.sizes = transformer_config.kv_channels, settings.percent
        self.base = settings.base
        self.local_base = settings.local_base
        self.query_growth = settings.query_growth

    @property
    def short_length(self) -> int | None:
        """Return the length up to which LongRoPE uses the short divisors; None for other kinds."""
        if self.scaling is None or self.scaling.rope_type != "longrope":
            return None
        return self.scaling.original_max_position_embeddings

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles ``[s, 1, k, d]`` of the s positions from ``offset`` on."""
        # Asynchronous copies, so that the host does not wait for the device.
        current = torch.cuda.current_device()
        self.inv_freq: Tensor = self.inv_freq.to(device=current, non_blocking=True)
        device = self.inv_freq.device
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device)
        if self.scaling is None:
            angles = [self.get_freqs_non_repeated(max_seq_len, offset)]
        else:
            length = offset + max_seq_len
            scaled = inverse_frequencies(*self.sizes, self.base, self.scaling, length)
            angles = [torch.outer(positions, scaled.to(device, non_blocking=True))]
        if self.local_base is not None:
            plain = inverse_frequencies(*self.sizes, self.local_base)
            angles.append(torch.outer(positions, plain.to(device, non_blocking=True)))
        if self.query_growth is not None:
            assert self.scaling is not None
            turns = torch.floor(positions / self.scaling.original_max_position_embeddings)
            factors = 1 + self.query_growth * torch.log(1 + turns)
            angles.append(factors[:, None].expand_as(angles[0]))
        once = torch.stack(angles, dim=1)
        if self.rotary_interleaved:
            return once.repeat_interleave(2, dim=-1).unsqueeze(1)
        return torch.cat((once, once), dim=-1).unsqueeze(1)
