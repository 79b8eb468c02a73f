"""Builds codecs by name or from a manifest, and decoders that decode long videos in parts.

Codecs are causal: the pixels that a latent frame encodes depend on this latent frame and earlier
ones, never on later ones. Decoding in parts is exact if each part is decoded together with all
earlier latent frames on which its pixels depend.

- The patch codec decodes each latent frame independently, which is exact.
- Wan's VAE caches two earlier frames for each convolution. This is exact, and no frame is decoded
  twice.
- With any other VAE, the `OVERLAP` latent frames before a part are decoded again. This is
  approximate for HunyuanVideo's VAE, whose pixels depend on frames farther back, and which
  normalizes over all frames that it decodes together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import PATCH, CodecConfig
from megatron_ext.video.data.codec import PatchCodec, VideoCodec
from megatron_ext.video.data.model_folders import compared
from megatron_ext.video.data.vae import WAN, DiffusersCodec, read_config


def build_codec(
    config: CodecConfig, device: torch.device | None = None, seed: int = 0
) -> VideoCodec:
    """Build the codec that a configuration names: the patch codec, or a VAE.

    A VAE is put on ``device`` (None means the CPU); ``seed`` is the seed of its posterior samples.
    """
    if config.codec == PATCH:
        return PatchCodec(config)
    return DiffusersCodec(config, device or torch.device("cpu"), seed)


def check_codec_folder(config: CodecConfig) -> None:
    """Raise ConfigError if a VAE's folder lacks a config.json that names the VAE's class.

    The patch codec has no folder, so it always passes.
    """
    if config.codec != PATCH:
        read_config(config.codec)


_DECISIVE = ("latents_mean", "latents_std", "scaling_factor", "shift_factor", "z_dim",
             "latent_channels", "patch_size")  # fmt: skip
"""The entries of a VAE's config.json that say what its latents are, whatever version wrote it."""


def check_codec_beside(weights: str, paths: str, manifest: Mapping[str, Any]) -> None:
    """Raise ConfigError if published weights lie beside a VAE that did not make the latents.

    Latents of another VAE may have the same number of channels, so that nothing else notices.
    ``weights`` is the pipeline or the folder in it; ``paths`` names the data of ``manifest``.
    """
    place = Path(weights)
    for folder in (place / "vae", place.parent / "vae"):
        if (folder / "config.json").is_file():
            break
    else:
        return
    beside = read_config(str(folder))
    made = manifest["codec"]
    names = [name for name in _DECISIVE if name in beside and name in made.get("config", {})]
    differing = compared(
        {"codec": made["codec"], **{name: made["config"][name] for name in names}},
        {"codec": beside["_class_name"], **{name: beside[name] for name in names}},
    )
    if differing:
        raise ConfigError.about(
            "--video-data-path",
            paths,
            f"was not encoded by the VAE of `--load-weights`, {folder}: {differing}",
            "encode it with that VAE, or give a copy of the weights alone",
        )


def codec_from_manifest(
    manifest: Mapping[str, Any],
    codec_folder: str | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    **tiles: Any,
) -> VideoCodec:
    """Build the codec that made the latents of a dataset, to decode samples or encode references.

    The patch codec needs only the manifest of the dataset; a VAE needs its ``codec_folder``, and
    runs on ``device`` (None for the CPU). ``seed`` is the seed of a VAE's posterior samples, and
    ``tiles`` has the values of `TILE_FLAGS`.

    Raises:
        ConfigError: ``codec_folder`` is missing for a VAE, is given for the patch codec, or holds a
            VAE that cannot be used.
        DataError: the manifest names no codec, a patch codec that cannot be built, or another VAE
            than the one in ``codec_folder``.
    """
    identity = manifest.get("codec")
    if not isinstance(identity, Mapping) or not isinstance(identity.get("codec"), str):
        raise DataError(
            f"The manifest must name its codec, but holds {identity!r}; make the data again with "
            "tools/preprocess_video.py."
        )
    if identity["codec"] != PATCH:
        if codec_folder is None:
            raise ConfigError(
                f"The latents were made with the VAE {identity['codec']}, so decoding needs its "
                "local folder; give it as `--codec`."
            )
        codec = build_codec(CodecConfig(codec_folder, **tiles), device, seed)
        facts = manifest.get("latents", codec.facts)
        # The numbers that normalize latents may be defaults of another version of diffusers.
        if differing := compared({**identity, **facts}, {**codec.identity, **codec.facts}):
            raise DataError(
                f"The latents were not made with the VAE of `--codec` ({codec_folder}): "
                f"{differing}; give the folder of the VAE that preprocessed them."
            )
        return codec
    if codec_folder is not None:
        raise ConfigError.about(
            "--codec",
            codec_folder,
            f"has no effect: the latents were made with the codec `{PATCH}`, which has no weights",
            "leave it out",
        )
    try:
        return PatchCodec(CodecConfig(**identity))
    except (TypeError, ConfigError) as error:
        raise DataError(
            f"The manifest's codec ({dict(identity)}) cannot be used ({error}); make the data "
            "again with tools/preprocess_video.py."
        ) from None


