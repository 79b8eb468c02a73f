"""Samples long videos with a run's generator, and writes them block by block into mp4 files.

All ranks work together. Frames are written to the files as soon as they are generated, so the
memory does not grow with the length of videos.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.parallel.collectives import (
    from_all_ranks,
    on_first_of_replica,
    on_first_of_this_replica,
    on_reporting_rank,
    share,
)
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.data.codecs import block_decoder
from megatron_ext.video.sampling.clips import (
    clip_name,
    describe,
    open_folder,
    publish,
    shown_frames,
)
from megatron_ext.video.sampling.mp4 import Mp4Writer, as_bytes
from megatron_ext.video.sampling.samples import facts_of_weights, report_average_start
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import DEFAULT_FPS, StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.prompts import given_block, video_prompts
from megatron_ext.video.streaming.rollout import Generator, generate_blocks

if TYPE_CHECKING:
    from megatron_ext.train.run import Run
    from megatron_ext.video.data.codec import VideoCodec

Encode = Callable[[Sequence[str]], Tensor]
"""A function from n captions to their embeddings ``[n, l, d]``; all ranks call it together."""


class NotFiniteError(DataError):
    """Raised for a video that holds values that are not finite."""


@dataclass(frozen=True)
class WrittenVideo:
    """A video that has been written to a file.

    Attributes:
        number: index of the video's prompt among all prompts.
        shown: still frames for the contact sheet, ``[k, H, W, 3]``.
    """

    number: int
    num_frames: int
    shown: NDArray[np.uint8]


class LongVideoWriter:
    """Writes a batch of videos, some frames at a time; call `finish` or `abandon` at the end.

    Args:
        numbers: index of each video's prompt, which becomes part of the file's name.
        decoder: a function that decodes the next latents ``[b, c, t, h, w]`` of the videos to
            pixels ``[b, 3, f, H, W]``.
        num_frames: number of decoded frames that each video will have when it is finished.

    Attributes:
        num_frames: number of decoded frames of each video that have been written so far, unlike the
            argument of the same name.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(
        self,
        folder: Path,
        numbers: Sequence[int],
        decoder: Callable[[Tensor], Tensor],
        *,
        num_frames: int,
        fps: float,
    ) -> None:
        self._numbers = numbers
        self._decoder = decoder
        self._shown = set(shown_frames(num_frames).tolist())
        self._stills: list[NDArray[np.uint8]] = []
        self._files = [Mp4Writer(folder / clip_name(n), fps, growing=True) for n in numbers]
        self.num_frames = 0

    def append(self, latents: Tensor) -> None:
        """Decode and write the next latents ``[b, t, c, h, w]``.

        Raises:
            NotFiniteError: a value is not finite.
        """
        pixels = self._decoder(latents.float().transpose(1, 2))
        if not bool(pixels.isfinite().all()):
            raise NotFiniteError(
                "Sampled videos hold values that are not finite, so nothing was written; look "
                "whether the training diverged."
            )
        frames = as_bytes(pixels)
        for file, clip in zip(self._files, frames, strict=True):
            file.append(clip)
        for i in range(frames.shape[1]):
            if self.num_frames + i in self._shown:
                self._stills.append(frames[:, i].copy())
        self.num_frames += frames.shape[1]

    def abandon(self) -> None:
        """Close the files without finishing the videos, after an error."""
        for file in self._files:
            file.abandon()

    def finish(self) -> list[WrittenVideo]:
        """Finish and close the files; return the videos."""
        for file in self._files:
            file.close()
        stills = np.stack(self._stills, axis=1)
        return [
            WrittenVideo(number, self.num_frames, shown)
            for number, shown in zip(self._numbers, stills, strict=True)
        ]


@dataclass
class Throughput:
    """The amount of video written so far, and the seconds that it took.

    Attributes:
        videos: number of finished videos.
        blocks, frames: number of frame blocks and of decoded frames, summed over all videos.
        seconds: seconds from the start of sampling until the latest block was written.
        first_block: seconds from the start of sampling until the first block was written.
    """

    videos: int = 0
    blocks: int = 0
    frames: int = 0
    seconds: float = 0.0
    first_block: float = 0.0


Progress = Callable[[Throughput], None]
"""A function called after each frame block with the first replica's throughput so far."""


