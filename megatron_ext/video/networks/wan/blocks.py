"""The block of a Wan network: self-attention, attention to the text, feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.layers import sdpa
from megatron_ext.layers.heads_norm import summed
from megatron_ext.layers.norms import LayerNorm, spec_of, weights_of
from megatron_ext.layers.pointwise import activated
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.model.attention import Table, trades_heads
from megatron_ext.video.model.cache import CachePass, KeyValue
from megatron_ext.video.model.chunk import Blueprint, Part
from megatron_ext.video.model.linear import VectorEmbedder, column, heads_of, mark_replicated, row
from megatron_ext.video.model.tokens import FrameTokens, pack, parts_first
from megatron_ext.video.networks.wan.attention import AttentionPlan, FrameAttention
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.pointwise import (
    FullWidthRMSNorm,
    ModulationTable,
    added_and_modulated,
    gated,
    gated_and_normed,
    heads,
    residual_and_modulated,
    squares_of_heads,
)


def check_inputs(
    sizes: VideoDiTSizes,
    x: Tensor,
    timesteps: Tensor,
    text: Tensor,
    condition: Tensor | None = None,
    vision: Tensor | None = None,
) -> None:
    """Check the inputs of a forward pass against the sizes and each other.

    Raises:
        DataError: the shape or type of an input does not fit.
    """
    if x.dim() != 5 or x.size(2) != sizes.channels or 0 in x.shape:
        raise DataError(
            f"`x` has the shape {list(x.shape)}, but the model takes [b, t, {sizes.channels}, h, "
            "w], latent frames before channels."
        )
    b, t = x.shape[:2]
    if timesteps.shape not in ((b,), (b, t)):
        raise DataError(
            f"`timesteps` has the shape {list(timesteps.shape)}, but must be [{b}] for one of each "
            f"sample or [{b}, {t}] for one of each frame."
        )
    if timesteps.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"`timesteps` has the type {timesteps.dtype}, but must be float32: in 16 bits "
            "timesteps near 1000 have steps of 4."
        )
    if text.dim() != 3 or text.size(0) != b or text.size(2) != sizes.text_width or 0 in text.shape:
        raise DataError(
            f"`text` has the shape {list(text.shape)}, but must be [{b}, l, {sizes.text_width}]."
        )
    _check_condition(sizes, x, condition)
    _check_vision(sizes, b, vision)


def _check_condition(sizes: VideoDiTSizes, x: Tensor, condition: Tensor | None) -> None:
    b, t, _, height, width = x.shape
    wanted = [b, t, sizes.condition_channels, height, width] if sizes.condition_channels else None
    shape = None if condition is None else list(condition.shape)
    if shape != wanted:
        raise DataError(
            f"`condition` has the shape {shape}, but the model takes {wanted}, a mask and the "
            "latents of given frames for a model that has input channels for them."
        )


def _check_vision(sizes: VideoDiTSizes, batch: int, vision: Tensor | None) -> None:
    count = sizes.vision_positions or "k"
    wanted = f"[{batch}, {count}, {sizes.vision_width}]" if sizes.vision_width else "None"
    if vision is None:
        fits = not sizes.vision_width
    else:
        fits = vision.dim() == 3 and 0 not in vision.shape
        fits = fits and (vision.size(0), vision.size(2)) == (batch, sizes.vision_width)
        fits = fits and vision.size(1) == (sizes.vision_positions or vision.size(1))
    if not fits:
        shape = None if vision is None else list(vision.shape)
        raise DataError(
            f"`vision` has the shape {shape}, but the model takes {wanted}, the tokens of a vision "
            "encoder for a model that has keys and values for them."
        )


MAX_PERIOD = 10_000.0


def timestep_sinusoid(timesteps: Tensor) -> Tensor:
    """Return 128 cosines of ``t * 10000 ** (-j / 128)``, then 128 sines, in float64 as in Wan.

    j is 0 to 127. Timesteps t from 0 to 1000, ``[n]``, give ``[n, 256]``.
    """
    half = TIMESTEP_WIDTH // 2
    exponents = torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angles = timesteps.double()[:, None] * MAX_PERIOD**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Conditioning(NamedTuple):
    """Embedded timesteps, text and vision tokens, the same for every block.

    Attributes:
        time: embedded timesteps, ``[f, b, h]``; f is 1 if all frames have one timestep.
        modulation: shifts, scales and gates projected from ``time``, ``[f, b, 6h]``.
        text: embedded text, ``[l, b, h]``; l is 0 if the blocks' keys and values of the
            text are cached.
        vision: embedded tokens of a vision encoder, ``[k, b, h]``; None if the network takes none.
    """

    time: Tensor
    modulation: Tensor
    text: Tensor
    vision: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the conditioning as one tensor ``[7 f + l + k, b, h]``.

        It has 7 rows per timestep, for time and modulation, and 1 per text or vision token.
        """
        modulation = torch.unflatten(self.modulation, -1, (6, -1)).permute(0, 2, 1, 3).flatten(0, 1)
        vision = () if self.vision is None else (self.vision,)
        return torch.cat((self.time, modulation, self.text, *vision))

    @classmethod
    def from_rows(cls, rows: Tensor, num_times: int, num_vision: int) -> Conditioning:
        """Restore the conditioning from the result of `rows`.

        It has ``num_times`` timesteps, and ``num_vision`` vision tokens, the last rows.
        """
        ends = (num_times, 7 * num_times, rows.size(0) - num_vision)
        time, modulation, text, vision = rows.tensor_split(ends)
        parts = torch.unflatten(modulation, 0, (num_times, 6)).permute(0, 2, 1, 3).flatten(2)
        return cls(time, parts, text, vision if num_vision else None)