OVERLAP = 9
"""How many of the latent frames before a part are decoded again, for a VAE without a cache."""

BlockDecoder = Callable[[Tensor], Tensor]
"""A function from the next latents ``[b, c, t, h, w]`` of b videos to pixels ``[b, 3, f, H, W]``.

The first call returns f = ``(t - 1) * temporal + 1`` frames, later calls ``t * temporal``, where
``temporal`` is that of the codec. Latents with another number of channels than the codec's raise
DataError.
"""


def block_decoder(codec: VideoCodec) -> BlockDecoder:
    """Return a new `BlockDecoder` for one batch of videos, which it decodes from the beginning on.

    Decoding is exact for the patch codec and for Wan's VAE, and approximate for other VAEs.
    """
    if isinstance(codec, PatchCodec):
        # The codec decodes the first frame of a call to a single frame. One frame of overlap
        # prevents that for all but the first frame of the video.
        return OverlapDecoder(codec, overlap=1)
    if isinstance(codec, DiffusersCodec) and type(codec.vae).__name__ == WAN:
        return TiledDecoder(codec)
    return OverlapDecoder(codec)


class OverlapDecoder:
    """Decodes a video part by part, each part together with latent frames before it.

    The ``overlap`` latent frames before a part, at least 1, are decoded again, and the pixels that
    they give are dropped.
    """

    def __init__(self, codec: VideoCodec, overlap: int = OVERLAP) -> None:
        self._codec = codec
        self._overlap = overlap
        self._before: Tensor | None = None

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        self._codec.check_channels(latents)
        before = self._before
        num_new = latents.size(2)
        joined = latents if before is None else torch.cat([before, latents], dim=2)
        self._before = joined[:, :, -self._overlap :].clone()
        pixels = self._codec.decode(joined)
        return pixels if before is None else pixels[:, :, -num_new * self._codec.temporal :]


class TiledDecoder:
    """Decodes a video part by part with Wan's VAE, on the tiles of ``--codec-tile`` if given.

    Each tile has a cache of its own.
    """

    def __init__(self, codec: DiffusersCodec) -> None:
        self._codec = codec
        self._decoders: dict[int, FeatureCacheDecoder] = {}

    def __call__(self, latents: Tensor) -> Tensor:
        self._codec.check_channels(latents)
        return self._codec.over_tiles(self._decoded, latents, decodes=True)

    def _decoded(self, latents: Tensor, tile: int) -> Tensor:
        if tile not in self._decoders:
            self._decoders[tile] = FeatureCacheDecoder(self._codec)
        return self._decoders[tile](latents)


class FeatureCacheDecoder:
    """Decodes one video, latent frame by latent frame, with diffusers' Wan VAE and its cache.

    The cache holds the features of earlier frames. It is kept in this object, not in the VAE, so
    other code may use the VAE between two calls.
    """

    def __init__(self, codec: DiffusersCodec) -> None:
        self._codec = codec
        self._vae = codec.vae
        self._vae.clear_cache()
        # The VAE makes a new list whenever it is used elsewhere, so this list stays ours.
        self._features = self._vae._feat_map
        # Only versions of diffusers with Wan 2.2 have this parameter.
        takes_first = "first_chunk" in inspect.signature(self._vae.decoder.forward).parameters
        self._first: dict[str, bool] = {"first_chunk": True} if takes_first else {}

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        self._codec.check_channels(latents)
        entering = self._vae.post_quant_conv(self._codec.raw(latents))
        frames = []
        cache = self._features
        for frame in entering.split(1, dim=2):
            frames.append(self._vae.decoder(frame, feat_cache=cache, feat_idx=[0], **self._first))
            self._first = {}
        pixels = torch.cat(frames, dim=2)
        patch = self._vae.config.get("patch_size")
        if patch is not None:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            pixels = unpatchify(pixels, patch_size=patch)
        return pixels.float().clamp(-1, 1)
