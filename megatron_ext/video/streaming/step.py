"""Runs the steps of streaming long-tuning (arXiv:2509.22622): clips, losses and updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.losses.contract import Report
from megatron_ext.optim.schedule import Schedule
from megatron_ext.optim.update import UpdateResult
from megatron_ext.planning.products import FORWARD_AND_BACKWARD
from megatron_ext.train.step import StepInputs, StepResult, StepRunner, mean_of, reduce_reports
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.networks.lookup import streamed_network
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.decisions import Pass, passes
from megatron_ext.video.streaming.loss import (
    Loss,
    NoisedClip,
    Scores,
    critic_clip_loss,
    dmd_loss,
    generator_direction,
    generator_losses,
    noised_clip,
    sid_direction,
)
from megatron_ext.video.streaming.networks import TrainedNetwork, build_critic
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.prompts import FilePrompts
from megatron_ext.video.streaming.rollout import Generator, StreamClip
from megatron_ext.video.streaming.sequence import Replica, StreamingSequence
from megatron_ext.video.streaming.stored import StreamingState
from megatron_ext.video.streaming.teacher import build_teacher

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.train.task import Task


class WorkCounter:
    """Counts the floating-point operations of ``networks`` by a hook on each forward pass.

    The count cannot be computed in advance, since the number of passes is random. To include the
    backward pass, the operations of a forward pass are counted three times if weights get
    gradients, and twice if only the input gets one. Recomputation to save memory is not counted.
    """

    def __init__(self, networks: Iterable[torch.nn.Module]) -> None:
        self._flops = 0.0
        self._network = streamed_network()
        for network in networks:
            for module in network.modules():
                if isinstance(module, self._network.chunk):
                    module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: VideoChunk, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        passes = FORWARD_AND_BACKWARD if trains else 1
        if not trains and torch.is_grad_enabled() and inputs["x"].requires_grad:
            passes = 2
        ranks = model.tp_group.size() * model.cp_group.size() * model.num_stages
        self._flops += passes * self._network.pass_flops(model, **inputs) / ranks

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave passes within the ``with`` block, such as sampling, out of the count."""
        flops = self._flops
        try:
            yield
        finally:
            self._flops = flops

    def take(self) -> float:
        """Return this rank's count since the last call, and start again from 0.

        The operations of a pass are divided equally among the ranks that share the network.
        """
        flops, self._flops = self._flops, 0.0
        return flops


