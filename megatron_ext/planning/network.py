"""The interface between planning and a task's networks: the formulas of a `Network`.

Planning contains no model. A task provides its networks, each of which counts the parameters,
bytes, floating-point operations and messages of a pipeline stage. Planning derives the rest.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.stages import FP32, LayerBytes, Ranks, Stage, Summed
from megatron_ext.planning.weights import Weight, is_linear

if TYPE_CHECKING:
    from megatron_ext.planning.kernels import Work
    from megatron_ext.planning.pipeline import Schedule
    from megatron_ext.planning.sheet import Sheet
    from megatron_ext.planning.state import State

Counted = TypeVar("Counted")

ATTENTION_BACKWARD = 2.5
"""Matrix products in attention's backward pass (5) per product in its forward pass (2)."""

LAYER_KERNELS = 36
"""The assumed number of kernels of a layer in both passes, for networks that do not count them."""


@dataclass(frozen=True)
class Flops(Summed):
    """Floating-point operations of one micro-batch on one rank.

    Attributes:
        linear: forward matrix products with weights, in 16 or 32 bits.
        fp8: forward matrix products with weights in 8 bits.
        scores: forward matrix products without weights, such as those of attention.
        again, fp8_again, scores_again: matrix products that the backward pass recomputes.
        weights, fp8_weights: matrix products for the gradients of weights.
        head, head_weights: forward and weight-gradient products of the output layer, which no other
            field includes.
        cast: bytes (not operations) that casts to 8 bits read and write in all passes together.
    """

    linear: float = 0.0
    fp8: float = 0.0
    scores: float = 0.0
    again: float = 0.0
    fp8_again: float = 0.0
    weights: float = 0.0
    fp8_weights: float = 0.0
    cast: float = 0.0
    scores_again: float = 0.0
    head: float = 0.0
    head_weights: float = 0.0

    @property
    def forward(self) -> float:
        """Return the operations of the forward pass, summed over all number formats."""
        return self.linear + self.fp8 + self.scores + self.head

    def recomputed(self, times: int) -> Flops:
        """Return the additional operations if the backward pass repeats the forward products.

        ``times`` is the number of repetitions. The output layer is not repeated.
        """
        again = [times * part for part in (self.linear, self.fp8, self.scores)]
        return Flops(again=again[0], fp8_again=again[1], scores_again=again[2])


