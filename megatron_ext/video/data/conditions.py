"""Reference frames and captions as conditions: which clips get them, and what the loss leaves out.

A mode is drawn for each clip (Open-Sora 2.0, ``condition_config``): nothing is given (t2v), the
first, the last or both frames (i2v), or a longer piece at one end (v2v). References are encoded by
themselves, so that no later frame leaks into them through the VAE, and reach the model only as its
condition: the clip to be denoised is noised on all frames alike.

Captions are replaced by the empty one at times, so that sampling can guide away from it
(classifier-free guidance, arXiv:2207.12598). As Open-Sora 2.0 does it, the sequence of text
embeddings and the pooled embedding of a clip are dropped independently of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import MODES, ConditionConfig


@dataclass(frozen=True)
class Section:
    """A run of reference frames of a clip; latent frames, counted from 0."""

    start: int
    length: int


def min_frames(mode: str, config: ConditionConfig) -> int:
    """Return the latent frames that a clip needs for a mode; v2v modes need one beyond the
    references.
    """
    if mode == "t2v":
        return 1
    if mode.startswith("i2v"):
        return 2
    return 1 + (config.v2v_easy_frames if mode.endswith("easy") else config.v2v_frames)


def sections(mode: str, num_frames: int, config: ConditionConfig) -> tuple[Section, ...]:
    """Return the reference frames of a mode, each section to be encoded by itself.

    Args:
        mode: one of `MODES`.
        num_frames: latent frames of the clip.

    Raises:
        DataError: the mode is unknown, or the clip is too short for it.
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
    """Return how often each mode comes for clips of a length, ``[len(MODES)]`` float64.

    Images get t2v.

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
            f"clips, which have {num_frames} latent frames; give `--t2v-weight` or "
            "`--i2v-head-weight` a value, or take longer clips."
        )
    return torch.tensor(weights, dtype=torch.float64)


def draw_modes(config: ConditionConfig, num_frames: int, uniforms: Tensor) -> Tensor:
    """Return the modes of the clips of a micro-batch.

    Args:
        num_frames: latent frames of the clips.
        uniforms: random numbers in [0, 1), ``[b]``.

    Returns:
        Indices into `MODES`, ``[b]`` int64.
    """
    edges = mode_weights(config, num_frames).cumsum(dim=0)
    return torch.searchsorted(edges, uniforms.double().cpu() * edges[-1], right=True)


def frame_masks(modes: Tensor, num_frames: int, config: ConditionConfig) -> Tensor:
    """Return True at the reference frames of clips, ``[b, t]`` bool.

    Args:
        modes: indices into `MODES`, ``[b]``.
        num_frames: latent frames t of the clips.
    """
    masks = torch.zeros(len(modes), num_frames, dtype=torch.bool)
    for mask, mode in zip(masks, modes.tolist(), strict=True):
        for section in sections(MODES[mode], num_frames, config):
            mask[section.start : section.start + section.length] = True
    return masks


def place_references(
    pieces: Sequence[tuple[Section, Tensor]],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return the references of one clip at their places, zeros elsewhere, ``[c, t, h, w]``.

    Args:
        pieces: sections with their latents ``[c, k, h, w]``.
        shape: (c, t, h, w) of the latents of the clip.

    Raises:
        DataError: the shape of a piece is not that of its section.
    """
    placed = torch.zeros(*shape, dtype=dtype, device=device)
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
    """Return the condition that the model is given: the mask, then the latents where it is True.

    Args:
        references: ``[b, c, t, h, w]``; anything where there is no reference.
        masks: see `frame_masks`, ``[b, t]``.

    Returns:
        ``[b, 1 + c, t, h, w]`` in the type of the references.
    """
    b, _, t, h, w = references.shape
    given = masks.to(references.device)[:, None, :, None, None]
    kept = torch.where(given, references, 0.0)
    return torch.cat([given.to(references.dtype).expand(b, 1, t, h, w), kept], dim=1)


def loss_mask(masks: Tensor, tokens_per_frame: int, reference_loss: str) -> Tensor:
    """Return which tokens count in the loss.

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


@dataclass(frozen=True)
class Text:
    """Encoded captions.

    Attributes:
        sequence: embeddings of their tokens, ``[b, l, d]``.
        pooled: one embedding each, ``[b, e]``.
    """

    sequence: Tensor
    pooled: Tensor


def fit_length(sequence: Tensor, length: int) -> Tensor:
    """Make an encoded empty caption as long as the captions of a batch by repeating its last token.

    Args:
        sequence: ``[b, k, d]``.
        length: l.

    Returns:
        ``[b, l, d]``.

    Raises:
        DataError: it is longer than l.
    """
    missing = length - sequence.size(1)
    if missing < 0:
        raise DataError(
            f"The encoded empty caption has {sequence.size(1)} tokens, but the captions of the "
            f"batch have {length}; encode both with the same maximal length."
        )
    return torch.cat([sequence, sequence[:, -1:].expand(-1, missing, -1)], dim=1)


def null_like(null: Text, text: Text) -> Text:
    """Return the empty caption in the shape and type of a batch of captions.

    Args:
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, k at most l.
        text: ``[b, l, d]`` and ``[b, e]``.
    """
    sequence = fit_length(null.sequence, text.sequence.size(1))
    return Text(
        sequence.to(text.sequence).expand_as(text.sequence),
        null.pooled.to(text.pooled).expand_as(text.pooled),
    )


def drop_text(text: Text, null: Text, drop_sequence: Tensor, drop_pooled: Tensor) -> Text:
    """Replace dropped captions by the empty one.

    Args:
        text: ``[b, l, d]`` and ``[b, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, k at most l.
        drop_sequence, drop_pooled: ``[b]`` bool.
    """
    empty = null_like(null, text)
    sequence_at = drop_sequence.to(text.sequence.device)[:, None, None]
    pooled_at = drop_pooled.to(text.pooled.device)[:, None]
    return Text(
        torch.where(sequence_at, empty.sequence, text.sequence),
        torch.where(pooled_at, empty.pooled, text.pooled),
    )
