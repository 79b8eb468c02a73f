"""Builds micro-batches of flow matching, as far as all video networks do so in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.streams import to_device
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import ConditionConfig, FlowConfig, TextDropoutConfig
from megatron_ext.video.data.conditions import Text, drop_text, frame_masks, loss_mask
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import Randomness, draw_microbatch
from megatron_ext.video.loss import (
    FlowTargets,
    noised,
    shift_factor,
    timesteps,
    token_weights,
)
from megatron_ext.video.model.tokens import pack, tokens_per_frame


@dataclass(frozen=True)
class FlowMicrobatch:
    """One micro-batch on one rank: inputs of the model, and targets on the last pipeline stage.

    Attributes:
        inputs: keyword arguments of the model's ``forward``. The first of them must be a tensor
            whose first dimension is the number of clips, b.
        num_text, num_image: numbers of text and image tokens in the whole sequence.
        targets: targets of this rank's image tokens on the last stage; None on other stages.
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
        """Return the tokens' weights in the loss, ``[b, n]``; only the last stage has them."""
        assert self.targets is not None
        return self.targets.weights

    @property
    def mtp_loss_weights(self) -> tuple[Tensor, ...]:
        """Return an empty tuple, since video networks have no multi-token prediction."""
        return ()

    @property
    def boundary_inputs(self) -> Mapping[str, Any]:
        """Return the keyword arguments with which to call a pipeline chunk's ``boundary_shape``.

        That method returns the shape of the tensor that pipeline stages send for this micro-batch.
        """
        sizes = {"num_text": self.num_text, "num_image": self.num_image}
        return {**sizes, "micro_batch_size": self.size}


class FlowBatchBuilder(ABC):
    """Builds a run's micro-batches: draws noise and flow times, and adds noise to the clips.

    Every random draw depends only on the seed and the sample's number in the run. Therefore all
    ranks of a replica draw the same values, also in a run with another parallel layout.

    Args:
        null: the encoded empty caption: tokens ``[1, l, d]`` and pooled vector ``[1, e]``.
        patch: side of a token's square patch, in latent pixels.
    """

    microbatch = FlowMicrobatch

    def __init__(
        self, config: RunConfig, context: ParallelContext, null: Text, seed: int, patch: int
    ) -> None:
        self._config = config
        self._context = context
        self._null = null
        self._seed = seed
        self._patch = patch
        self._conditions = config.section(ConditionConfig)

    def __call__(
        self, batch: VideoBatch, samples: Sequence[int], counted: int | None = None
    ) -> FlowMicrobatch:
        """Return one micro-batch of clips.

        ``samples`` are the clips' numbers in the run, which determine the random draws. Only the
        first ``counted`` clips have a loss; None means all.
        """
        flow = self._config.section(FlowConfig)
        dropout = self._config.section(TextDropoutConfig)
        conditions = self._conditions
        latents = batch.latents
        device = batch.latents.device
        _, c, t, h, w = latents.shape
        randomness = draw_microbatch(self._seed, samples, (c, t, h, w), conditions, dropout)
        normals = to_device(self._normals(randomness, samples, t), device)
        times = timesteps(flow, normals, shift_factor(flow, (t, h, w), self._patch))
        noise = to_device(randomness.noise, device)
        x_t, velocity = noised(latents, noise, times, flow.sigma_min)
        masks = to_device(frame_masks(randomness.modes, t, conditions), device)
        per_frame = tokens_per_frame((t, h, w), self._patch)
        num_text = batch.text.size(1)
        num_image = t * per_frame
        targets = None
        if self._context.is_last_stage:
            mask = loss_mask(masks, per_frame, conditions.reference_loss)
            weights = token_weights(mask, flow.loss_normalization)
            if counted is not None:
                weights[counted:] = 0.0
            modes = to_device(randomness.modes, device)
            usual = weights.sum() / self._context.pgs.cp.size()
            whole = FlowTargets(pack(velocity, self._patch), weights, times, modes, usual)
            targets = self._own(whole, num_text)
        inputs = self._inputs(batch, randomness, x_t, times, masks)
        return self.microbatch(inputs, num_text, num_image, targets)

    def _normals(self, randomness: Randomness, samples: Sequence[int], num_frames: int) -> Tensor:
        """Return the standard normal numbers from which flow times are computed.

        This method returns one per clip, ``[b]``. A subclass may return one per latent frame,
        ``[b, t]``.
        """
        return randomness.normals

    @abstractmethod
    def _own(self, whole: FlowTargets, num_text: int) -> FlowTargets:
        """Return the targets of the image tokens that this rank outputs.

        Each image token must count in the loss of only one context-parallel rank. ``whole`` has
        the targets of all image tokens; ``num_text`` is the number of text tokens before them.
        """

    @abstractmethod
    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        """Return the keyword arguments of ``forward``.

        ``x_t`` are the noised latents ``[b, c, t, h, w]``, ``times`` their flow times, ``[b]`` or
        ``[b, t]``. ``masks``, ``[b, t]``, are True at reference frames.
        """

    def text_of(self, batch: VideoBatch, randomness: Randomness) -> Text:
        """Return the captions' embeddings, or the empty caption's where ``randomness`` says so."""
        drops = randomness.drop_text, randomness.drop_pooled
        text, pooled = (to_device(drop, batch.text.device) for drop in drops)
        return drop_text(Text(batch.text, batch.pooled), self._null, text, pooled)


def sharing_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks among which the tokens of a clip are divided.

    It is the context-parallel size, times the tensor-parallel size under sequence parallelism.
    """
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared


def num_stages(parallel: ParallelConfig) -> int:
    """Return the number of pipeline stages, including virtual stages."""
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return parallel.pipeline_model_parallel_size * chunks
