"""Clips sampled from captions by the model of a run: now and then while it trains, or at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config.video import SampleConfig
from megatron_ext.data.video.codecs import codec_from_manifest
from megatron_ext.data.video.geometry import Bucket
from megatron_ext.data.video.shards import read_json, read_null
from megatron_ext.data.video.text_dropout import Text
from megatron_ext.data.video.text_encoders import text_encoder_from_manifest
from megatron_ext.sampling.clips import write_clips
from megatron_ext.sampling.flow import SamplingConfig
from megatron_ext.sampling.guidance import GuidanceConfig
from megatron_ext.sampling.requests import ClipRequest, EncodedRequests, SampleShape, read_requests
from megatron_ext.training.video.generate import encode_on_reporting_rank, generate_latents
from megatron_ext.training.video.velocity import ParallelVelocity, forward_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config import RunConfig
    from megatron_ext.data.video.codecs import VideoCodec
    from megatron_ext.data.video.text_encoders import TextEncoder
    from megatron_ext.training.setup import Run


def requests_of(config: RunConfig) -> list[ClipRequest]:
    """The captions of ``--sample-prompts``.

    Raises:
        ConfigError, DataError: see `read_requests`.
    """
    assert config.sample.sample_prompts is not None
    return read_requests(config.sample.sample_prompts)


def shape_of(sample: SampleConfig, manifest: Mapping[str, Any]) -> SampleShape:
    """Pixels of the clips: as the flags say, else as the largest bucket of the data."""
    buckets = [Bucket(**entry["shape"]) for entry in manifest["buckets"]]
    largest = max(buckets, key=lambda b: (b.height * b.width, b.num_frames, b))
    height, width = sample.sample_size or (largest.height, largest.width)
    frames = sample.sample_frames or largest.num_frames
    return SampleShape(frames, height, width, sample.sample_fps or int(manifest["fps"]))


def sampling_config(sample: SampleConfig) -> SamplingConfig:
    """Steps and guidance of the flags."""
    guidance = GuidanceConfig(
        text_scale=sample.sample_text_scale,
        image_scale=sample.sample_image_scale,
        oscillate_text=sample.sample_oscillation,
        oscillate_image=sample.sample_oscillation,
        scale_image_by_frame=sample.sample_scale_by_frame,
    )
    return SamplingConfig(num_steps=sample.sample_steps, guidance=guidance)


@dataclass
class Encoders:
    """What turns captions into embeddings and latents into pixels, on the reporting rank."""

    codec: VideoCodec
    text_encoder: TextEncoder


def build_encoders(config: RunConfig, device: torch.device | None = None) -> Encoders:
    """Those that the data was made with.

    Raises:
        ConfigError, DataError: see `codec_from_manifest` and `text_encoder_from_manifest`.
    """
    manifest = _manifest(config)
    return Encoders(
        codec_from_manifest(manifest, device=device),
        text_encoder_from_manifest(manifest, device=device),
    )


def _folder(config: RunConfig) -> Path:
    assert config.video.video_data_path is not None
    return Path(config.video.video_data_path)


def _manifest(config: RunConfig) -> dict[str, Any]:
    return read_json(_folder(config) / "manifest.json")


class ClipSampler:
    """Samples the clips of a run's prompts; all ranks build and call it together.

    Args:
        run: whose model samples.
    """

    def __init__(self, run: Run) -> None:
        config = run.config
        self._run = run
        self._requests = requests_of(config)
        manifest = _manifest(config)
        self._shape = shape_of(config.sample, manifest)
        self._encoders: Encoders | None = None
        if run.context.is_reporting_rank:
            self._encoders = build_encoders(config, run.device)
        self._encoded = self._encode(manifest)
        sizes = config.mmdit.sizes(config.model)
        core = run.runner.transformer_config
        self._velocity = ParallelVelocity(
            run.runner.engine or forward_engine(run.chunks, core, run.context),
            run.chunks,
            run.context,
            patch_size=sizes.patch_size,
            guidance=config.mmdit.guidance if sizes.guidance_embed else None,
        )

    def _encode(self, manifest: Mapping[str, Any]) -> EncodedRequests:
        """Once for all calls; encoders of many gigabytes then leave the GPU but for the codec."""
        encoders = self._encoders
        text, pooled = read_null(_folder(self._run.config), dict(manifest))
        return encode_on_reporting_rank(
            self._requests,
            self._shape,
            encoders.codec if encoders else None,
            encoders.text_encoder if encoders else None,
            self._run.context,
            null=Text(text[None].float(), pooled[None].float()),
            conditions=self._run.config.conditions,
        )

    def __call__(self, folder: Path) -> None:
        """Sample the clips and write them, with the averaged weights where the run keeps them."""
        run, sample = self._run, self._run.config.sample
        averaged = run.ema is not None and sample.sample_ema
        weights = run.ema.swapped_in(run.chunks) if averaged and run.ema else nullcontext()
        with run.parameter_gather.paused(), weights:
            latents = generate_latents(
                self._velocity,
                self._encoded,
                flow=run.config.flow,
                sampling=sampling_config(sample),
                seed=sample.sample_seed,
                context=run.context,
                batch_size=sample.sample_batch_size,
            )
        if latents is None:
            return
        assert self._encoders is not None
        facts = {"iteration": run.progress.iteration, "averaged_weights": averaged}
        write_clips(
            folder,
            decoded(self._encoders.codec, latents, sample.sample_batch_size),
            self._requests,
            fps=self._shape.fps,
            seed=sample.sample_seed,
            facts=facts,
        )
        run.reporters.say(f"sampled {len(self._requests)} clips into {folder}")


@torch.no_grad()
def decoded(codec: VideoCodec, latents: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Pixels ``[P, 3, f, H, W]`` of latents ``[P, c, t, h, w]``, on the CPU."""
    return torch.cat([codec.decode(part).cpu() for part in torch.split(latents, batch_size)])


def sample_while_training(run: Run) -> Callable[[], None] | None:
    """Sample after each multiple of ``--sample-interval``; see `Task.after_step`."""
    sample = run.config.sample
    if sample.sample_interval is None:
        return None
    interval, sampler = sample.sample_interval, ClipSampler(run)
    root = Path(sample.sample_dir or Path(run.config.checkpoint.save or ".") / "samples")

    def after_step() -> None:
        if run.progress.iteration % interval == 0:
            sampler(root / f"iter_{run.progress.iteration:07}")

    return after_step
