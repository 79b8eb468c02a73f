"""The interface of a video network, through which the rest of the package uses the network.

Each network has a folder, whose ``__init__.py`` holds ``NETWORK``, a `VideoNetwork`. This file is
loaded together with the program's flags, so it imports neither torch nor megatron-core. `NETWORK`
names the other parts of the network as strings ``module:name``, and each part is imported when a
run needs it:

- a `FlowNetwork`,
- a `StreamedNetwork`, for a causal network that streaming can train,
- a `published.Conversion`, if the network has published weights that can be read and written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.video.config.run import MODES, ConditionConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_ext.config.optimizer import LoraConfig
    from megatron_ext.config.parallel import ParallelConfig
    from megatron_ext.losses.contract import LossFunction, Report, StepCounts
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.planning.stages import Ranks, Stage
    from megatron_ext.planning.weights import Weight
    from megatron_ext.schedules.runtime import PipelineEngine
    from megatron_ext.video.config.window import WindowConfig
    from megatron_ext.video.cost.clip import Clip, ClipNetwork, StreamedCost
    from megatron_ext.video.data.sampler import Geometry
    from megatron_ext.video.model.chunk import VideoChunk
    from megatron_ext.video.model.window import FrameWindow
    from megatron_ext.video.sampling.velocity import ParallelVelocity
    from megatron_ext.video.step import FlowBatchBuilder, FlowMicrobatch

WITHOUT_REFERENCES: Mapping[str, Any] = {f"{mode}_weight": 0.0 for mode in MODES if mode != "t2v"}
"""Defaults of the flags of condition modes for a network that is given no reference frames."""

STREAMING = "streaming"
"""Stands for the networks of ``--task streaming`` where others go by their ``--video-model``."""

Sections = Mapping[str, Mapping[str, Any]]
"""Values of flags by section and field: ``{section: {field: value}}``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoNetwork:
    """A description of a video network, by which the rest of the package finds the network's parts.

    A network has one or several values of ``--video-model``. A place, below, is a string
    ``module:name`` that names an object, which is imported when a run needs it.

    Attributes:
        titles: words for the network in messages, with an article, by value of ``--video-model``.
        sections: frozen dataclasses whose fields are the network's flags.
        flow: place of the `FlowNetwork`, a class.
        resolve: a function that fills in the section ``model`` from the network's flags.
        rules: a function of ``(given, resolved)``, a run's configuration before and after
            defaults are filled in; it returns an error for each faulty or useless flag.
        stored_model: a function of ``(stored, name)``, a checkpoint's configuration and the value
            of ``--video-model`` of its run; it returns the flags that describe the checkpoint's
            weights.
        restated: a function by which a run starts from a checkpoint of another kind of network,
            such as a causal network from a bidirectional one. A kind is a value of
            ``--video-model``, or `STREAMING`. The arguments are ``(stored, kind, builds)``: the
            checkpoint's configuration, its kind, and the kind that the run builds. The result is
            the flags that the run takes from the checkpoint. If the attribute is None, a run can
            start only from a checkpoint of its own kind.
        defaults: defaults of flow matching's flags that differ for this network, by field.
            `flow_defaults` adds those of condition modes.
        streaming_flags: for each value of ``--video-model``, the field names of those flags of
            ``--task streaming`` that also have an effect on it in ``--task flow``.
        takes_pooled: whether the network is given a pooled vector of the text.
        takes_references: whether the network can be given reference frames.
        conditions: a function of a run's configuration, by whose flags it is decided whether the
            network is given reference frames: it returns the defaults of the flags of condition
            modes, by field, or None if it is given none. If the attribute is None,
            ``takes_references`` holds for every run.
        conditions_flag: the flag by which ``conditions`` decides, for messages.
        takes_adapters: whether LoRA adapters can be trained on its linear layers.
        streamed: place of the `StreamedNetwork`, an object; None if streaming cannot train it.
        streamed_sizes: sizes of a network that streaming can train, by name; each is a
            `config.sizes.StreamedSizes`.
        even_times: whether the times of sampling that public pipelines of the network give to
            Euler's scheduler are evenly spaced before the shift; else the scheduler spaces them.
        conversion: place of the `published.Conversion`, an object; None if no published weights can
            be read and written.
    """

    titles: Mapping[str, str]
    sections: tuple[type, ...]
    flow: str
    resolve: Callable[[RunConfig], RunConfig]
    rules: Callable[[RunConfig, RunConfig], list[FlagError]]
    stored_model: Callable[[Mapping[str, Any], str], Sections]
    restated: Callable[[Mapping[str, Any], str, str], Sections] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    streaming_flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    takes_pooled: bool = False
    takes_references: bool = False
    conditions: Callable[[RunConfig], Mapping[str, Any] | None] | None = None
    conditions_flag: str | None = None
    takes_adapters: bool = False
    even_times: bool = True
    streamed: str | None = None
    streamed_sizes: Mapping[str, Any] = field(default_factory=dict)
    conversion: str | None = None

    def is_given_references(self, config: RunConfig) -> bool:
        """Return whether the network of a run is given reference frames."""
        if self.conditions is None:
            return self.takes_references
        return self.conditions(config) is not None

    def flow_defaults(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the defaults of flow matching's flags that differ for a run's network, by field.

        If the network is given no reference frames, all condition modes except t2v have weight 0.
        """
        if self.conditions is None:
            own = {} if self.takes_references else WITHOUT_REFERENCES
        else:
            conditions = self.conditions(config)
            own = WITHOUT_REFERENCES if conditions is None else conditions
        return {**own, **self.defaults}


@dataclass(frozen=True)
class DataNeeds:
    """The form in which a network is given frames of a clip, and which a set must have.

    Attributes:
        references: whether the network can be given frames.
        masked: whether given frames come as masked clips (Wan's image-to-video), not as references.
        image_places: the frames whose image embeddings the network is given
            (`data.given_frames.image_embeds`).
    """

    references: bool = True
    masked: bool = False
    image_places: tuple[str, ...] = ()


class FlowNetwork(ABC):
    """The interface through which flow matching builds, checks, trains and samples a network.

    Attributes:
        builder: the class that builds the network's micro-batches.
        chunk: the class of the network's pipeline chunks.
        masks_text: whether the network's attention leaves out rows of text that are all zero. Then
            the rows that pad the text are zero.
    """

    builder: type[FlowBatchBuilder]
    chunk: type[VideoChunk]
    masks_text = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def sizes(self) -> Any:
        """Return the sizes of the whole model, from which its chunks are built."""

    @property
    @abstractmethod
    def options(self) -> Any:
        """Return the options of the model's chunks; raise ConfigError for a flag out of range."""

    @property
    def patch_size(self) -> int:
        """Return p, the side of a token's square patch, in latent pixels."""
        return int(self.sizes.patch_size)

    @abstractmethod
    def with_widths(self, manifest: Mapping[str, Any]) -> RunConfig:
        """Return the run's configuration with the latent channels and text widths of a dataset.

        ``manifest`` is the dataset's manifest, which holds these numbers.
        """

    @property
    def needs(self) -> DataNeeds:
        """Return what a set of clips must have to train the network or to sample from it."""
        return DataNeeds()

    @abstractmethod
    def checked(self) -> RunConfig:
        """Check the parallel layout; return the configuration with derived settings filled in.

        Raises:
            ConfigError: there are too many stages, or the ranks cannot share the heads equally.
        """

    def check_clips(self, shape: tuple[int, int, int], what: str) -> None:
        """Raise an error if the network cannot take clips with latents of shape (t, h, w).

        Args:
            what: name of the clips in the error.

        Raises:
            ConfigError, DataError: the clips do not fit the parallel layout or the flags.
        """
        return

    @property
    def sequence_multiple(self) -> int:
        """Return a number that must divide each clip's total number of text and image tokens.

        The text is padded so that it does.
        """
        return 1

    def padded_text(self, num_text: int, num_image: int) -> int:
        """Return ``num_text``, raised so that `sequence_multiple` divides all tokens of a clip."""
        return num_text + -(num_text + num_image) % self.sequence_multiple

    @abstractmethod
    def flops(self, sequence: Geometry) -> float:
        """Return the floating-point operations of one clip, forward and backward."""

    @abstractmethod
    def planned(self, clip: Clip) -> ClipNetwork:
        """Return the formulas that estimate memory and time of a run on clips of this shape."""

    @abstractmethod
    def recomputing(self, mode: str) -> RunConfig:
        """Return the configuration with all blocks recomputed if ``mode`` is "full", else none.

        The planner compares these modes.
        """

    @abstractmethod
    def sampled(
        self, engine: PipelineEngine, chunks: Sequence[torch.nn.Module], context: ParallelContext
    ) -> ParallelVelocity:
        """Return a predictor of velocities for a sampler; ``chunks`` are the model on this rank."""

    def velocity(self, output: Tensor) -> Tensor:
        """Return the predicted velocity ``[b, n, d]`` of the tokens for which the rank has targets.

        ``output`` is what the model's last stage returns.
        """
        return output

    def forward_step(
        self, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
    ) -> tuple[Tensor, LossFunction]:
        """Run one chunk on one micro-batch; return its output and a loss function of that output.

        ``counts`` has the number and summed weights of the whole step's targets, which scale the
        loss with ``--calculate-per-token-loss``. It is None in evaluation, and on ranks that do not
        have the last pipeline stage.
        """
        output: Tensor = model(**batch.inputs)
        return output, partial(self._loss, batch=batch, counts=counts)

    def _loss(
        self, output: Tensor, *, batch: FlowMicrobatch, counts: StepCounts | None
    ) -> tuple[Tensor, Tensor, Report]:
        from megatron_ext.losses.contract import share_of_step
        from megatron_ext.video.loss import flow_matching_loss

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


class StreamedNetwork(ABC):
    """A network that can be generator, critic and teacher of ``--task streaming``.

    Attributes:
        chunk: the class of the network's pipeline chunks. Its ``new_cache`` builds a `KVCache`; its
            ``forward`` takes ``x``, ``timesteps`` and ``text``, and with a cache also ``cache``,
            ``first_frame`` and ``update_cache``.
    """

    chunk: type[VideoChunk]

    @abstractmethod
    def options(self, flags: WindowConfig, parallel: ParallelConfig, *, causal: bool) -> Any:
        """Return the options of the chunks; raise ConfigError for a flag out of range.

        If ``causal`` is True, attention is causal within a window, as in the generator. Otherwise
        it is bidirectional, as in critic and teacher.
        """

    @abstractmethod
    def check_inputs(self, sizes: Any, x: Tensor, timesteps: Tensor, text: Tensor) -> None:
        """Check latents, timesteps and text against the sizes; raise DataError if one is wrong."""

    @abstractmethod
    def weights(self, lora: LoraConfig, sizes: Any, tp: int, stage: Stage) -> list[Weight]:
        """Return a stage's parameters on one of ``tp`` ranks, in the order of ``parameters()``."""

    @abstractmethod
    def on_clip(self, config: RunConfig, ranks: Ranks, sizes: Any, clip: Clip) -> StreamedCost:
        """Return the cost formulas of a pass over a clip in which all frames see each other."""

    @abstractmethod
    def on_block(
        self, config: RunConfig, ranks: Ranks, sizes: Any, clip: Clip, window: FrameWindow
    ) -> StreamedCost:
        """Return the cost formulas of a pass over one frame block that attends to a full window.

        The window holds the earlier frames. ``clip`` describes the block itself.
        """

    @abstractmethod
    def pass_flops(self, model: Any, **inputs: Any) -> float:
        """Return the FLOPs of a forward pass without gradient, summed over model-parallel ranks.

        ``model`` may be the chunk of any rank; ``inputs`` are the arguments of its ``forward``.
        """
