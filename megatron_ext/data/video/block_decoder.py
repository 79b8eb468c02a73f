"""Latents of a long video to pixels, a stretch at a time, with memory that does not grow.

A codec is causal, so that pixels need no latents to come, but those that went before: how many
decides whether a stretch can be decoded exactly.

- The patch codec looks at each latent frame by itself: exact.
- Wan's VAE keeps, for every convolution, the two frames before: exact, and nothing is done twice.
- Another VAE decodes `OVERLAP` latent frames before the stretch once more, which is exact only if
  it looks no farther back. HunyuanVideo's does, and its norms take in all frames that it is given,
  so that the pixels come close to those of a whole decoding, but are not the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.data.video.codec_base import VideoCodec, check_channels
from megatron_ext.data.video.codecs import PatchCodec
from megatron_ext.data.video.vae import DiffusersCodec

OVERLAP = 9
"""Latent frames that are decoded again with the next stretch, where no exact way is known."""

_WAN = "AutoencoderKLWan"

BlockDecoder = Callable[[Tensor], Tensor]
"""Takes the next latents ``[b, c, t, h, w]`` of its videos, gives their pixels ``[b, 3, f, H, W]``:
``f = t * temporal``, but ``(t - 1) * temporal + 1`` at the beginning."""


def block_decoder(codec: VideoCodec) -> BlockDecoder:
    """A decoder that begins with the first frame of videos; see the top of this file."""
    if isinstance(codec, PatchCodec):
        # Behind another frame, so that none but the first of all is taken for an image.
        return OverlapDecoder(codec, overlap=1)
    if isinstance(codec, DiffusersCodec) and type(codec.vae).__name__ == _WAN:
        return FeatureCacheDecoder(codec)
    return OverlapDecoder(codec)


class OverlapDecoder:
    """Decodes each stretch behind the last latent frames before it.

    Args:
        codec: any.
        overlap: latent frames before a stretch, 1 or more.
    """

    def __init__(self, codec: VideoCodec, overlap: int = OVERLAP) -> None:
        self._codec, self._overlap = codec, overlap
        self._before: Tensor | None = None

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """See `BlockDecoder`.

        Raises:
            DataError: the latents have another number of channels.
        """
        check_channels(self._codec, latents)
        before, num_new = self._before, latents.size(2)
        known = latents if before is None else torch.cat([before, latents], dim=2)
        self._before = known[:, :, -self._overlap :].clone()
        pixels = self._codec.decode(known)
        return pixels if before is None else pixels[:, :, -num_new * self._codec.temporal :]


class FeatureCacheDecoder:
    """Decodes latent frame by latent frame through the feature cache of diffusers' Wan VAE.

    The cache belongs to this object, so that other use of the VAE in between does no harm.

    Args:
        codec: with an AutoencoderKLWan.
    """

    def __init__(self, codec: DiffusersCodec) -> None:
        self._codec, self._vae = codec, codec.vae
        self._vae.clear_cache()
        self._features = self._vae._feat_map  # the VAE takes a new list each time that it is used
        # Versions of diffusers that know Wan 2.2 ask for it.
        takes_first = "first_chunk" in inspect.signature(self._vae.decoder.forward).parameters
        self._first: dict[str, bool] = {"first_chunk": True} if takes_first else {}

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """See `BlockDecoder`.

        Raises:
            DataError: the latents have another number of channels.
        """
        check_channels(self._codec, latents)
        entering = self._vae.post_quant_conv(self._codec.raw(latents))
        frames = []
        for frame in entering.split(1, dim=2):
            frames.append(
                self._vae.decoder(frame, feat_cache=self._features, feat_idx=[0], **self._first)
            )
            self._first = {}
        pixels = torch.cat(frames, dim=2)
        patch = self._vae.config.get("patch_size")
        if patch is not None:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            pixels = unpatchify(pixels, patch_size=patch)
        return pixels.float().clamp(-1, 1)
