"""Flow matching as every video network trains it: micro-batches from clips, the step, its loss.

A network brings a `FlowNetwork`; `networks.network_of` finds the one of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device import to_device
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, share_of_step
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.config.run import ConditionConfig, FlowConfig, TextDropoutConfig
from megatron_ext.video.cost.clip import Clip, ClipNetwork
from megatron_ext.video.data.conditions import Text, drop_text, frame_masks, loss_mask
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import Randomness, draw_microbatch
from megatron_ext.video.data.sampler import Geometry
from megatron_ext.video.loss import (
    FlowTargets,
    flow_matching_loss,
    noised,
    shift_factor,
    timesteps,
    token_weights,
)
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.model.tokens import pack, tokens_per_frame
from megatron_ext.video.sampling.velocity import ParallelVelocity


@dataclass(frozen=True)
class FlowMicrobatch:
    """One micro-batch as a pipeline stage sees it.

    Attributes:
        inputs: the keywords of the model's ``forward`` that the stage needs. The first has a row
            for each clip.
        num_text, num_image: tokens of the whole sequence.
        targets: on the last stage, those of the image tokens that this rank's output is for.
    """

    inputs: Mapping[str, Tensor | None]
    num_text: int
    num_image: int
    targets: FlowTargets | None

    @property
    def size(self) -> int:
        """Return the number of clips b."""
        first = next(iter(self.inputs.values()))
        assert first is not None
        return first.size(0)

    @property
    def loss_weights(self) -> Tensor:
        """Return the weights of the tokens in the loss, ``[b, n]``; on the last stage."""
        assert self.targets is not None
        return self.targets.weights

    @property
    def mtp_loss_weights(self) -> tuple[Tensor, ...]:
        """Return nothing: no token is predicted further ahead."""
        return ()


class FlowBatchBuilder(ABC):
    """A builder of a run's micro-batches.

    Every random decision follows from the seed and the number of the sample, so all ranks that
    hold parts of one sequence decide alike, and so does a run in another layout.

    Args:
        null: the encoded empty caption, ``[1, l, d]`` and ``[1, e]``.
        patch: side of a token's square patch, in latent pixels.
    """

    def __init__(
        self, config: RunConfig, context: ParallelContext, null: Text, seed: int, patch: int
    ) -> None:
        self._config, self._context, self._null, self._seed = config, context, null, seed
        self._patch = patch
        self._conditions = config.section(ConditionConfig)

    def __call__(self, batch: VideoBatch, samples: Sequence[int]) -> FlowMicrobatch:
        """Return one micro-batch of clips whose numbers in the run are ``samples``."""
        flow, dropout = self._config.section(FlowConfig), self._config.section(TextDropoutConfig)
        conditions, latents, device = self._conditions, batch.latents, batch.latents.device
        _, c, t, h, w = latents.shape
        randomness = draw_microbatch(self._seed, samples, (c, t, h, w), conditions, dropout)
        normals = to_device(self._normals(randomness, samples, t), device)
        times = timesteps(flow, normals, shift_factor(flow, (t, h, w), self._patch))
        noise = to_device(randomness.noise, device)
        x_t, velocity = noised(latents, noise, times, flow.sigma_min)
        masks = to_device(frame_masks(randomness.modes, t, conditions), device)
        per_frame = tokens_per_frame((t, h, w), self._patch)
        num_text, num_image = batch.text.size(1), t * per_frame
        targets = None
        if self._context.is_last_stage:
            mask = loss_mask(masks, per_frame, conditions.reference_loss)
            weights = token_weights(mask, flow.loss_normalization)
            modes = to_device(randomness.modes, device)
            usual = weights.sum() / self._context.pgs.cp.size()
            whole = FlowTargets(pack(velocity, self._patch), weights, times, modes, usual)
            targets = self._own(whole, num_text)
        inputs = self._inputs(batch, randomness, x_t, times, masks)
        return FlowMicrobatch(inputs, num_text, num_image, targets)

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        """Return the normals of times, ``[b]``, or ``[b, t]`` for a time of each frame."""
        return randomness.normals

    @abstractmethod
    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Return the targets that belong to the model's output on this rank."""

    @abstractmethod
    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Return the keywords of the model's ``forward``."""

    def text_of(self, batch: VideoBatch, randomness: Randomness) -> Text:
        """Return the captions, some of which are dropped."""
        drops = randomness.drop_text, randomness.drop_pooled
        text, pooled = (to_device(drop, batch.text.device) for drop in drops)
        return drop_text(Text(batch.text, batch.pooled), self._null, text, pooled)