VISION_EPSILON = 1e-5
"""The epsilon of the norms around the layers that embed vision tokens; others have `EPSILON`."""


class VisionEmbedder(torch.nn.Module):
    """Two linear layers between norms, by which a vision encoder's tokens become ``[b, k, h]``."""

    def __init__(self, sizes: VideoDiTSizes) -> None:
        super().__init__()
        width = sizes.vision_width
        if sizes.vision_positions:
            self.positions = torch.nn.Parameter(torch.empty(sizes.vision_positions, width))
            self.positions.is_table = True  # type: ignore[attr-defined]
            self.reset_parameters()
        self.input_norm = LayerNorm(width, VISION_EPSILON, zero_centered=False)
        self.linear_in = torch.nn.Linear(width, width)
        self.linear_out = torch.nn.Linear(width, sizes.hidden_size)
        self.output_norm = LayerNorm(sizes.hidden_size, VISION_EPSILON, zero_centered=False)

    def reset_parameters(self) -> None:
        """Set the positions to zero, so that they start without an effect."""
        if hasattr(self, "positions"):
            torch.nn.init.zeros_(self.positions)

    def forward(self, vision: Tensor) -> Tensor:
        """Return embedded tokens ``[b, k, h]`` for ``[b, k, w]``, in the dtype of the weights."""
        vision = vision.to(self.linear_in.weight.dtype)
        if hasattr(self, "positions"):
            vision = vision + self.positions
        return self.output_norm(self.linear_out(F.gelu(self.linear_in(self.input_norm(vision)))))  # type: ignore[no-any-return]