@dataclass(frozen=True)
class Volume(Summed):
    """Bytes that one rank sends, by kind of communication; all collectives are assumed to be rings.

    A volume is that of a micro-batch, an update or a step, as the function that returns it says.

    Attributes:
        tensor: all-reduces of tensor parallelism, or gathers and scatters of sequence parallelism.
        context: exchanges of keys and values, or of heads, in context parallelism.
        expert: exchanges of tokens with experts on other ranks.
        expert_in_node: those exchanges that surely stay in a node.
        pipeline: messages between stages.
        data: gradients and parameters between data-parallel replicas, without those of experts.
        embedding: gradients of the copies of the word embedding.
        expert_data: gradients and parameters between replicas of experts.
    """

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    expert_in_node: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    embedding: float = 0.0
    expert_data: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of all kinds of communication together."""
        return float(sum(vars(self).values()))


def ring(ranks: int) -> float:
    """Return the fraction of a tensor that each rank sends in a ring all-gather or reduce-scatter.

    In a ring all-reduce, each rank sends twice as much.
    """
    return (ranks - 1) / ranks


def fp8_bytes(fp8: Fp8Config, weights: Iterable[Weight]) -> int:
    """Return the bytes of the 8-bit copies of weights that exist beside the weights during a step.

    A weight has a copy and a transposed copy in 8 bits. With ``--fp8-param-gather`` the weight
    itself is in 8 bits, and only the transposed copy is added.
    """
    numbers = sum(weight.numel for weight in weights if is_linear(weight.name))
    return (2 - fp8.fp8_param_gather) * numbers


@dataclass(frozen=True)
class Elements(Summed):
    """The numbers of elements in a rank's parameters.

    Attributes:
        trained: elements that are trained.
        expert: trained elements that belong to experts.
        shared: trained elements in copies of the word embedding.
        linear: elements of the weights of linear layers.
        linear_trained: those of them that are trained.
    """

    trained: int = 0
    expert: int = 0
    shared: int = 0
    linear: int = 0
    linear_trained: int = 0

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> Elements:
        """Count the elements of ``weights``."""
        trained = expert = shared = linear = linear_trained = 0
        for weight in weights:
            number = weight.numel
            updated = 0 if weight.frozen else number
            trained += updated
            expert += updated if weight.expert else 0
            shared += updated if weight.shared else 0
            if is_linear(weight.name):
                linear += number
                linear_trained += updated
        return cls(trained, expert, shared, linear, linear_trained)


class Network(ABC):
    """The cost formulas of one model in a run, for one rank and one micro-batch."""

    config: RunConfig
    sizes: Ranks
    draws_by_name: ClassVar[bool] = True
    """Whether a weight is drawn after the model is built, and may be sharded at once."""

    def with_config(self, config: RunConfig) -> Network:
        """Return a copy for ``config``, which must have the same parallel and micro-batch sizes."""
        this: Any = self
        return dataclasses.replace(this, config=config)  # type: ignore[no-any-return]

    @property
    def trains(self) -> bool:
        """Return whether the weights of the model itself are trained, not only adapters."""
        return self.config.lora.lora_rank is None

    @property
    def experts(self) -> tuple[int, int]:
        """Return (experts in a layer, experts that a token uses); (1, 1) without experts."""
        return 1, 1

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches of a rank in a step."""
        return self.schedule.num_microbatches

    @property
    def schedule(self) -> Schedule:
        """Return the pipeline schedule of a step."""
        # Only plans simulate it; a run asks a network for its bytes and operations.
        from megatron_ext.planning.pipeline import Schedule

        config = self.config
        partly = config.model.num_microbatches_with_partial_activation_checkpoints
        return Schedule.of(config.parallel, config.training, partly)

    @cached_property
    def recomputing_all(self) -> Network:
        """Return a copy in which every micro-batch recomputes all decoder layers of a stage."""
        values = {
            "recompute_num_layers": self.config.model.num_layers,
            "num_microbatches_with_partial_activation_checkpoints": None,
        }
        return self.with_config(self.config.with_values(values))

    @property
    def gradient_width(self) -> int:
        """Return the bytes of an element of the gradients that replicas reduce."""
        in_fp32 = self.config.precision.accumulate_allreduce_grads_in_fp32
        return FP32 if in_fp32 else self.sizes.width

    def stages_of(self, rank: int) -> list[Stage]:
        """Return the stages of a pipeline rank, in the order of its chunks."""
        return sorted((x for x in self.stages() if x.rank == rank), key=lambda x: x.chunk)

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Return all stages of the model, first to last."""

    def kind(self, stage: Stage) -> Hashable:
        """Return a key that is the same for stages that cost the same.

        Their parameters, activations, operations and messages are then counted once for all of
        them. By default, every stage has its own key.
        """
        return stage

    def of_stages(
        self, count: Callable[[Stage], Counted], stages: Sequence[Stage]
    ) -> list[Counted]:
        """Return ``count`` of each stage, computed once for all stages of its `kind`."""
        counted: dict[Hashable, Counted] = {}
        keys = [self.kind(stage) for stage in stages]
        for key, stage in zip(keys, stages, strict=True):
            if key not in counted:
                counted[key] = count(stage)
        return [counted[key] for key in keys]

    def parameters(self, stage: Stage) -> tuple[Weight, ...]:
        """Return the `weights` of a stage, listed once for all stages of its `kind`."""
        key = self.kind(stage)
        if key not in self._parameters:
            self._parameters[key] = tuple(self.weights(stage))
        return self._parameters[key]

    def unlike(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return one layer of each kind among ``layers``, and how many of them are of its kind.

        By default, every layer is a kind of its own.
        """
        return [(number, 1) for number in layers]

    def elements(self, stage: Stage) -> Elements:
        """Return the numbers of a stage's parameters: those of its ends, and of each layer."""
        key = self.kind(stage)
        if key not in self._elements:
            total = Elements.of(self.weights(dataclasses.replace(stage, layers=())))
            for number, count in self.unlike(stage.layers):
                layer = stage.only(number)
                kind = self.kind(layer)
                if kind not in self._elements:
                    self._elements[kind] = Elements.of(self.weights(layer))
                total += self._elements[kind] * count
            self._elements[key] = total
        return self._elements[key]

    @cached_property
    def _parameters(self) -> dict[Hashable, tuple[Weight, ...]]:
        return {}

    @cached_property
    def _elements(self) -> dict[Hashable, Elements]:
        return {}

    @cached_property
    def states(self) -> dict[Hashable, State]:
        """Return the state of ranks by their stages, as far as it has been counted."""
        return {}

    def share(self, other: Network, *, states: bool) -> None:
        """Count nothing again that ``other``, whose ranks hold the same weights, has counted.

        ``states`` says whether they keep the same state between steps, too.
        """
        vars(self).update(_parameters=other._parameters, _elements=other._elements)
        if states:
            vars(self)["states"] = other.states

    @abstractmethod
    def weights(self, stage: Stage) -> list[Weight]:
        """Return the parameters of a stage, in the order of its module's parameters."""

    @abstractmethod
    def activations(self, stage: Stage) -> LayerBytes:
        """Return the bytes of activations of one micro-batch in a stage."""

    def hosted(self, stage: Stage) -> int:
        """Return the bytes of activations per micro-batch that wait in host memory."""
        return 0

    def deferred(self, stage: Stage) -> int:
        """Return the bytes per micro-batch kept from the input- to the weight-gradient pass."""
        return 0

    def fp8_weights(self, stage: Stage) -> int:
        """Return the bytes of a stage's 8-bit copies of weights, see `fp8_bytes`."""
        fp8 = self.config.fp8
        return fp8_bytes(fp8, self.parameters(stage)) if fp8.fp8_format is not None else 0

    @abstractmethod
    def layer(self) -> LayerBytes:
        """Return the activation memory of one layer, for runs that recompute no whole layers.

        If the layers differ, it is one of the most frequent kind, or the last.
        """

    @property
    @abstractmethod
    def layer_input(self) -> int:
        """Return the bytes of a layer's input, which is all that a fully recomputed layer keeps."""

    def loss(self) -> LayerBytes | None:
        """Return the activation memory of output layer and loss; None if reports shall omit it."""
        return None

    def sheets(self) -> list[Sheet]:
        """Return further tables for a report, about what only this network has."""
        return []

    @property
    @abstractmethod
    def boundary(self) -> int:
        """Return the bytes of a message from a stage to the next, for one micro-batch."""

    @abstractmethod
    def flops(self, stage: Stage) -> Flops:
        """Return the operations of one micro-batch in a stage."""

    def work(self, stage: Stage) -> list[Work]:
        """Return the kernels of one micro-batch in a stage, by class and phase."""
        return [*self.products(stage), *self.other_work(stage)]

    def products(self, stage: Stage) -> list[Work]:
        """Return the matrix products, casts to 8 bits and gradient sums of one micro-batch."""
        from megatron_ext.planning.kernels import Phase, Work, cast_of, gradient_bytes

        x = self.flops(stage)
        width = self.sizes.width
        count = self.num_microbatches
        forward = Phase.FORWARD
        inputs = Phase.INPUT
        weights = Phase.WEIGHT
        works = [
            Work("linear", forward, x.linear, width=width),
            Work("linear", forward, x.fp8, width=1),
            Work("linear", inputs, x.linear + x.again, width=width),
            Work("linear", inputs, x.fp8 + x.fp8_again, width=1),
            Work("linear", weights, x.weights, width=width),
            Work("linear", weights, x.fp8_weights, width=1),
            Work("attention", forward, x.scores, width=width),
            # The two forward products and their recomputation, and two gradients for each.
            Work("attention", inputs, ATTENTION_BACKWARD * x.scores + x.scores_again, width=width),
            Work("casts", forward, num_bytes=x.cast / 2),
            Work("casts", inputs, num_bytes=x.cast / 2),
        ]
        elements = self.elements(stage)
        if x.fp8:
            # Only layers in 8 bits cast weights, once in a step.
            numbers = elements.linear * x.fp8 / (x.fp8 + x.linear) / count
            moved = numbers * cast_of(self.config.fp8.fp8_recipe)[0]
            works.append(Work("casts", forward, num_bytes=moved))
        shards = self.config.optimizer.shards_gradients
        graphed = self.config.cuda_graphs.cuda_graph_impl == "local"
        recipe = self.config.fp8.fp8_recipe if x.fp8_weights else None
        summed = gradient_bytes(count, recipe, overwrites=not (shards or graphed))
        if graphed:  # products in CUDA graphs add to sums that are zeroed first
            summed += FP32 / count
        summed *= elements.linear_trained
        works.append(Work("weight gradients", weights, num_bytes=summed))
        if shards:
            works.append(Work("plumbing", weights, num_bytes=self._sharded_bytes(stage)))
        return [work for work in works if work.flops or work.num_bytes]

    def _sharded_bytes(self, stage: Stage) -> float:
        """Return the bytes read and written in GPU memory to shard one micro-batch's gradients.

        A gradient's memory is zeroed before it is filled. After the reduction, this rank's share is
        added to a sum.
        """
        x = self.sizes
        elements = self.elements(stage)
        dense = elements.trained - elements.expert
        own = dense / (x.dp * x.cp) + elements.expert / x.expert_dp
        return FP32 * (elements.trained + 3 * own)

    def other_work(self, stage: Stage) -> list[Work]:
        """Return the kernels of one micro-batch that `products` does not count.

        By default, assume that `LAYER_KERNELS` kernels per layer move the bytes that autograd
        keeps: once in the forward pass and twice in the backward pass.
        """
        from megatron_ext.planning.kernels import Phase, Work

        kept = self.activations(stage).kept
        count = len(stage.layers) * LAYER_KERNELS
        return [
            Work("pointwise", Phase.FORWARD, num_bytes=kept, kernels=count / 3),
            Work("pointwise", Phase.INPUT, num_bytes=2 * kept, kernels=count * 2 / 3),
        ]

    @abstractmethod
    def traffic(self, stage: Stage) -> Volume:
        """Return the bytes that a stage sends for one micro-batch, in both passes."""

    def beside_exchanges(self, stage: Stage) -> Work | None:
        """Return the products of a forward pass that run while tokens travel to experts and back.

        The backward pass has two for each of them. None if there are none.
        """
        return None

    def exchanges(self, stage: Stage) -> tuple[int, float, int]:
        """Return how many layers of a stage have experts that exchange tokens with other ranks.

        The second number is the share of the stage's products that these experts compute. The third
        is the number of layers whose exchanges the backward pass makes again.
        """
        return 0, 0.0, 0

    @abstractmethod
    def step_flops(self) -> float:
        """Return the operations of a training step on all ranks together, without recomputation."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Return the number of tokens of a sample."""

    def messages(self, stage: Stage) -> float:
        """Return the bytes that a stage sends to its neighbours per micro-batch.

        They are its output, unless it is the last stage, and its input's gradient, unless it is the
        first.
        """
        chunks = self.config.parallel.virtual_pipeline_model_parallel_size or 1
        ends = (stage.index < self.sizes.pp * chunks - 1) + (stage.index > 0)
        return float(self.boundary * ends) if self.sizes.pp > 1 else 0.0


@dataclass(frozen=True)
class Case:
    """The cost of a run on batches of one kind, such as batches of samples of one size.

    Attributes:
        network: the cost formulas for such a batch.
        name: name of the kind in a report; empty if the run has only one kind.
        share: fraction of an epoch's steps with this kind.
        columns: further cells for this kind in the report's table, by column heading.
    """

    network: Network
    name: str = ""
    share: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
