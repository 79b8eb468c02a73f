"""Chooses the conditions of clips (reference frames and captions), and masks the loss.

A mode is drawn for each clip (Open-Sora 2.0, ``condition_config``): the model is given no frame
(t2v), the first, the last, both or a middle frame (i2v), or a longer piece at one end (v2v). A set
of clips holds the given frames in one or both of two forms. In both, other frames of the clip
cannot leak into them through the VAE:

- as references, which are encoded separately (Open-Sora);
- masked, that is, in place in a clip whose other pixels are zero, which is encoded as a whole
  (Wan's image-to-video).

The model gets them only as its condition; the clip to be denoised has noise on all frames.

Some captions are replaced by the empty caption, for classifier-free guidance (arXiv:2207.12598) in
sampling. Token embeddings and pooled embedding are replaced independently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import MODES, ConditionConfig


@dataclass(frozen=True)
class Section:
    """Consecutive reference frames of a clip.

    Attributes:
        start, length: the first frame and the number of frames, in latent frames.
        side: where in the clip they lie, "head", "tail" or "middle".
    """

    start: int
    length: int
    side: str

    @property
    def name(self) -> str:
        """Return the name under which the set has these frames, such as ``head1``."""
        return reference_name(self.side, self.length)

    def first_pixel_frame(self, temporal: int) -> int:
        """Return the first pixel frame; ``temporal`` frames are encoded in a latent frame.

        A section is encoded separately, so its first latent frame encodes one pixel frame: the last
        of those that this latent frame encodes in the whole clip.
        """
        return self.start * temporal


def reference_name(side: str, num_frames: int) -> str:
    """Return the name of a reference, such as ``head1`` or ``tail4``.

    A reference is the beginning (``side`` "head"), the end ("tail") or one frame in the middle
    ("middle") of a clip, encoded without the rest. It has ``num_frames`` latent frames.
    """
    return f"{side}{num_frames}"


_MIN_FRAMES_OF_MIDDLE = 3
"""The least number of latent frames with one that is neither first nor last."""


def _min_frames(mode: str, config: ConditionConfig) -> int:
    """Return how many latent frames a clip needs at least for a condition mode."""
    if mode == "t2v":
        return 1
    if mode == "i2v_middle":
        return _MIN_FRAMES_OF_MIDDLE
    if mode.startswith("i2v"):
        return 2
    return 1 + (config.v2v_easy_frames if mode.endswith("easy") else config.v2v_frames)


def sections(mode: str, num_frames: int, config: ConditionConfig) -> tuple[Section, ...]:
    """Return the sections of reference frames in a clip of ``num_frames`` latent frames.

    ``mode`` is one of `MODES`; t2v has no sections. The VAE encodes each section by itself. An
    unknown mode, or too few latent frames for the mode, raises DataError.
    """
    if mode not in MODES:
        raise DataError(
            f"The condition mode ({mode}) must be one of {', '.join(MODES)}; correct its name."
        )
    needed = _min_frames(mode, config)
    if num_frames < needed:
        raise DataError(
            f"The condition mode {mode} was asked for a clip of {num_frames} latent frame(s), but "
            f"it needs {needed}; take a longer clip, or t2v."
        )
    given = named_sections(_given_by(mode, config), num_frames)
    assert given is not None, "the clip has as many frames as the mode needs"
    return given


def _given_by(mode: str, config: ConditionConfig) -> str:
    """Return the name of the frames that a mode gives, such as ``head1``; ``none`` for t2v."""
    if mode == "t2v":
        return "none"
    length = 1 if mode.startswith("i2v") else _min_frames(mode, config) - 1
    return reference_name(mode.split("_")[1], length)


MASKED_PREFIX = "masked_"
"""Begins the name of a clip in a set that is zero at all frames but some."""
_NAME = re.compile(rf"(?:{MASKED_PREFIX})?(?:(none)|(head|tail|loop|middle)([0-9]+))")


def named_sections(name: str, num_frames: int) -> tuple[Section, ...] | None:
    """Return the given frames of a clip of ``num_frames`` latent frames by the name in a set.

    The name is that of a reference, such as ``head4``, or of a masked clip, such as
    ``masked_loop1``. Return None if the clip is too short to have them.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    none, side, digits = match.groups()
    if none:
        return ()
    length = int(digits)
    if length >= num_frames or (side == "middle" and num_frames < _MIN_FRAMES_OF_MIDDLE):
        return None
    if side == "middle":
        return (Section(num_frames // 2, 1, side),)
    head = Section(0, length, "head")
    tail = Section(num_frames - length, length, "tail")
    return {"head": (head,), "tail": (tail,), "loop": (head, tail)}[side]


def draw_modes(config: ConditionConfig, num_frames: int, uniforms: Tensor) -> Tensor:
    """Draw a condition mode for each of b clips: indices into `MODES`, ``[b]`` int64.

    ``uniforms`` are random numbers in [0, 1), ``[b]``. Images get t2v. If no mode with a weight
    above 0 fits clips of ``num_frames`` latent frames, ConfigError is raised.
    """
    weights = [float(mode == "t2v") for mode in MODES]
    if num_frames > 1:
        fits = [num_frames >= _min_frames(mode, config) for mode in MODES]
        weights = [config.weight(x) if y else 0.0 for x, y in zip(MODES, fits, strict=True)]
    if not any(weights):
        raise ConfigError(
            f"The condition modes with a weight ({', '.join(config.modes)}) must fit the shortest "
            f"clips, which have {num_frames} latent frames; give `--t2v-weight` or "
            "`--i2v-head-weight` a value, or take longer clips."
        )
    edges = torch.tensor(weights, dtype=torch.float64).cumsum(dim=0)
    return torch.searchsorted(edges, uniforms.double().cpu() * edges[-1], right=True)


def frame_masks(modes: Tensor, num_frames: int, config: ConditionConfig) -> Tensor:
    """Return masks ``[b, t]`` bool, True at the reference frames of each clip.

    ``modes`` ``[b]`` are the clips' condition modes, as indices into `MODES`.
    """
    masks = torch.zeros(len(modes), num_frames, dtype=torch.bool)
    for mask, mode in zip(masks, modes.tolist(), strict=True):
        for section in sections(MODES[mode], num_frames, config):
            mask[section.start : section.start + section.length] = True
    return masks


def pixel_masks(modes: Tensor, num_frames: int, config: ConditionConfig, temporal: int) -> Tensor:
    """Return masks of given pixel frames, ``[b, temporal, t]`` float32: 1 at given ones, else 0.

    Entry (i, k) is the pixel frame i of those that latent frame k encodes. Latent frame 0 encodes
    one pixel frame, which stands in all its entries, as in Wan's image-to-video.
    """
    masks = torch.zeros(len(modes), temporal, num_frames)
    for mask, mode in zip(masks, modes.tolist(), strict=True):
        for section in sections(MODES[mode], num_frames, config):
            mask[-1 if section.start else slice(None), section.start] = 1.0
            mask[:, section.start + 1 : section.start + section.length] = 1.0
    return masks


def place_references(
    pieces: Sequence[tuple[Section, Tensor]],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return latents of ``shape`` ``[c, t, h, w]``: those of the reference frames, 0 at the others.

    ``pieces`` has a pair for each section: (section of k reference frames, their latents
    ``[c, k, h, w]``). Latents that do not fit their section raise DataError.
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


def place_pixels(
    pieces: Sequence[tuple[Section, Tensor]], shape: Sequence[int], temporal: int
) -> Tensor:
    """Return pixels of ``shape`` ``[..., f, H, W]``: those of given frames, 0 at all others.

    ``pieces`` has a pair for each section: (section of k latent frames, its pixels ``[..., j, H,
    W]`` with ``j = (k - 1) * temporal + 1``). ``temporal`` frames are encoded in a latent frame.
    """
    placed = pieces[0][1].new_zeros(*shape) if pieces else torch.zeros(*shape)
    for section, pixels in pieces:
        first = section.first_pixel_frame(temporal)
        placed[..., first : first + pixels.size(-3), :, :].copy_(pixels)
    return placed


def masked_name(mode: str, config: ConditionConfig) -> str:
    """Return the name under which a set has a clip with only the frames that a mode gives.

    It is ``masked_none`` for t2v, ``masked_loop1`` for i2v_loop, or for example ``masked_head1``.
    """
    return f"{MASKED_PREFIX}{_given_by(mode, config)}"


def condition(references: Tensor, masks: Tensor) -> Tensor:
    """Return the model's condition ``[b, 1 + c, t, h, w]``: a mask channel, then the references.

    The references ``[b, c, t, h, w]`` are set to zero where the masks ``[b, t]`` are False.
    """
    b, _, t, h, w = references.shape
    given = masks.to(references.device)[:, None, :, None, None]
    kept = torch.where(given, references, 0.0)
    return torch.cat([given.to(references.dtype).expand(b, 1, t, h, w), kept], dim=1)


def loss_mask(masks: Tensor, tokens_per_frame: int, reference_loss: str) -> Tensor:
    """Return 1 for tokens that have a loss, else 0, ``[b, t * tokens_per_frame]`` float32.

    ``masks`` ``[b, t]`` are True at reference frames. All other frames have a loss. If
    ``reference_loss`` is "masked", reference frames have none; if "all", they all have one. If
    "trimmed", they have none in a clip whose only references are its first or last frame, or both;
    in other clips they all have one.
    """
    left_out = masks
    if reference_loss == "all":
        left_out = torch.zeros_like(masks)
    elif reference_loss == "trimmed":
        left_out = masks & ~masks[:, 1:-1].any(dim=1, keepdim=True)
    return (~left_out).float().repeat_interleave(tokens_per_frame, dim=1)


@dataclass(frozen=True)
class Text:
    """Encoded captions: ``sequence``, token embeddings ``[b, l, d]``; ``pooled``, ``[b, e]``."""

    sequence: Tensor
    pooled: Tensor


def text_mask(sequence: Tensor) -> Tensor:
    """Return which rows of token embeddings ``[b, l, d]`` are tokens, ``[b, l]`` bool.

    Encoders that mask pads return rows of zeros for them.
    """
    return sequence.ne(0).any(dim=-1)


def null_like(null: Text, text: Text) -> Text:
    """Return the empty caption ``null``, expanded to the shape and dtype of captions ``text``.

    The captions have token embeddings ``[b, l, d]`` and pooled embeddings ``[b, e]``. The empty
    caption has ``[1, k, d]`` and ``[1, e]``, or ``[b, k, d]`` and ``[b, e]``. If k < l, its last
    token embedding is repeated until there are l; k > l raises DataError.
    """
    length = text.sequence.size(1)
    null_length = null.sequence.size(1)
    if length < null_length:
        raise DataError(
            f"The encoded empty caption has {null_length} tokens, but the captions of the batch "
            f"have {length}; encode both with the same maximal length."
        )
    last = null.sequence[:, -1:].expand(-1, length - null_length, -1)
    sequence = torch.cat([null.sequence, last], dim=1)
    return Text(
        sequence.to(text.sequence).expand_as(text.sequence),
        null.pooled.to(text.pooled).expand_as(text.pooled),
    )


def drop_text(text: Text, null: Text, drop_sequence: Tensor, drop_pooled: Tensor) -> Text:
    """Replace embeddings of some captions by those of the empty caption ``null``.

    Token embeddings are replaced where ``drop_sequence`` ``[b]`` is True, pooled embeddings where
    ``drop_pooled`` ``[b]`` is True.
    """
    empty = null_like(null, text)
    sequence_at = drop_sequence.to(text.sequence.device)[:, None, None]
    pooled_at = drop_pooled.to(text.pooled.device)[:, None]
    return Text(
        torch.where(sequence_at, empty.sequence, text.sequence),
        torch.where(pooled_at, empty.pooled, text.pooled),
    )
