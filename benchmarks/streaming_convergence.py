"""Distribution matching on a teacher whose score is known: how near the generator gets.

The teacher is a mixture of two Gaussians, in each frame for itself; the truth is samples of it.
Generator (causal video DiT with its KV cache) and critic (its bidirectional twin) are trained as
streaming long-tuning does: sequences that grow chunk by chunk with overlap, two-phase rollouts, the
losses of distribution matching, and five critic steps for one of the generator. What is measured is
the average of the generator's weights: whole sequences with all denoising steps, and the sliced
Wasserstein distance of their frames to as many samples of the teacher. Two sets of the teacher's
samples are not at distance 0 either; theirs is the floor.

    python benchmarks/streaming_convergence.py [--steps 300] [--save]

With --save a plot is written too: the distance over the steps, and the frames before and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.streaming_setup import (
    SEED,
    build_network,
    heading,
    one_rank,
    saved_as,
    show,
    table_head,
    table_row,
)
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.cache import KVCache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.model import VideoDiT
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.decisions import passes
from megatron_ext.video.streaming.loss import (
    Scores,
    critic_clip_loss,
    generator_direction,
    generator_losses,
    noised_clip,
)
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator
from megatron_ext.video.streaming.sequence import Prompts, Replica, StreamingSequence
from tests.video.streaming.analytic import MixtureTeacher, sliced_wasserstein

OPTIONS = StreamingConfig(
    frame_block=2,
    chunk_frames=4,
    min_new_frames=2,
    max_new_frames=2,
    sequence_lengths=(12,),
    recache_frames=4,
    switches=False,
)
"""Five chunks a sequence, which with five critic steps for one of the generator does not alias."""
WINDOW = FrameWindow(block=2, window=6, sink=2)
SIZES = VideoDiTSizes(64, 4, 128, 1, channels=2, patch_size=1, text_width=4)
MEANS = torch.tensor([[2.5, 1.0], [0.5, 2.5]]).view(2, 2, 1, 1)
DEVIATION = 0.4
CLIP = 10.0


@dataclass(frozen=True)
class Settings:
    """Settings of the training; the betas are LongLive's."""

    batch: int = 64
    generator_lr: float = 1e-3
    critic_lr: float = 3e-3
    average_decay: float = 0.9

    def optimizer(self, network: VideoDiT, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.0, 0.999), weight_decay=0.01)


def no_prompts(samples: Sequence[int]) -> Prompts:
    return Prompts(torch.zeros(len(samples), 1, SIZES.text_width))


class Toy:
    """Generator, its average, critic and teacher, on the device of the rank."""

    def __init__(self, context: ParallelContext, settings: Settings) -> None:
        self.settings, self.schedule = settings, NoiseSchedule(StreamingConfig())
        causal = VideoDiTOptions(window=WINDOW, zero_head=False)
        self.generator, self.average = (build_network(context, SIZES, causal) for _ in range(2))
        bidirectional = VideoDiTOptions(zero_head=False)
        self.critic = build_network(context, SIZES, bidirectional, seed=SEED + 1)
        self.like = next(self.critic.parameters()).new_empty(0, 0, *MEANS.shape[1:])
        self.teacher = MixtureTeacher(MEANS, DEVIATION, self.schedule).to(self.like.device)
        self.sequence = self.sequence_of(self.generator, Replica(SEED, settings.batch), OPTIONS)

    def sequence_of(
        self, network: VideoDiT, replica: Replica, options: StreamingConfig
    ) -> StreamingSequence:
        """Return sequences of a generator."""
        height, width = MEANS.shape[2:]
        cache = network.new_cache(replica.batch, height, width, chunk_frames=options.chunk_frames)
        return StreamingSequence(
            options,
            Generator(network, cache, self.schedule),
            prompts=no_prompts,
            replica=replica,
            like=self.like,
        )

    def train(self, steps: int) -> Iterator[float]:
        """Yield the critic's loss after each step."""
        ours = self.settings.optimizer(self.generator, self.settings.generator_lr)
        theirs = self.settings.optimizer(self.critic, self.settings.critic_lr)
        for step in range(steps):
            loss = 0.0
            for kind in passes(OPTIONS, step):
                if kind == "generator":
                    self._generator_step(ours)
                else:
                    loss = self._critic_step(theirs)
            yield loss

    def _generator_step(self, optimizer: torch.optim.Optimizer) -> None:
        chunk = self.sequence.next_clip(trains_generator=True)
        direction = generator_direction(
            chunk,
            noised_clip(chunk, self.schedule, SEED, "generator"),
            Scores(self.critic, self.teacher, torch.zeros(1, 1, SIZES.text_width)),
        )
        optimizer.zero_grad()
        for total, _, _ in generator_losses(chunk, direction, self.sequence.generator):
            (total / chunk.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), CLIP)
        optimizer.step()
        cache = self.sequence.generator.cache
        assert isinstance(cache, KVCache)
        cache.memo.clear()  # the text's keys and values are those of the old weights
        with torch.no_grad():
            for a, b in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                a.lerp_(b, 1 - self.settings.average_decay)

    def _critic_step(self, optimizer: torch.optim.Optimizer) -> float:
        chunk = self.sequence.next_clip(trains_generator=False)
        noised = noised_clip(chunk, self.schedule, SEED, "critic")
        total, count, _ = critic_clip_loss(chunk, noised, self.critic)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), CLIP)
        optimizer.step()
        return float(total.detach() / count)

    def generated(self, batch: int) -> Tensor:
        """Return frames of whole sequences of the average, ``[n, c, h, w]`` float64 on the CPU."""
        options = dataclasses.replace(OPTIONS, last_step_only=True)
        sequence = self.sequence_of(self.average, Replica(SEED + 1, batch), options)
        frames = []
        while not frames or sequence.can_generate_more:
            chunk = sequence.next_clip(trains_generator=False)
            frames.append(chunk.latents[:, chunk.first_new - chunk.end :].flatten(0, 1))
        return torch.cat(frames).double().cpu()

    def real(self, num_frames: int, seed: int) -> Tensor:
        """Return the teacher's samples, ``[n, c, h, w]`` float64 on the CPU."""
        device = self.like.device
        return self.teacher.sample(num_frames, torch.Generator(device).manual_seed(seed)).cpu()


