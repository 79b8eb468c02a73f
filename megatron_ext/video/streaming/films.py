"""Long videos of a run's captions, by all its ranks together, block by block into mp4 files."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from megatron_ext.video.data.codecs import block_decoder
from megatron_ext.video.model.wan.recache import recache
from megatron_ext.video.sampling.clips import open_folder, publish
from megatron_ext.video.sampling.films import Film, FilmWriter, describe_films
from megatron_ext.video.streaming import options as draws
from megatron_ext.video.streaming.config import DEFAULT_FPS
from megatron_ext.video.streaming.configuration import film_requests, noise_of
from megatron_ext.video.streaming.generate import Scene, generate_blocks
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator

if TYPE_CHECKING:
    from megatron_ext.optim.ema import ShardedEMA
    from megatron_ext.train.run import Run
    from megatron_ext.video.data.codec import VideoCodec

Encode = Callable[[Sequence[str]], Tensor]
"""Embeddings ``[n, l, d]`` of captions; all ranks call it together."""
Progress = Callable[["Pace"], None]
"""Told how far a replica is, after each block."""


@dataclass
class Pace:
    """How fast videos came about, from the first noise to pixels in a file.

    Attributes:
        videos: whole ones.
        blocks: frame blocks of all of them.
        frames: in pixels, of all videos.
        seconds: for all of that.
        first_block: seconds until the first block of the first video was written.
    """

    videos: int = 0
    blocks: int = 0
    frames: int = 0
    seconds: float = 0.0
    first_block: float = 0.0


class FilmMaker:
    """Makes the videos of a run's captions; all ranks build and call it together.

    It holds nothing that training uses but the weights, which it reads, and draws from none of its
    streams of random numbers; networks of streaming runs have no dropout.

    Args:
        run: whose generator makes them.
        encode: see `Encode`; called once.
        build_codec: called on the first rank of each replica, which decodes and writes.

    Raises:
        ConfigError, DataError: captions or a codec of no use; on all ranks alike.
    """

    def __init__(self, run: Run, encode: Encode, build_codec: Callable[[], VideoCodec]) -> None:
        config, context = run.config, run.context
        self._run, self._requests = run, film_requests(config)
        captions = [
            [request.text, *(switch.text for switch in request.switches)]
            for request in self._requests
        ]
        encoded = encode([caption for some in captions for caption in some])
        self._texts = torch.split(encoded.cpu(), [len(some) for some in captions])
        # A VAE draws random weights before it loads its own.
        with torch.random.fork_rng(devices=[]):
            self._codec = on_first_of_replica(build_codec, "Loading the codec", context)
        self._num_frames = config.streaming_sample.num_frames(config.streaming)
        self._fps = config.sample.sample_fps or DEFAULT_FPS

    @property
    def num_blocks(self) -> int:
        """Frame blocks of all videos of this replica."""
        per_video = self._num_frames // self._run.config.streaming.frame_block
        return per_video * sum(map(len, self._batches()))

    def __call__(self, folder: Path, progress: Progress | None = None) -> Pace:
        """Make the videos and write them into a folder, which is whole or not there.

        The averaged weights make them, where the run keeps them and ``--sample-ema`` is on.

        Args:
            folder: to be made.
            progress: see `Progress`; called on the first rank of the first replica.

        Returns:
            The pace of all replicas together: their sums, and the slowest's seconds.

        Raises:
            NotFiniteError: a video is not finite; on all ranks.
            MegatronExtError: the files cannot be written; on all ranks.
        """
        run, context = self._run, self._run.context
        clock = _Clock(progress if context.dp_rank == 0 else None)
        on_reporting_rank(lambda: open_folder(folder), f"Opening {folder}", context)
        writing = folder.with_name(f".{folder.name}.writing")
        ema = run.ema if run.config.sample.sample_ema else None
        films, fault = list[Film](), None
        try:
            with run.parameter_gather.paused(), self._weights(ema):
                for numbers in self._batches():
                    films += self._film(numbers, writing, clock)
        except MegatronExtError as error:
            fault = error
        facts = {"iteration": run.progress.iteration, "averaged_weights": ema is not None}
        try:
            parts = from_all_ranks((films, clock.pace), fault)
            made = [film for some, _ in parts for film in some]
            publish_all = functools.partial(self._publish, writing, folder, made, facts)
            on_reporting_rank(publish_all, f"Writing videos into {folder}", context)
        finally:
            if context.is_reporting_rank:
                shutil.rmtree(writing, ignore_errors=True)
        return _together([pace for _, pace in parts])

    def _weights(self, ema: ShardedEMA | None) -> AbstractContextManager[None]:
        return ema.swapped_in(self._run.chunks) if ema else nullcontext()

    def _batches(self) -> Iterator[list[int]]:
        """Numbers of the requests that this replica makes at a time: all switch together."""
        context, size = self._run.context, self._run.config.sample.sample_batch_size
        replicas = context.layout.data_parallel_size
        own = range(context.dp_rank, len(self._requests), replicas)

        def frames(number: int) -> tuple[int, ...]:
            return self._requests[number].frames

        for _, group in groupby(sorted(own, key=frames), key=frames):
            alike = list(group)
            yield from (alike[i : i + size] for i in range(0, len(alike), size))

    def _film(self, numbers: list[int], writing: Path, clock: _Clock) -> list[Film]:
        """Make a batch of videos; gives them on the rank that writes."""
        context, what = self._run.context, f"Writing into {writing}"
        open_files = functools.partial(self._writer, writing, numbers)
        writer = on_first_of_this_replica(open_files, what, context)
        try:
            for _, latents in self._blocks(numbers):
                append = functools.partial(_append, writer, latents, clock)
                on_first_of_this_replica(append, what, context)
            films = on_first_of_this_replica(lambda: _finished(writer), what, context)
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        clock.pace.videos += len(films or ())
        return films or []

    def _writer(self, writing: Path, numbers: Sequence[int]) -> FilmWriter:
        assert self._codec is not None
        return FilmWriter(
            writing,
            numbers,
            block_decoder(self._codec),
            num_frames=(self._num_frames - 1) * self._codec.temporal + 1,
            fps=self._fps,
        )

    def _blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Blocks of a batch, ``[b, block, c, h, w]`` float32, with a cache of their own."""
        run, streaming = self._run, self._run.config.streaming
        height, width = streaming.latent_size
        (network,) = unwrap_model(run.chunks)
        generator = Generator(
            run.chunks[0],
            network.new_cache(len(numbers), height, width),
            NoiseSchedule(noise_of(streaming)),
        )
        noise = functools.partial(
            draws.block_noise,
            run.config.sample.sample_seed,
            numbers,
            (streaming.frame_block, network.sizes.channels, height, width),
            like=torch.empty(0, device=run.device),
        )
        frames = (0, *self._requests[numbers[0]].frames)
        texts = [self._texts[number].to(run.device) for number in numbers]
        scenes = [
            Scene(frame, torch.stack([text[i] for text in texts])) for i, frame in enumerate(frames)
        ]
        keep_sink = streaming.sink_at_switch == "keep"
        return generate_blocks(
            generator, recache, scenes, noise, num_frames=self._num_frames, keep_sink=keep_sink
        )

    def _publish(
        self, writing: Path, folder: Path, films: Sequence[Film], facts: Mapping[str, Any]
    ) -> None:
        describe_films(
            writing,
            films,
            self._requests,
            fps=self._fps,
            seed=self._run.config.sample.sample_seed,
            facts={"latent_frames": self._num_frames, **facts},
        )
        publish(writing, folder)


class _Clock:
    """Keeps the pace of a replica, and tells of it."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._begun = progress, time.perf_counter()
        self.pace = Pace()

    def count(self, videos: int, frames: int) -> None:
        """A block of so many videos is in their files, with so many frames in pixels each."""
        pace = self.pace
        pace.blocks += videos
        pace.frames += videos * frames
        pace.seconds = time.perf_counter() - self._begun
        pace.first_block = pace.first_block or pace.seconds
        if self._progress is not None:
            self._progress(pace)


def _append(writer: FilmWriter | None, latents: Tensor, clock: _Clock) -> None:
    assert writer is not None
    before = writer.num_frames
    writer.append(latents)
    clock.count(latents.size(0), writer.num_frames - before)


def _finished(writer: FilmWriter | None) -> list[Film]:
    assert writer is not None
    return writer.finish()


def _together(paces: Sequence[Pace]) -> Pace:
    """Of all ranks; only those that write have counted."""
    return Pace(
        videos=sum(pace.videos for pace in paces),
        blocks=sum(pace.blocks for pace in paces),
        frames=sum(pace.frames for pace in paces),
        seconds=max(pace.seconds for pace in paces),
        first_block=max(pace.first_block for pace in paces),
    )