class LongVideoSampler:
    """Samples the videos of a run's prompts; all ranks build and call it together.

    The run's random states do not change: networks have no dropout, and noise has its own seed.

    Args:
        encode: a function that encodes all captions; it is called once.
        build_codec: a function that builds the codec; it is called on the first rank of each
            replica, which decodes and writes.

    Attributes:
        num_frames: number of latent frames of each video.

    Raises:
        ConfigError, DataError: the prompts or the codec cannot be used (raised on all ranks).
    """

    def __init__(self, run: Run, encode: Encode, build_codec: Callable[[], VideoCodec]) -> None:
        config = run.config
        self._run = run
        self._streaming = config.section(StreamingConfig)
        self._sample = config.section(SampleConfig)
        own = config.section(StreamingSampleConfig)
        self._prompts = video_prompts(self._sample, own, self._streaming)
        captions = [[prompt.text, *(s.text for s in prompt.switches)] for prompt in self._prompts]
        encoded = encode([caption for some in captions for caption in some])
        self._texts = torch.split(encoded.cpu(), [len(some) for some in captions])
        # Building a VAE draws random weights before it loads its own: keep the random state.
        with torch.random.fork_rng(devices=[]):
            self._codec = on_first_of_replica(build_codec, "Loading the codec", run.context)
        self._starts = self._encoded_starts()
        self.num_frames = own.num_frames(self._streaming)
        self._fps = self._sample.sample_fps or DEFAULT_FPS

    def _encoded_starts(self) -> dict[int, Tensor]:
        """Return the encoded first block ``[1, t, c, h, w]`` of each prompt that gives one.

        The keys are the indices of the prompts.
        """
        paths = {i: x.start for i, x in enumerate(self._prompts) if x.start is not None}
        if not paths:
            return {}
        streaming = self._streaming
        context = self._run.context
        device = self._run.device
        frames = streaming.blocks.first
        size = streaming.latent_size

        def encode() -> Tensor:
            assert self._codec is not None
            encoded = functools.partial(
                given_block, self._codec, frames=frames, size=size, device=device
            )
            return torch.cat([encoded(path=path) for path in paths.values()]).float()

        starts = on_first_of_replica(encode, "Encoding given frames", context)
        shape = len(paths), frames, streaming.sizes().channels, *size
        every = share(starts, shape, context, device).cpu()
        return dict(zip(paths, torch.split(every, 1), strict=True))

    @property
    def num_blocks(self) -> int:
        """Return the number of frame blocks of all videos that this replica samples."""
        per_video = self._streaming.blocks.count(self.num_frames)
        return per_video * sum(map(len, self._batches()))

    def __call__(self, folder: Path, progress: Progress | None = None) -> Throughput:
        """Sample the videos and write them into ``folder``, which appears when all are written.

        Averaged weights are used if the run keeps them and ``--sample-ema`` is on. ``progress`` is
        called after each block, on the first rank of the first replica.

        Returns:
            The throughput of all replicas: counts are sums, times are those of the slowest replica.

        Raises:
            NotFiniteError: a video has values that are not finite (raised on all ranks).
            MegatronExtError: the files cannot be written (raised on all ranks).
        """
        run = self._run
        context = self._run.context
        timer = _Timer(progress if context.dp_rank == 0 else None)
        on_reporting_rank(lambda: open_folder(folder), f"Opening {folder}", context)
        writing = folder.with_name(f".{folder.name}.writing")
        ema = run.ema if self._sample.sample_ema else None
        if ema is not None:
            report_average_start(run)
        weights = ema.swapped_in(run.chunks) if ema else nullcontext()
        videos = list[WrittenVideo]()
        fault = None
        try:
            with run.parameter_gather.paused(), weights:
                for numbers in self._batches():
                    videos += self._sample_batch(numbers, writing, timer)
        except MegatronExtError as error:
            fault = error
        facts = {
            "seed": self._sample.sample_seed,
            "fps": self._fps,
            "latent_frames": self.num_frames,
            **facts_of_weights(run, averaged=ema is not None),
        }
        try:
            parts = from_all_ranks((videos, timer.throughput), fault)

            def publish_all() -> None:
                made = sorted((v for some, _ in parts for v in some), key=lambda v: v.number)
                stills = np.stack([video.shown for video in made])
                describe(writing, self._prompts, stills, num_frames=made[0].num_frames, facts=facts)
                publish(writing, folder)

            on_reporting_rank(publish_all, f"Writing videos into {folder}", context)
        finally:
            if context.is_reporting_rank:
                shutil.rmtree(writing, ignore_errors=True)
        # Ranks that write no videos have counts of 0.
        counted = [astuple(throughput) for _, throughput in parts]
        made, blocks, frames, seconds, first = zip(*counted, strict=True)
        return Throughput(sum(made), sum(blocks), sum(frames), max(seconds), max(first))

    def _batches(self) -> Iterator[list[int]]:
        """Yield the indices of this replica's prompts, in batches.

        All prompts of a batch switch at the same frames, and either all or none give a first block.
        """
        context = self._run.context
        size = self._sample.sample_batch_size
        own = range(context.dp_rank, len(self._prompts), context.layout.data_parallel_size)

        def course(number: int) -> tuple[bool, tuple[int, ...]]:
            return number in self._starts, self._prompts[number].frames

        for _, group in groupby(sorted(own, key=course), key=course):
            alike = list(group)
            yield from (alike[i : i + size] for i in range(0, len(alike), size))

    def _sample_batch(self, numbers: list[int], writing: Path, timer: _Timer) -> list[WrittenVideo]:
        """Sample the prompts ``numbers`` and write the videos into the folder ``writing``.

        Returns the videos on the first rank of the replica, which writes them; elsewhere [].
        """
        context = self._run.context
        what = f"Writing into {writing}"
        writer: LongVideoWriter | None = None

        def open_files() -> LongVideoWriter:
            assert self._codec is not None
            decoder = block_decoder(self._codec)
            pixels = (self.num_frames - 1) * self._codec.temporal + 1
            return LongVideoWriter(writing, numbers, decoder, num_frames=pixels, fps=self._fps)

        def append(latents: Tensor) -> None:
            assert writer is not None
            before = writer.num_frames
            writer.append(latents)
            timer.count(latents.size(0), writer.num_frames - before)

        def finish() -> list[WrittenVideo]:
            return writer.finish() if writer is not None else []

        writer = on_first_of_this_replica(open_files, what, context)
        try:
            for latents in self._blocks(numbers):
                on_first_of_this_replica(functools.partial(append, latents), what, context)
            videos = on_first_of_this_replica(finish, what, context) or []
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        timer.throughput.videos += len(videos)
        return videos

    def _blocks(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Generate the videos of a batch with a new cache; yield their blocks.

        A block is ``[b, t, c, h, w]`` float32.
        """
        run = self._run
        streaming = self._streaming
        height, width = streaming.latent_size
        (network,) = unwrap_model(run.chunks)
        frame_shape = network.sizes.channels, height, width
        like = torch.empty(0, device=run.device)
        given = [(number, self._prompts[number].seed) for number in numbers]
        # If a prompt has its own seed, the video must not depend on the prompt's number.
        draws = [(self._sample.sample_seed, n) if seed is None else (seed, 0) for n, seed in given]

        def noise(frame: int, step: int) -> Tensor:
            shape = streaming.blocks.size_of(frame), *frame_shape
            rows = [decisions.block_noise(s, [n], shape, frame, step, like=like) for s, n in draws]
            return torch.cat(rows)

        starts = [self._starts[number] for number in numbers if number in self._starts]
        frames = (0, *self._prompts[numbers[0]].frames)
        texts = [self._texts[number].to(run.device) for number in numbers]
        cache = network.new_cache(len(numbers), height, width)
        return generate_blocks(
            Generator(run.chunks[0], cache, NoiseSchedule(streaming)),
            {frame: torch.stack([text[i] for text in texts]) for i, frame in enumerate(frames)},
            noise,
            num_frames=self.num_frames,
            keep_sink=streaming.sink_at_switch == "keep",
            start=torch.cat(starts).to(run.device) if starts else None,
        )


class _Timer:
    """Measures a replica's throughput, and calls ``progress``, if any, with it after each block."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._start = time.perf_counter()
        self.throughput = Throughput()

    def count(self, videos: int, frames: int) -> None:
        """Count one block of each of ``videos`` videos; a block has ``frames`` decoded frames."""
        seen = self.throughput
        seen.blocks += videos
        seen.frames += videos * frames
        seen.seconds = time.perf_counter() - self._start
        seen.first_block = seen.first_block or seen.seconds
        if self._progress is not None:
            self._progress(seen)
