"""Which latent frames of a clip are given to the model as references, and which it is to learn.

A mode is drawn for each clip (Open-Sora 2.0, ``condition_config``): nothing is given (t2v), the
first, the last or both frames (i2v), or a longer piece at one end (v2v). References are encoded by
themselves, so that no later frame leaks into them through the VAE, and reach the model only as its
condition: the clip to be denoised is noised on all frames alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError

MODES = (
    "t2v",
    "i2v_head",
    "i2v_tail",
    "i2v_loop",
    "v2v_head",
    "v2v_tail",
    "v2v_head_easy",
    "v2v_tail_easy",
)
"""Names of the modes; tensors of modes hold their indices."""

ReferenceLoss = Literal["masked", "all", "trimmed"]


@dataclass(frozen=True)
class ConditionConfig:
    """How often a mode is drawn, and whether reference frames count in the loss.

    Attributes:
        t2v_weight, i2v_head_weight, i2v_tail_weight, i2v_loop_weight: relative frequencies.
        v2v_head_weight, v2v_tail_weight: of references of ``v2v_frames`` latent frames.
        v2v_head_easy_weight, v2v_tail_easy_weight: of ``v2v_easy_frames`` latent frames.
        v2v_frames: 9 latent frames are 33 frames of a causal VAE of temporal stride 4.
        v2v_easy_frames: 17 latent frames are 65 frames.
        reference_loss: ``masked`` leaves every reference frame out of the loss; ``all`` counts
            them as any other (Open-Sora's default); ``trimmed`` leaves only a first and a last
            frame out, and only in clips without references in between (Open-Sora's
            ``no_i2v_ref_loss``).

    Raises:
        ConfigError: a weight that is not 0 or more, no weight at all, or an unknown
            ``reference_loss``.
    """

    t2v_weight: float = 1.0
    i2v_head_weight: float = 5.0
    i2v_tail_weight: float = 1.0
    i2v_loop_weight: float = 1.0
    v2v_head_weight: float = 0.0
    v2v_tail_weight: float = 0.0
    v2v_head_easy_weight: float = 0.0
    v2v_tail_easy_weight: float = 0.0
    v2v_frames: int = 9
    v2v_easy_frames: int = 17
    reference_loss: ReferenceLoss = "masked"

    def __post_init__(self) -> None:
        messages = [
            f"`{mode}_weight` ({self.weight(mode)}) must be a finite number of 0 or more; 0 turns "
            "the mode off."
            for mode in MODES
            if not 0 <= self.weight(mode) < math.inf
        ]
        if not messages and not self.modes:
            messages.append(
                "The weights of all condition modes are 0, but one must be drawn; give t2v_weight "
                "1 to train without references."
            )
        for name in ("v2v_frames", "v2v_easy_frames"):
            if getattr(self, name) < 1:
                messages.append(
                    f"`{name}` ({getattr(self, name)}) must be 1 latent frame or more; the usual "
                    "values are 9 and 17."
                )
        if self.reference_loss not in get_args(ReferenceLoss):
            messages.append(
                f"`reference_loss` ({self.reference_loss}) must be one of "
                f"{', '.join(get_args(ReferenceLoss))}; choose masked to train on new frames only."
            )
        if messages:
            raise ConfigError(messages)

    def weight(self, mode: str) -> float:
        """Relative frequency of a mode."""
        return float(getattr(self, f"{mode}_weight"))

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that are ever drawn for videos."""
        return tuple(mode for mode in MODES if self.weight(mode) > 0)


@dataclass(frozen=True)
class Section:
    """A run of reference frames of a clip; latent frames, counted from 0."""

    start: int
    length: int


def min_frames(mode: str, config: ConditionConfig) -> int:
    """Latent frames that a clip needs for a mode; some beyond the references in v2v modes."""
    if mode == "t2v":
        return 1
    if mode.startswith("i2v"):
        return 2
    return 1 + (config.v2v_easy_frames if mode.endswith("easy") else config.v2v_frames)


def sections(mode: str, num_frames: int, config: ConditionConfig) -> tuple[Section, ...]:
    """The reference frames of a mode, each section to be encoded by itself.

    Args:
        mode: one of `MODES`.
        num_frames: latent frames of the clip.
        config: lengths of the v2v references.

    Raises:
        DataError: an unknown mode, or a clip that is too short for it.
    """
    if mode not in MODES:
        raise DataError(
            f"The condition mode ({mode}) must be one of {', '.join(MODES)}; correct its name."
        )
    needed = min_frames(mode, config)
    if num_frames < needed:
        raise DataError(
            f"The condition mode {mode} was asked for a clip of {num_frames} latent frame(s), but "
            f"it needs {needed}; take a longer clip, or t2v."
        )
    if mode == "t2v":
        return ()
    length = 1 if mode.startswith("i2v") else needed - 1
    head, tail = Section(0, length), Section(num_frames - length, length)
    if mode == "i2v_loop":
        return head, tail
    return (tail,) if "tail" in mode else (head,)


def mode_weights(config: ConditionConfig, num_frames: int) -> Tensor:
    """Frequencies of the modes for clips of a length, ``[len(MODES)]`` float64; images get t2v.

    Raises:
        ConfigError: none of the modes with a weight fits such clips.
    """
    if num_frames == 1:
        weights = [float(mode == "t2v") for mode in MODES]
    else:
        weights = [
            config.weight(mode) if num_frames >= min_frames(mode, config) else 0.0 for mode in MODES
        ]
    if not any(weights):
        raise ConfigError(
            f"The condition modes with a weight ({', '.join(config.modes)}) must fit the shortest "
            f"clips, which have {num_frames} latent frames; give t2v_weight or i2v_head_weight a "
            "value, or take longer clips."
        )
    return torch.tensor(weights, dtype=torch.float64)


def draw_modes(config: ConditionConfig, num_frames: int, uniforms: Tensor) -> Tensor:
    """Modes of the clips of a micro-batch.

    Args:
        config: weights, which stay as they are whatever the lengths of clips.
        num_frames: latent frames of the clips.
        uniforms: random numbers in [0, 1), ``[b]``.

    Returns:
        Indices into `MODES`, ``[b]`` int64.

    Raises:
        ConfigError: see `mode_weights`.
    """
    edges = mode_weights(config, num_frames).cumsum(dim=0)
    return torch.searchsorted(edges, uniforms.double().cpu() * edges[-1], right=True)


def frame_masks(modes: Tensor, num_frames: int, config: ConditionConfig) -> Tensor:
    """True at the reference frames of clips.

    Args:
        modes: indices into `MODES`, ``[b]``.
        num_frames: latent frames t of the clips.
        config: lengths of the v2v references.

    Returns:
        ``[b, t]`` bool.

    Raises:
        DataError: see `sections`.
    """
    masks = torch.zeros(len(modes), num_frames, dtype=torch.bool)
    for mask, mode in zip(masks, modes.tolist(), strict=True):
        for section in sections(MODES[mode], num_frames, config):
            mask[section.start : section.start + section.length] = True
    return masks


def place_references(
    pieces: Sequence[tuple[Section, Tensor]], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """References of one clip at their places, zeros elsewhere.

    Args:
        pieces: sections with their latents ``[c, k, h, w]``.
        shape: of the latents of the clip, (c, t, h, w).
        dtype: of the result.

    Returns:
        ``[c, t, h, w]``.

    Raises:
        DataError: a piece whose shape is not that of its section.
    """
    placed = torch.zeros(*shape, dtype=dtype)
    for section, latents in pieces:
        place = placed[:, section.start : section.start + section.length]
        if place.shape != latents.shape or place.size(1) != section.length:
            raise DataError(
                f"The reference latents of frames {section.start} to "
                f"{section.start + section.length - 1} have shape {tuple(latents.shape)}, but the "
                f"clip has room for {tuple(place.shape)}; encode the references at its size."
            )
        place.copy_(latents)
    return placed


def condition(references: Tensor, masks: Tensor) -> Tensor:
    """What the model is given of the references: the mask, then the latents where it is True.

    Args:
        references: ``[b, c, t, h, w]``; anything where there is no reference.
        masks: of `frame_masks`, ``[b, t]``.

    Returns:
        ``[b, 1 + c, t, h, w]`` in the type of the references.
    """
    b, _, t, h, w = references.shape
    given = masks.to(references.device)[:, None, :, None, None]
    kept = torch.where(given, references, 0.0)
    return torch.cat([given.to(references.dtype).expand(b, 1, t, h, w), kept], dim=1)


def loss_mask(masks: Tensor, tokens_per_frame: int, reference_loss: ReferenceLoss) -> Tensor:
    """Tokens that count in the loss.

    Args:
        masks: reference frames, ``[b, t]`` bool.
        tokens_per_frame: tokens of a latent frame.
        reference_loss: see `ConditionConfig`.

    Returns:
        ``[b, n]`` float32 of 0 and 1, n = t * tokens_per_frame. A clip of which every frame is a
        reference, such as two frames in i2v_loop, has no token that counts.
    """
    left_out = masks
    if reference_loss == "all":
        left_out = torch.zeros_like(masks)
    elif reference_loss == "trimmed":
        left_out = masks & ~masks[:, 1:-1].any(dim=1, keepdim=True)
    return (~left_out).float().repeat_interleave(tokens_per_frame, dim=1)