@dataclass(frozen=True)
class Point:
    """A measurement: step, distance, distance of means, mean critic loss since the last one."""

    steps: int
    distance: float
    of_means: float
    critic_loss: float | None


@dataclass(frozen=True)
class Course:
    """The course of a training.

    Attributes:
        points: from before the first step to after the last.
        floor: distance of two sets of the teacher's samples.
        real: samples of the teacher, ``[n, c, h, w]``.
        before, after: as many frames of the generator before the first step and after the last.
    """

    points: tuple[Point, ...]
    floor: float
    real: Tensor
    before: Tensor
    after: Tensor

    @property
    def fall(self) -> float:
        """Return the share of the first distance that is gone."""
        return 1 - self.points[-1].distance / self.points[0].distance


def distance(a: Tensor, b: Tensor) -> float:
    """Return the sliced Wasserstein distance in directions that are the same each time."""
    return sliced_wasserstein(a, b, torch.Generator().manual_seed(SEED))


def follow(
    context: ParallelContext, settings: Settings, *, steps: int, every: int, batch: int = 256
) -> Course:
    """Train, and measure so often; each line of the table is shown when it is known."""
    toy = Toy(context, settings)
    before = frames = toy.generated(batch)
    real = toy.real(len(frames), SEED)
    losses, since, points = toy.train(steps), list[float](), list[Point]()
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            frames = toy.generated(batch)
            point = Point(
                step,
                distance(frames, real),
                float((frames.mean(0) - MEANS.double().mean(0)).norm()),
                sum(since) / len(since) if since else None,
            )
            points.append(point)
            show([row(point)])
            since.clear()
        if step < steps:
            since.append(next(losses))
    floor = distance(toy.real(len(real), SEED + 1), real)
    return Course(tuple(points), floor, real, before, frames)


def row(point: Point) -> str:
    """Return one line of the table."""
    loss = "" if point.critic_loss is None else f"{point.critic_loss:.3f}"
    return table_row(point.steps, f"{point.distance:.4f}", f"{point.of_means:.4f}", loss)


def plot(course: Course, path: Path) -> None:
    """Draw the distance over the steps, and the frames."""
    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    steps = [point.steps for point in course.points]
    left.plot(steps, [point.distance for point in course.points], marker="o", label="generator")
    left.axhline(course.floor, linestyle="--", color="gray", label="two sets of the teacher's")
    left.set(xlabel="steps", ylabel="sliced Wasserstein distance", ylim=(0, None))
    left.set_title(f"distance falls by {course.fall:.1%}")
    left.legend()
    for name, frames, color in (
        ("teacher", course.real, "gray"),
        ("before", course.before, "tab:orange"),
        ("after", course.after, "tab:blue"),
    ):
        right.scatter(
            *frames.flatten(1)[:1000, :2].T.tolist(), s=4, alpha=0.5, color=color, label=name
        )
    right.set(xlabel="channel 0", ylabel="channel 1", title="frames")
    right.legend()
    figure.savefig(path, bbox_inches="tight", dpi=110)


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it and the plot beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between measurements")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="sequences at a time")
    parser.add_argument("--generator-lr", type=float, default=Settings.generator_lr)
    parser.add_argument("--critic-lr", type=float, default=Settings.critic_lr)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    settings = Settings(args.batch, args.generator_lr, args.critic_lr)
    head = heading("streaming_convergence", argv)
    head += table_head("steps", "distance", "distance of means", "critic loss since")
    show(head)
    with one_rank() as context:
        course = follow(context, settings, steps=args.steps, every=args.every)
    words = f"The distance falls by {course.fall:.1%}; its floor is {course.floor:.4f}."
    show(["", words])
    if args.save:
        picture = saved_as("streaming_convergence", ".png")
        plot(course, picture)
        lines = [*head, *map(row, course.points), "", words, "", f"![plot]({picture.name})"]
        saved_as("streaming_convergence", ".md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
