"""What a plan asks of a model, whichever it is: `network_of` gives the formulas of a run's."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.planning.activations import Activations, copies
from megatron_ext.planning.communication import Traffic, Volume
from megatron_ext.planning.contents import LayerBytes, Ranks, Sizes, Stage, stages
from megatron_ext.planning.flops import Operated, Operations, step_flops
from megatron_ext.planning.parameters import Weight, weights

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


class Network(ABC):
    """Formulas of one model; all results are of one rank and one micro-batch.

    Attributes:
        config: of the run.
        sizes: how it is cut.
    """

    config: RunConfig
    sizes: Ranks

    def of_run(self, config: RunConfig) -> Network:
        """The same model in a run whose ranks and micro-batches are the same."""
        this: Any = self
        return dataclasses.replace(this, config=config)  # type: ignore[no-any-return]

    @abstractmethod
    def stages(self) -> list[Stage]:
        """All stages, along the model."""

    @abstractmethod
    def weights(self, stage: Stage) -> list[Weight]:
        """Parameters of a stage, in the order of its module."""

    @abstractmethod
    def activations(self, stage: Stage) -> LayerBytes:
        """What a stage keeps for its backward pass."""

    def deferred(self, stage: Stage) -> int:
        """What weight gradients of a stage that are put off need."""
        return 0

    def copies(self, stage: Stage) -> int:
        """Matrices in 8 bits that a stage keeps within a step for all of its micro-batches."""
        eight = self.config.fp8.fp8_format is not None
        return copies(self.config, self.weights(stage)) if eight else 0

    @abstractmethod
    def layer(self) -> LayerBytes:
        """A layer, the last or the most frequent kind of them, without full recomputation."""

    @property
    @abstractmethod
    def entering(self) -> int:
        """What a layer keeps that is recomputed: its input."""

    @property
    @abstractmethod
    def boundary(self) -> int:
        """Bytes that one stage sends to the next."""

    @abstractmethod
    def operations(self, stage: Stage) -> Operated:
        """Floating-point operations of a stage."""

    @abstractmethod
    def traffic(self, stage: Stage) -> Volume:
        """Bytes that a stage sends, forward and backward."""

    @abstractmethod
    def step_flops(self) -> float:
        """Operations of a training step on all ranks, recomputation not counted."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Of a sequence."""

    def messages(self, stage: Stage, num_stages: int) -> float:
        """Output to the next stage and gradient to the one before, where they are elsewhere."""
        if self.sizes.pp == 1:
            return 0.0
        return float(self.boundary * ((stage.index < num_stages - 1) + (stage.index > 0)))


@dataclass(frozen=True)
class GptNetwork(Network):
    """A GPT; see `Network`."""

    config: RunConfig
    sizes: Sizes

    def stages(self) -> list[Stage]:
        """See `contents.stages`."""
        return stages(self.config)

    def weights(self, stage: Stage) -> list[Weight]:
        """See `parameters.weights`."""
        return weights(self.config, self.sizes, stage)

    def activations(self, stage: Stage) -> LayerBytes:
        """See `Activations.stage`."""
        return Activations(self.config, self.sizes).stage(stage)

    def deferred(self, stage: Stage) -> int:
        """See `Activations.deferred`."""
        return Activations(self.config, self.sizes).deferred(stage)

    def copies(self, stage: Stage) -> int:
        """See `Activations.copies`."""
        return Activations(self.config, self.sizes).copies(stage)

    def layer(self) -> LayerBytes:
        """The last one."""
        return Activations(self.config, self.sizes).layer(self.sizes.layers - 1)

    @property
    def entering(self) -> int:
        """A residual stream."""
        return Activations(self.config, self.sizes).residual

    @property
    def boundary(self) -> int:
        """A residual stream."""
        return self.entering

    def operations(self, stage: Stage) -> Operated:
        """See `Operations.stage`."""
        return Operations(self.config, self.sizes).stage(stage)

    def traffic(self, stage: Stage) -> Volume:
        """See `Traffic`."""
        return Traffic(self.config, self.sizes).microbatch(stage)

    def step_flops(self) -> float:
        """See `flops.step_flops`."""
        return step_flops(self.config, self.sizes, self.stages())

    @property
    def tokens(self) -> int:
        """``--seq-length``."""
        return self.sizes.s
