"""Sample long videos with a run's generator, block by block into mp4 files.

All ranks work together. Files grow while they are made, so that memory does not grow with them.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.errors import MegatronExtError
from megatron_ext.parallel.collectives import (
    from_all_ranks,
    on_first_of_replica,
    on_first_of_this_replica,
    on_reporting_rank,
)
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.data.codecs import block_decoder
from megatron_ext.video.model.wan.recache import recache
from megatron_ext.video.sampling.clips import describe, open_folder, publish
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import DEFAULT_FPS, StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.generate import Scene, generate_blocks
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator
from megatron_ext.video.streaming.video_files import LongVideoWriter, WrittenVideo
from megatron_ext.video.streaming.video_prompts import video_prompts

if TYPE_CHECKING:
    from megatron_ext.optim.ema import ShardedEMA
    from megatron_ext.train.run import Run
    from megatron_ext.video.data.codec import VideoCodec

Encode = Callable[[Sequence[str]], Tensor]
"""Gives embeddings ``[n, l, d]`` of captions; all ranks call it together."""


@dataclass
class Throughput:
    """How fast videos are sampled, from the first noise to pixels in a file.

    Attributes:
        videos: whole videos.
        blocks: frame blocks of all videos.
        frames: frames of all videos, in pixels.
        seconds: time for all of that.
        first_block: seconds until the first block of the first video was written.
    """

    videos: int = 0
    blocks: int = 0
    frames: int = 0
    seconds: float = 0.0
    first_block: float = 0.0


Progress = Callable[[Throughput], None]
"""Gets the throughput of a replica so far, after each block."""


class LongVideoSampler:
    """Samples the videos of a run's prompts; all ranks build and call it together.

    It holds nothing that training uses but the weights, which it reads, and draws from none of its
    streams of random numbers; networks of streaming runs have no dropout.

    Args:
        run: its generator makes the videos.
        encode: see `Encode`; called once.
        build_codec: called on the first rank of each replica, which decodes and writes.

    Raises:
        ConfigError, DataError: prompts or a codec of no use; on all ranks alike.
    """

    def __init__(self, run: Run, encode: Encode, build_codec: Callable[[], VideoCodec]) -> None:
        config, context = run.config, run.context
        self._run, self._streaming = run, config.section(StreamingConfig)
        self._prompts = video_prompts(
            config.section(SampleConfig),
            config.section(StreamingSampleConfig),
            config.section(StreamingConfig),
        )
        captions = [
            [prompt.text, *(switch.text for switch in prompt.switches)] for prompt in self._prompts
        ]
        encoded = encode([caption for some in captions for caption in some])
        self._texts = torch.split(encoded.cpu(), [len(some) for some in captions])
        # A VAE draws random weights before it loads its own.
        with torch.random.fork_rng(devices=[]):
            self._codec = on_first_of_replica(build_codec, "Loading the codec", context)
        self._num_frames = config.section(StreamingSampleConfig).num_frames(
            config.section(StreamingConfig)
        )
        self._fps = config.section(SampleConfig).sample_fps or DEFAULT_FPS

    @property
    def num_blocks(self) -> int:
        """Return the frame blocks of all videos of this replica."""
        per_video = self._num_frames // self._streaming.frame_block
        return per_video * sum(map(len, self._batches()))

    def __call__(self, folder: Path, progress: Progress | None = None) -> Throughput:
        """Sample the videos and write them into a folder, which is whole or not there.

        The averaged weights make them, where the run keeps them and ``--sample-ema`` is on.

        Args:
            folder: the folder to make.
            progress: called on the first rank of the first replica.

        Returns:
            The throughput of all replicas together: their sums, and the slowest's seconds.

        Raises:
            NotFiniteError: a video is not finite; on all ranks.
            MegatronExtError: the files cannot be written; on all ranks.
        """
        run, context, sample = self._run, self._run.context, self._run.config.section(SampleConfig)
        timer = _Timer(progress if context.dp_rank == 0 else None)
        on_reporting_rank(lambda: open_folder(folder), f"Opening {folder}", context)
        writing = folder.with_name(f".{folder.name}.writing")
        ema = run.ema if sample.sample_ema else None
        videos, fault = list[WrittenVideo](), None
        try:
            with run.parameter_gather.paused(), self._weights(ema):
                for numbers in self._batches():
                    videos += self._sample(numbers, writing, timer)
        except MegatronExtError as error:
            fault = error
        facts = {
            "latent_frames": self._num_frames,
            "iteration": run.progress.iteration,
            "averaged_weights": ema is not None,
        }
        try:
            parts = from_all_ranks((videos, timer.throughput), fault)

            def publish_all() -> None:
                made = sorted((v for some, _ in parts for v in some), key=lambda v: v.number)
                describe(
                    writing,
                    self._prompts,
                    [prompt.title for prompt in self._prompts],
                    [video.shown for video in made],
                    num_frames=[video.num_frames for video in made],
                    fps=self._fps,
                    seed=sample.sample_seed,
                    facts=facts,
                )
                publish(writing, folder)

            on_reporting_rank(publish_all, f"Writing videos into {folder}", context)
        finally:
            if context.is_reporting_rank:
                shutil.rmtree(writing, ignore_errors=True)
        return _total([throughput for _, throughput in parts])

    def _weights(self, ema: ShardedEMA | None) -> AbstractContextManager[None]:
        return ema.swapped_in(self._run.chunks) if ema else nullcontext()

    def _batches(self) -> Iterator[list[int]]:
        """Give the numbers of the prompts that this replica samples at a time.

        All prompts of a batch switch at the same frames.
        """
        context, size = self._run.context, self._run.config.section(SampleConfig).sample_batch_size
        replicas = context.layout.data_parallel_size
        own = range(context.dp_rank, len(self._prompts), replicas)

        def frames(number: int) -> tuple[int, ...]:
            return self._prompts[number].frames

        for _, group in groupby(sorted(own, key=frames), key=frames):
            alike = list(group)
            yield from (alike[i : i + size] for i in range(0, len(alike), size))

    def _sample(self, numbers: list[int], writing: Path, timer: _Timer) -> list[WrittenVideo]:
        """Sample a batch of videos; return them on the rank that writes."""
        context, what = self._run.context, f"Writing into {writing}"
        open_files = functools.partial(self._writer, writing, numbers)
        writer = on_first_of_this_replica(open_files, what, context)
        try:
            for _, latents in self._blocks(numbers):
                append = functools.partial(_append, writer, latents, timer)
                on_first_of_this_replica(append, what, context)
            videos = on_first_of_this_replica(lambda: _finished(writer), what, context) or []
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        timer.throughput.videos += len(videos)
        return videos

    def _writer(self, writing: Path, numbers: Sequence[int]) -> LongVideoWriter:
        assert self._codec is not None
        return LongVideoWriter(
            writing,
            numbers,
            block_decoder(self._codec),
            num_frames=(self._num_frames - 1) * self._codec.temporal + 1,
            fps=self._fps,
        )

    def _blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Generate a batch with a cache of its own; give blocks ``[b, block, c, h, w]`` float32."""
        run, streaming = self._run, self._streaming
        height, width = streaming.latent_size
        (network,) = unwrap_model(run.chunks)
        cache = network.new_cache(len(numbers), height, width)
        noise = functools.partial(
            decisions.block_noise,
            run.config.section(SampleConfig).sample_seed,
            numbers,
            (streaming.frame_block, network.sizes.channels, height, width),
            like=torch.empty(0, device=run.device),
        )
        frames = (0, *self._prompts[numbers[0]].frames)
        texts = [self._texts[number].to(run.device) for number in numbers]
        scenes = [
            Scene(frame, torch.stack([text[i] for text in texts])) for i, frame in enumerate(frames)
        ]
        return generate_blocks(
            Generator(run.chunks[0], cache, NoiseSchedule(streaming)),
            recache,
            scenes,
            noise,
            num_frames=self._num_frames,
            keep_sink=streaming.sink_at_switch == "keep",
        )


class _Timer:
    """Measures the throughput of a replica and reports its progress."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._start = progress, time.perf_counter()
        self.throughput = Throughput()

    def count(self, videos: int, frames: int) -> None:
        """Count a block of some videos, with so many frames in pixels each."""
        seen = self.throughput
        seen.blocks += videos
        seen.frames += videos * frames
        seen.seconds = time.perf_counter() - self._start
        seen.first_block = seen.first_block or seen.seconds
        if self._progress is not None:
            self._progress(seen)


def _append(writer: LongVideoWriter | None, latents: Tensor, timer: _Timer) -> None:
    assert writer is not None
    before = writer.num_frames
    writer.append(latents)
    timer.count(latents.size(0), writer.num_frames - before)


def _finished(writer: LongVideoWriter | None) -> list[WrittenVideo]:
    assert writer is not None
    return writer.finish()


def _total(parts: Sequence[Throughput]) -> Throughput:
    """Add up the throughput of all ranks; only those that write have counted."""
    return Throughput(
        videos=sum(part.videos for part in parts),
        blocks=sum(part.blocks for part in parts),
        frames=sum(part.frames for part in parts),
        seconds=max(part.seconds for part in parts),
        first_block=max(part.first_block for part in parts),
    )
