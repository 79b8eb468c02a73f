"""Samples latent videos along the learned flow, from noise to data, with guidance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.video.data.conditions import Text, null_like
from megatron_ext.video.model.tokens import pack, tokens_per_frame, unpack
from megatron_ext.video.sampling.guidance import Guidance, guided
from megatron_ext.video.sampling.solvers import Solver


@dataclass(frozen=True)
class References:
    """The frames that b sampled clips are given, each in the forms that some network takes.

    Attributes:
        latents: frames encoded by themselves, ``[b, c, t, h, w]``; values of other frames are
            ignored.
        masks: True at the given latent frames, ``[b, t]`` bool.
        masked: latents of whole clips whose other pixels are zero, ``[b, c, t, h, w]``.
        pixel_masks: 1 at the given frames of pixels, ``[b, k, t]``: row i has the i-th of the k
            frames that a latent frame encodes.
        image_embeds: embedded images, ``[b, l, e]``, zero for clips without an image.
    """

    latents: Tensor
    masks: Tensor
    masked: Tensor | None = None
    pixel_masks: Tensor | None = None
    image_embeds: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> References:
        """Return the references with each of their tensors changed by a function."""
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        changed = {name: change(x) for name, x in values.items() if x is not None}
        return dataclasses.replace(self, **changed)

    @classmethod
    def none(cls, noise: Tensor) -> References:
        """Return references without any frame for clips of noise ``[b, c, t, h, w]``."""
        masks = torch.zeros(len(noise), noise.size(2), dtype=torch.bool, device=noise.device)
        return cls(torch.zeros_like(noise), masks)


Velocity = Callable[[Tensor, Tensor, Tensor, Tensor, References], Tensor]
"""A function ``velocity(x, t, text, pooled, given)`` that returns velocities in the shape of ``x``.

``x`` are noised tokens ``[b, n, c*p*p]`` and ``t`` their flow times ``[b]``, both float32. ``text``
has the caption's token embeddings ``[b, l, d]``, ``pooled`` one embedding of the whole caption
``[b, e]``. ``given`` has the reference frames of the b clips."""


class ClipsInProgress:
    """A batch of b clips between noise and data.

    Args:
        text: encoded captions: tokens ``[b, l, d]`` and pooled vectors ``[b, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]`` with k <= l, or the encoded
            negative prompt of each clip, ``[b, l, d]`` and ``[b, e]``.
        noise: start of sampling, ``[b, c, t, h, w]`` on the device of the model.
        solver: a new solver for this batch.
        references: reference frames, with latents in the shape of the noise; None for no frames.
    """

    def __init__(
        self,
        text: Text,
        null: Text,
        noise: Tensor,
        *,
        patch_size: int,
        solver: Solver,
        guidance: Guidance,
        references: References | None = None,
    ) -> None:
        noise = noise.float()
        self._solver = solver
        self._guidance = guidance
        self._patch = patch_size
        self._shape = noise.size(2), noise.size(3), noise.size(4)
        self._texts = text, null_like(null, text)
        self._nothing = References.none(noise)
        self._given = self._nothing
        if references is not None:
            latents = references.latents.to(noise)
            given = dataclasses.replace(references, latents=latents)
            self._given = given.map(lambda x: x.to(noise.device))
        self._is_guided_by_image = bool(self._given.masks.any())
        self._x = pack(noise, patch_size)
        self._step = 0

    @torch.no_grad()
    def advance(self, velocity: Velocity, until: float = 0.0) -> None:
        """Take all steps that begin at a time of at least ``until``.

        Each calls the model once, ``velocity``, with up to 3 b samples for the guidance.
        """
        while self._step < len(self._solver.times):
            now = self._solver.times[self._step]
            if now < until:
                return
            v = self._guide(velocity, now, self._step)
            self._x = self._solver.step(self._step, self._x, v)
            self._step += 1

    def _guide(self, velocity: Velocity, now: float, step: int) -> Tensor:
        """Return the guided velocity, ``[b, n, d]``, in float32."""
        num_frames = self._shape[0]
        by_text = self._guidance.text_scale(step, now)
        by_frame = self._guidance.image_scale(step, now, num_frames)
        text, empty = self._texts
        by_image = self._is_guided_by_image and bool((by_frame != 1).any())
        texts = [text]
        given = [self._given]
        if by_text != 1 or by_image:
            texts.append(empty)
            given.append(self._given)
        if by_image:
            texts.append(empty)
            given.append(self._nothing)
        x = self._x.repeat(len(texts), 1, 1)
        predicted = velocity(
            x,
            x.new_full((x.size(0),), now),
            torch.cat([part.sequence for part in texts]),
            torch.cat([part.pooled for part in texts]),
            _joined(given),
        )
        c, *others = predicted.float().chunk(len(texts))
        if not others:
            return c
        # Without references u and u2 are the same prediction.
        u = others[0]
        u2 = others[-1]
        tokens = tokens_per_frame(self._shape, self._patch)
        by_token = by_frame.repeat_interleave(tokens)[:, None].to(x.device)
        return guided(c, u, u2, by_text, by_token)

    def latents(self, *, keeps_references: bool = True) -> Tensor:
        """Return the clips as latents ``[b, c, t, h, w]`` float32.

        With ``keeps_references``, reference frames are as given.
        """
        latents = unpack(self._x, self._shape, self._patch)
        if not keeps_references:
            return latents
        is_given = self._given.masks[:, None, :, None, None]
        return torch.where(is_given, self._given.latents, latents)


def _joined(given: Sequence[References]) -> References:
    """Join the references of several passes of the same clips, one pass after another.

    Only latents and masks of a pass without references differ from those with them.
    """
    first = given[0]
    joined = first.map(lambda x: torch.cat([x] * len(given)))
    return dataclasses.replace(
        joined,
        latents=torch.cat([x.latents for x in given]),
        masks=torch.cat([x.masks for x in given]),
    )
