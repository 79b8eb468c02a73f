"""Distribution matching on a teacher whose score is known, by a plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.decisions import passes
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.scores import (
    Scores,
    critic_clip_loss,
    generator_direction,
    generator_losses,
    noised_clip,
)
from megatron_ext.video.streaming.sequence import Replica, StreamingSequence
from megatron_ext.video.streaming.state import Prompts
from tests.video.streaming.analytic import MixtureTeacher, sliced_wasserstein
from tests.video.streaming.network import TEXT, TinyDiT, Window, build, network

OPTIONS = StreamingConfig(
    frame_block=2, chunk_frames=4, min_new_frames=2, max_new_frames=2, sequence_lengths=(12,),
    recache_frames=4, switches=False,
)  # fmt: skip
WINDOW = Window(block=2, window=6, sink=2)
SHAPE = (2, 1, 1)
SEED = 3
SCHEDULE = NoiseSchedule(StreamingConfig())


def no_prompts(samples: Sequence[int]) -> Prompts:
    return Prompts(torch.zeros(len(samples), 1, TEXT))


@dataclass
class Toy:
    """Generator and critic of a few layers, and the teacher.

    ``average`` is the generator's exponential moving average over its updates.
    """

    teacher: MixtureTeacher
    batch: int = 64
    layers: int = 1
    width: int = 64
    generator_lr: float = 2e-3
    critic_lr: float = 5e-3
    decay: float = 0.8

    def __post_init__(self) -> None:
        sizes = {"layers": self.layers, "width": self.width, "dtype": torch.float32}
        self.generator, self.average = (network(WINDOW, seed=0, **sizes) for _ in range(2))
        self.critic = network(None, seed=1, **sizes)
        self.sequence = self.sequence_of(self.generator, Replica(SEED, self.batch), OPTIONS)

    @staticmethod
    def sequence_of(
        model: TinyDiT, replica: Replica, options: StreamingConfig
    ) -> StreamingSequence:
        return build(options, window=WINDOW, model=model, replica=replica, shape=SHAPE,
                     dtype=torch.float32, source=no_prompts)  # fmt: skip

    def optimizer(self, model: TinyDiT, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.999), weight_decay=0.01)

    def train(self, steps: int) -> Iterator[float]:
        """Give the critic's loss after each step."""
        ours = self.optimizer(self.generator, self.generator_lr)
        theirs = self.optimizer(self.critic, self.critic_lr)
        for step in range(steps):
            loss = 0.0
            for kind in passes(OPTIONS, step):
                if kind == "generator":
                    self._generator_step(ours)
                else:
                    loss = self._critic_step(theirs)
            yield loss

    def _generator_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip = self.sequence.next_clip(trains_generator=True)
        direction = generator_direction(
            clip,
            noised_clip(clip, SCHEDULE, SEED, "generator"),
            Scores(self.critic, self.teacher, torch.zeros(1, 1, TEXT)),
        )
        optimizer.zero_grad()
        for total, _, _ in generator_losses(clip, direction, self.sequence):
            (total / clip.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                a.lerp_(b, 1 - self.decay)

    def _critic_step(self, optimizer: torch.optim.Optimizer) -> float:
        clip = self.sequence.next_clip(trains_generator=False)
        noised = noised_clip(clip, SCHEDULE, SEED, "critic")
        total, count, _ = critic_clip_loss(clip, noised, self.critic)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 10.0)
        optimizer.step()
        return float(total.detach() / count)

    def generated(self, batch: int = 256) -> Tensor:
        """Frames of whole sequences of the average generator, ``[n, c, h, w]``."""
        options = dataclasses.replace(OPTIONS, last_step_only=True)
        sequence = self.sequence_of(self.average, Replica(SEED + 1, batch), options)
        clips = [sequence.next_clip(trains_generator=False) for _ in range(5)]
        frames = [c.latents[:, -(c.end - c.first_new) :].flatten(0, 1) for c in clips]
        return torch.cat(frames).double()

    def distances(self) -> tuple[float, float]:
        """Sliced Wasserstein distance to the teacher's samples, and that of the means."""
        ours = self.generated()
        real = self.teacher.sample(len(ours), torch.Generator().manual_seed(1))
        distance = sliced_wasserstein(ours, real, torch.Generator().manual_seed(2))
        return distance, float((ours.mean(0) - self.teacher.means.mean(0)).norm())


def teacher_of(means: Sequence[tuple[float, float]], deviation: float) -> MixtureTeacher:
    return MixtureTeacher(torch.tensor(means).view(-1, *SHAPE), deviation, SCHEDULE)