class StreamingRunner(StepRunner):
    """Trains the critic in every step and the generator in some, on the clips of long videos.

    The generator is the model of the run. The runner also has the critic, the teacher and the
    videos of this replica (`StreamingSequence`). It saves critic and videos as ``extra_state``.
    """

    extra_state: StreamingState

    def __init__(
        self, config: RunConfig, task: Task, context: ParallelContext, *model: Any
    ) -> None:
        super().__init__(config, task, context, *model)
        optimizer = self.optimizer
        scheduler = self.scheduler
        assert optimizer is not None and scheduler is not None
        self.streaming = streaming = config.section(StreamingConfig)
        self.schedule = NoiseSchedule(streaming)
        clip = config.optimizer.clip_grad
        self.generator = TrainedNetwork(self.chunks, optimizer, scheduler, clip)
        self.critic = build_critic(config, context, self.device)
        self.teacher = build_teacher(config, context, self.device)
        prompts = FilePrompts(config, context, self.device)
        negative = prompts.encode([streaming.negative_prompt])
        weights = streaming.guidance_scale, streaming.sid_alpha
        self.scores = Scores(self.critic.network, self.teacher, negative, *weights)
        self.sequence = self._sequence(prompts)
        self.extra_state = StreamingState(self.critic, self.sequence, context, config)
        self.work = WorkCounter([self.generator.network, self.critic.network, self.teacher])

    @property
    def trained_chunks(self) -> list[DistributedDataParallel]:
        """Return the model chunks of generator and critic, which are trained."""
        return [*self.generator.chunks, *self.critic.chunks]

    @property
    def schedules(self) -> list[Schedule]:
        """Return the learning rate schedules of generator and critic, in this order."""
        return [*super().schedules, self.critic.scheduler]

    @property
    def _networks(self) -> dict[Pass, TrainedNetwork]:
        """Return critic and generator, keyed by "critic" and "generator"."""
        return {"critic": self.critic, "generator": self.generator}

    def model_steps(self, steps: int) -> int:
        """Return how many of the first ``steps`` steps of the run train the generator."""
        return -(-steps // self.streaming.generator_interval)

    def _sequence(self, prompts: FilePrompts) -> StreamingSequence:
        streaming = self.streaming
        training = self.config.training
        layout = self.context.layout
        batch, _ = training.batch_sizes
        height, width = streaming.latent_size
        (model,) = unwrap_model(self.chunks)
        cache = model.new_cache(batch, height, width, chunk_frames=streaming.chunk_frames)
        shape = 0, 0, streaming.sizes().channels, height, width
        return StreamingSequence(
            streaming,
            Generator(self.generator.network, cache, self.schedule),
            prompts=prompts,
            replica=Replica(training.seed, batch, self.context.dp_rank, layout.data_parallel_size),
            like=torch.empty(shape, device=self.device),
            first_frame=prompts.first_frame if streaming.encode_first_frame else None,
        )

    def train(self, inputs: StepInputs, num_samples: int) -> StepResult:
        """Run one training step: for each trained network, generate a clip per micro-batch.

        ``inputs`` has no batches, only their number, since the sequence gets its own prompts.
        ``num_samples`` is the step's global batch size, by which learning rate schedules advance.
        """
        num_microbatches = inputs.num_microbatches
        kinds = passes(self.streaming, self.extra_state.steps, num_microbatches)
        trained = {kind: network for kind, network in self._networks.items() if kind in kinds}
        for network in trained.values():
            network.zero_grad()
            if self.check_zeroed is not None:
                self.check_zeroed(network.chunks)
        reports: dict[Pass, list[Report]] = {kind: [] for kind in trained}
        frames: dict[Pass, list[Tensor]] = {kind: [] for kind in trained}
        recorder = self.context.recorder
        for kind in kinds:
            with recorder.phase("forward"):  # Includes the backward pass of each clip.
                new_reports, num_frames = self._pass(kind, num_microbatches)
            reports[kind] += new_reports
            frames[kind].append(num_frames)
        per_frame = self.config.training.calculate_per_token_loss
        for kind, network in trained.items():
            divisor = torch.stack(frames[kind]).sum() if per_frame else None
            with recorder.phase("reduce"):
                network.reduce(divisor, everywhere=self.observer is not None)
        if self.observer is not None:
            self.observer()
        self._give_memory_back(2)
        self.settle()
        with recorder.phase("update"):
            updates = {kind: network.update() for kind, network in trained.items()}
        self._give_memory_back(1)
        self._advance_schedules(updates, num_samples)
        return self._result(reports, updates)

    def _advance_schedules(self, updates: dict[Pass, UpdateResult], num_samples: int) -> None:
        """Count the step, and advance the learning rate schedules of generator and critic.

        ``updates`` has the result for each network that this step trained. The schedule of a
        trained network advances only if its update was applied. The schedule of a network that
        was not trained advances in every step.
        """
        self.extra_state.steps += 1
        for kind, network in self._networks.items():
            if kind in updates:
                self._follow(updates[kind], network.scheduler, num_samples)
            else:
                network.scheduler.step(increment=num_samples)
        if "generator" in updates:
            # The memo holds text that the weights before the update have encoded.
            self.sequence.generator.cache.memo.clear()

    def _pass(self, kind: Pass, accumulation: int) -> tuple[list[Report], Tensor]:
        """Generate a clip, and accumulate the gradients of the network ``kind`` on it.

        ``accumulation`` is the number of clips of each network in a step.

        Returns:
            The reports of the losses, and the number of frames with a loss.
        """
        clip = self.sequence.next_clip(trains_generator=kind == "generator")
        noised = noised_clip(clip, self.schedule, self.config.training.seed, kind)
        num_frames = clip.mask.sum()
        # Either all frames have equal weight, and gradients are summed over data-parallel ranks; or
        # all clips have equal weight, and gradients are averaged.
        per_frame = self.config.training.calculate_per_token_loss
        share = 1 if per_frame else num_frames * accumulation
        reports = []
        losses = self._generator_losses if kind == "generator" else self._critic_losses
        for total, _, report in losses(clip, noised):
            torch.autograd.backward(total / share)
            reports.append(report)
        return reports, num_frames

    def _generator_losses(self, clip: StreamClip, noised: NoisedClip) -> Iterator[Loss]:
        """Yield the generator's losses on a clip: one per block with ``two_phase``, else one."""
        if self.streaming.distribution_loss == "sid":
            direction, losses = sid_direction(clip, noised, self.scores, self._whole_gradient)
        else:
            direction = generator_direction(clip, noised, self.scores)
            losses = None
        if self.streaming.two_phase:
            yield from generator_losses(clip, direction, self.sequence.generator, losses)
        else:
            yield dmd_loss(clip.latents, direction=direction, mask=clip.mask, losses=losses)

    def _whole_gradient(self, gradient: Tensor) -> Tensor:
        """Turn this rank's gradient of a network's input into the gradient over all tokens.

        ``gradient`` covers only the tokens that this rank holds, so it is summed over the ranks of
        the replica that divide the tokens. The sum is divided by the context-parallel size,
        because the backward pass adds up the equal losses of all context-parallel ranks.
        """
        groups = self.context.pgs
        whole = gradient.contiguous().clone()
        if self.transformer_config.sequence_parallel:
            torch.distributed.all_reduce(whole, group=groups.tp)
        if groups.cp.size() > 1:
            torch.distributed.all_reduce(whole, group=groups.cp)
        return whole.div_(groups.cp.size())

    def _critic_losses(self, clip: StreamClip, noised: NoisedClip) -> Iterator[Loss]:
        yield critic_clip_loss(clip, noised, self.critic.network, self.streaming.denoising_loss)

    def _result(
        self, reports: dict[Pass, list[Report]], updates: dict[Pass, UpdateResult]
    ) -> StepResult:
        losses = dict[str, Tensor]()
        counts = dict[str, Tensor]()
        for kind, entries in reports.items():
            totals = reduce_reports(entries, self.context)
            losses |= {name: mean_of(total) for name, total in totals.items()}
            counts |= {name: total[1] for name, total in totals.items()}
            norm = updates[kind].norm
            losses[f"{kind} grad norm"] = norm
            counts[f"{kind} grad norm"] = torch.ones_like(norm)
        applied = torch.stack([update.flag for update in updates.values()]).all()
        critic = updates["critic"]
        return StepResult(
            losses,
            counts,
            UpdateResult(applied, critic.norm, critic.zeros),
            model_update=updates.get("generator"),
            flops=self.work.take() * self.context.layout.world_size,
        )