class FlowNetwork(ABC):
    """The network of a run as flow matching needs to know it."""

    builder: type[FlowBatchBuilder]
    chunk: type[VideoChunk]

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def sizes(self) -> Any:
        """Return the sizes of the whole model, from which its chunks are built."""

    @property
    @abstractmethod
    def options(self) -> Any:
        """Return the options of its chunks; raise ConfigError for flags out of their range."""

    @property
    def patch_size(self) -> int:
        """Return p; a token is a square of so many latent cells a side."""
        return int(self.sizes.patch_size)

    @abstractmethod
    def with_widths(self, manifest: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with the model for a dataset's latents and embeddings.

        Raises:
            ConfigError: the network cannot take the dataset.
        """

    @abstractmethod
    def checked(self) -> RunConfig:
        """Return the configuration with what its flags decide about the network.

        Raises:
            ConfigError: no rank could build it: too many stages, or heads that ranks cannot share.
        """

    def check_clips(self, shape: tuple[int, int, int], what: str) -> None:
        """Refuse clips with latents of (t, h, w) that the network does not take.

        Args:
            what: names them in the error.

        Raises:
            ConfigError, DataError: the clips do not fit the layout or the flags.
        """
        return

    @property
    def sequence_multiple(self) -> int:
        """Return what the tokens of text and image together must be a multiple of."""
        return 1

    @abstractmethod
    def flops(self, sequence: Geometry) -> float:
        """Return the floating-point operations of one clip, forward and backward."""

    @abstractmethod
    def planned(self, clip: Clip) -> ClipNetwork:
        """Return the network as a plan sees it, on the clips of one bucket."""

    @abstractmethod
    def recomputing(self, mode: str) -> RunConfig:
        """Return the configuration with all blocks recomputed (``full``) or none."""

    @abstractmethod
    def sampled(
        self, engine: PipelineEngine, chunks: Sequence[torch.nn.Module], context: ParallelContext
    ) -> ParallelVelocity:
        """Return the velocity of a trained model, which a sampler follows."""

    def velocity(self, output: Tensor) -> Tensor:
        """Return the velocity of the targets' tokens from the output of the last stage."""
        return output

    def forward_step(
        self, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
    ) -> tuple[Tensor, LossFunction]:
        """Run one chunk on one micro-batch; see `Task.forward_step`."""
        output: Tensor = model(**batch.inputs)
        return output, partial(self._loss, batch=batch, counts=counts)

    def _loss(
        self, output: Tensor, *, batch: FlowMicrobatch, counts: StepCounts | None
    ) -> tuple[Tensor, Tensor, Report]:
        assert batch.targets is not None
        share = share_of_step(
            batch.loss_weights,
            counts,
            per_token=self.config.training.calculate_per_token_loss,
            usual_weight=batch.targets.usual_weight,
        )
        return flow_matching_loss(
            self.velocity(output),
            targets=batch.targets,
            share=share,
            reported_modes=self.config.section(ConditionConfig).modes,
        )


def sharing_ranks(parallel: ParallelConfig) -> int:
    """Return how many ranks share the tokens of a clip."""
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared


def num_stages(parallel: ParallelConfig) -> int:
    """Return the number of pipeline stages, virtual ones included."""
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return parallel.pipeline_model_parallel_size * chunks