class Embedder(Part):
    """The layers by which the first stage embeds latents, timesteps, text and vision tokens."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        sizes = plan.sizes
        h = plan.sizes.hidden_size
        self.patch_size = sizes.patch_size
        self.patch_in = torch.nn.Linear(sizes.input_width, h)
        self.text_in = torch.nn.Linear(sizes.text_width, h)
        self.text_out = torch.nn.Linear(h, h)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.time_projection = torch.nn.Linear(h, 6 * h)
        self.vision_in = VisionEmbedder(sizes) if sizes.vision_width else None
        for module in (self.patch_in, self.time_in, self.time_projection):
            mark_replicated(module, plan.config)

    def tokens(self, x: Tensor, tokens: FrameTokens) -> Tensor:
        """Return the embeddings ``[s, b, h]`` of this rank's tokens.

        ``x`` holds the latents of all tokens, ``[b, t, c, h, w]``.
        """
        packed = pack(x.transpose(1, 2), self.patch_size)
        own = torch.unflatten(packed, 1, (tokens.num_frames, -1))[:, :, tokens.held].flatten(1, 2)
        embedded: Tensor = self.patch_in(own.to(self.patch_in.weight.dtype))
        return embedded.transpose(0, 1)

    def conditioning(
        self, timesteps: Tensor, text: Tensor, vision: Tensor | None = None
    ) -> Conditioning:
        """Embed timesteps ``[b, f]``, text ``[b, l, text_width]`` and ``[b, k, vision_width]``.

        Every rank embeds the whole text, all timesteps and all vision tokens. Under sequence
        parallelism a rank gets gradients of the timestep layers from its own tokens only, which
        megatron-core must sum over the ranks (`mark_replicated`); those of the layers of text and
        vision tokens come from all tokens.
        """
        b, f = timesteps.shape
        embedded = self.time_in(timestep_sinusoid(timesteps.flatten()))
        time = embedded.view(b, f, -1).transpose(0, 1)
        words = F.gelu(self.text_in(text.to(self.text_in.weight.dtype)), approximate="tanh")
        modulation = self.time_projection(F.silu(time))
        seen = None
        if self.vision_in is not None:
            assert vision is not None, "`check_inputs` asks for it"
            seen = self.vision_in(vision).transpose(0, 1)
        return Conditioning(time, modulation, self.text_out(words).transpose(0, 1), seen)


WithBias = tuple[Tensor, Tensor]
"""The output of a linear layer without its bias, and the bias to add."""


@dataclass(frozen=True)
class Run:
    """Values that all blocks share in one forward pass.

    Attributes:
        num_frames: number of frames of this pass, t.
        parts: number of ranks that split the tokens in sequence parallelism; 1 without it.
        table: rotary table of the tokens in the context-parallel rank's slice.
        plan: the key frames to which each block of frames attends.
        cached: the object from which blocks read the keys and values of cached frames, and to
            which they pass those of the new frames; None without a cache.
        text: cached keys and values of the text by block number; a block computes its own if they
            are missing, and stores them here. None, as in passes with gradients, means that every
            block computes them and stores nothing.
    """

    num_frames: int
    parts: int
    table: Table
    plan: AttentionPlan
    cached: CachePass | None
    text: dict[int, KeyValue] | None


class SelfAttention(Part):
    """Self-attention of the tokens of all frames, or only of those within a window."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        h = plan.config.hidden_size
        self.linear_qkv = column(plan, h, h, projections=3)
        self.q_norm = FullWidthRMSNorm(plan)
        self.k_norm = FullWidthRMSNorm(plan)
        self.linear_proj = row(plan, h, h)
        self.attention = FrameAttention(plan.groups.cp, trades_heads=trades_heads(plan))

    def forward(self, x: Tensor, number: int, run: Run) -> WithBias:
        """Return (output ``[s, b, h]`` of self-attention in block ``number``, bias to add)."""
        fused, bias = self.linear_qkv(x)
        q, k, v = self.attention.exchange(*self._heads(fused, bias, run))
        past = run.cached.past_key_values(number) if run.cached is not None else ()
        if run.cached is not None:
            run.cached.record(number, k, v)
        attended = self.attention(q, (k, v), past, run.plan)
        out: WithBias = self.linear_proj(parts_first(attended, run.parts).flatten(2))
        return out

    def _heads(self, fused: Tensor, bias: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and values, ``[t, m, b, heads, d]`` each.

        t is the number of frames in this pass, m the number of each frame's tokens in the slice of
        this context-parallel rank.
        """
        config = self.config
        total = None
        if self.tp_group.size() > 1:
            total = summed(squares_of_heads(fused, bias, config.kv_channels), self.tp_group)
        sizes = (config.kv_channels, config.hidden_size, config.layernorm_epsilon)
        norms = self.q_norm(None), self.k_norm(None)
        return heads(fused, bias, total, *norms, *run.table, sizes, run.parts, run.num_frames)


class CrossAttention(Part):
    """Attention to all tokens of the text, including its padding, whose features are zero.

    The queries also attend to vision tokens, by themselves and with other keys and values, if the
    network takes any; the results are added.
    """

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        h = plan.config.hidden_size
        self.linear_q = column(plan, h, h)
        self.linear_kv = column(plan, h, h, projections=2, whole_input=True)
        self.q_norm = FullWidthRMSNorm(plan)
        self.k_norm = FullWidthRMSNorm(plan)
        self.linear_vision_kv: torch.nn.Module | None = None
        if plan.sizes.vision_width:
            self.linear_vision_kv = column(plan, h, h, projections=2, whole_input=True)
            self.vision_k_norm = FullWidthRMSNorm(plan)
        self.linear_proj = row(plan, h, h)

    def forward(self, x: Tensor, given: Conditioning, number: int, run: Run) -> WithBias:
        """Return (output for x ``[s, b, h]`` and the text and vision tokens, bias to add)."""
        projected, bias = self.linear_q(x)
        (query,) = heads_of(projected, 1, self.config.kv_channels)
        key, value = self._key_value(given.text, number, run.text)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (self.q_norm(query, bias), key, value))
        attended = sdpa.attend(q, k, v)
        if given.vision is not None:
            seen = (y.permute(1, 2, 0, 3) for y in self._vision_key_value(given.vision))
            attended = attended + sdpa.attend(q, *seen)
        out: WithBias = self.linear_proj(attended.permute(2, 0, 1, 3).flatten(2))
        return out

    def _vision_key_value(self, vision: Tensor) -> KeyValue:
        """Return the keys and values of the vision tokens ``[k, b, h]``, ``[k, b, n, d]`` each."""
        assert self.linear_vision_kv is not None
        projected, bias = self.linear_vision_kv(vision)
        key, value = heads_of(projected + bias, 2, self.config.kv_channels)
        return self.vision_k_norm(key), value

    def _key_value(self, text: Tensor, number: int, cache: dict[int, KeyValue] | None) -> KeyValue:
        """Return the keys and values of the text in block ``number``, ``[l, b, n, d]`` each.

        They are read from ``cache`` if it has an entry for this block. Otherwise they are computed
        from ``text``, and added to ``cache`` unless it is None.
        """
        if cache is not None and number in cache:
            return cache[number]
        projected, bias = self.linear_kv(text)
        key, value = heads_of(projected + bias, 2, self.config.kv_channels)
        pair = self.k_norm(key), value
        if cache is not None:
            cache[number] = pair
        return pair


class Block(Part):
    """One transformer block; ``number`` is its index in the whole model.

    If frames have different timesteps, each frame has its own shifts, scales and gates.
    """

    def __init__(self, plan: Blueprint, number: int) -> None:
        super().__init__(plan)
        self.number = number
        config = plan.config
        h = config.hidden_size
        ffn = config.ffn_hidden_size
        self.modulation = ModulationTable(config, 6)
        self.self_attention = SelfAttention(plan)
        self.cross_norm = LayerNorm(h, config.layernorm_epsilon, zero_centered=False)
        mark_replicated(self.cross_norm, config)
        self.cross_attention = CrossAttention(plan)
        self.linear_fc1 = column(plan, h, ffn)
        self.linear_fc2 = row(plan, ffn, h)

    def forward(self, hidden: Tensor, given: Conditioning, run: Run) -> Tensor:
        """Return the block's output for this rank's tokens of the frames, ``[s, b, h]``."""
        parts = self.modulation(torch.unflatten(given.modulation, -1, (6, -1)))
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        hidden, normed = residual_and_modulated(hidden, shift, scale)
        attended = self.self_attention(normed, self.number, run)
        norm = self.cross_norm
        hidden, normed = gated_and_normed(hidden, *attended, gate, *weights_of(norm), spec_of(norm))
        cross_attended = self.cross_attention(normed, given, self.number, run)
        hidden, normed = added_and_modulated(hidden, *cross_attended, ffn_shift, ffn_scale)
        narrow = activated(*self.linear_fc1(normed), None, "gelu_tanh", False)
        return gated(hidden, *self.linear_fc2(narrow), ffn_gate)
