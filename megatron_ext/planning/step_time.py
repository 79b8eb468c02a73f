"""An estimate of a step's time: products, memory traffic and messages, through the schedule.

It is a model, not a measurement: `Efficiency` says which share of the datasheet's rates kernels are
taken to reach. Layouts of one model on one kind of GPU compare well; the seconds are rough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.planning.activations import Activations
from megatron_ext.planning.communication import Traffic, Volume
from megatron_ext.planning.contents import Sizes, Stage, stages
from megatron_ext.planning.flops import Operations, step_flops
from megatron_ext.planning.hardware import Gpu
from megatron_ext.planning.memory import RankMemory, memory, step_plan
from megatron_ext.schedules import Durations, Plan, Price, price

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's rates that are reached.

    Attributes:
        products: matrix products, of the dense rate.
        memory: kernels that read and write, of the memory bandwidth.
        links: collectives, of a link's bandwidth.
        hidden: share of the replicas' exchange that overlaps with computation, where the run
            asks for overlap.

    Raises:
        ConfigError: a share outside of (0, 1], or of [0, 1] for what is hidden.
    """

    products: float = 0.7
    memory: float = 0.8
    links: float = 0.75
    hidden: float = 0.8

    def __post_init__(self) -> None:
        found = [
            f"`{name}` ({value}) must be above 0 and at most 1; use 0.7."
            for name, value in vars(self).items()
            if not (0 <= value <= 1) or (value == 0 and name != "hidden")
        ]
        if found:
            raise ConfigError(found)


DEFAULT = Efficiency()


@dataclass(frozen=True)
class Estimate:
    """What a step costs on a kind of GPU.

    Attributes:
        config: the run.
        gpu: the kind.
        ranks: memory of each pipeline rank.
        plan: the schedule.
        price: its simulation; times are seconds.
        volumes: bytes that a rank of each place in the pipeline sends in a step.
        seconds: a step.
        flops: operations of the model in a step, on all ranks.
    """

    config: RunConfig
    gpu: Gpu
    ranks: list[RankMemory]
    plan: Plan
    price: Price
    volumes: list[Volume]
    seconds: float
    flops: float

    @property
    def mfu(self) -> float:
        """Operations of the model over what the GPUs could do at the dense rate of its type."""
        width = Sizes.of(self.config).width
        world = self.config.parallel.world_size
        return self.flops / (self.seconds * world * self.gpu.peak(width))

    @property
    def tokens_per_second(self) -> float:
        """On all ranks."""
        batch = self.config.training.batch_sizes[1]
        return batch * (self.config.model.seq_length or 0) / self.seconds

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(rank.total for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank leaves room for the CUDA context and the caches of libraries."""
        return self.peak <= USABLE * self.gpu.memory


USABLE = 0.92
"""Share of a GPU's memory that torch's allocator may fill: context, NCCL and cuBLAS take the rest,
as does fragmentation."""


@dataclass(frozen=True)
class _Clock:
    """Times of one stage on a kind of GPU."""

    config: RunConfig
    sizes: Sizes
    gpu: Gpu
    efficiency: Efficiency

    def durations(self, stage: Stage) -> Durations:
        """Forward, input-gradient and weight-gradient pass of one micro-batch."""
        operations = Operations(self.config, self.sizes)
        rate = self.gpu.peak(self.sizes.width) * self.efficiency.products
        forward = operations.stage(stage) / rate
        again = operations.recomputed(stage) / rate
        kept = Activations(self.config, self.sizes).stage(stage).kept
        touched = kept / (self.gpu.memory_bandwidth * self.efficiency.memory)
        sent = self.exchange(Traffic(self.config, self.sizes).microbatch(stage))
        return Durations(
            forward + touched + sent / 2, forward + again + 2 * touched + sent / 2, forward
        )

    def exchange(self, volume: Volume) -> float:
        """Seconds of the collectives within a micro-batch's passes; pipelines are simulated."""
        x = self.sizes
        return (
            volume.tensor / self.bandwidth(x.tp)
            + volume.context / self.bandwidth(x.tp * x.cp)
            + volume.expert / self.bandwidth(x.etp * x.ep)
        )

    def bandwidth(self, span: int) -> float:
        """Bytes a second between ranks of which ``span`` neighbours form a group."""
        link = self.gpu.link if span <= self.gpu.per_node else self.gpu.network
        return link * self.efficiency.links

    def latency(self, traffic: Traffic, stage: Stage) -> float:
        """Of a message between stages."""
        x = self.sizes
        stride = x.tp * x.cp * (1 if self.config.parallel.use_tp_pp_dp_mapping else x.dp)
        tensor = x.residual_tokens * x.h * x.width
        return tensor / self.bandwidth(stride * x.pp) if x.pp > 1 else 0.0

    def update(self, rank: RankMemory) -> float:
        """Seconds of the optimizer: its state, gradients and parameters, read and written."""
        state = rank.state
        moved = 2 * (state.optimizer + state.average) + state.gradients + state.parameters
        return moved / (self.gpu.memory_bandwidth * self.efficiency.memory)

    def replicas(self, volume: Volume) -> float:
        """Seconds of the exchange between replicas that computation does not hide."""
        x, flags = self.sizes, self.config.optimizer
        ranks = x.dp * x.cp
        seconds = volume.data / self.bandwidth(x.tp * ranks) if ranks > 1 else 0.0
        shown = 1.0
        if flags.overlap_grad_reduce:
            both = flags.overlap_param_gather or not flags.use_distributed_optimizer
            shown -= self.efficiency.hidden * (1.0 if both else 0.5)
        return seconds * shown + volume.embedding / self.bandwidth(x.tp * ranks * x.pp)


def estimate(config: RunConfig, gpu: Gpu, efficiency: Efficiency = DEFAULT) -> Estimate:
    """Estimate a step of a run.

    The stages are priced as if all took as long as the slowest one, which is what a pipeline in
    its steady phase waits for.

    Args:
        config: a resolved text run with its vocabulary.
        gpu: the kind of GPU.
        efficiency: see `Efficiency`.

    Raises:
        ConfigError: see `Sizes.of`.
    """
    sizes = Sizes.of(config)
    clock, everything = _Clock(config, sizes, gpu, efficiency), stages(config)
    traffic, plan = Traffic(config, sizes), step_plan(config)
    slowest = _slowest(clock, everything, sizes)
    cost = price(plan, slowest, clock.latency(traffic, everything[0]))
    ranks = memory(config, plan)
    volumes = [rank_volume(traffic, rank, plan.num_microbatches) for rank in ranks]
    after = max(
        clock.update(rank) + clock.replicas(volume)
        for rank, volume in zip(ranks, volumes, strict=True)
    )
    return Estimate(
        config=config,
        gpu=gpu,
        ranks=ranks,
        plan=plan,
        price=cost,
        volumes=volumes,
        seconds=cost.makespan + after,
        flops=step_flops(config, sizes, everything),
    )


def _slowest(clock: _Clock, everything: list[Stage], sizes: Sizes) -> Durations:
    """The mean over its chunks of the rank whose passes take longest."""
    ranks = []
    for rank in range(sizes.pp):
        times = [clock.durations(stage) for stage in everything if stage.rank == rank]
        sums = [
            sum(getattr(time, name) for time in times) / len(times)
            for name in ("forward", "input_gradient", "weight_gradient")
        ]
        ranks.append(Durations(*sums))
    return max(ranks, key=lambda x: x.forward + x.input_gradient + x.weight_gradient)


def rank_volume(traffic: Traffic, rank: RankMemory, num_microbatches: int) -> Volume:
    """What a rank of one place in the pipeline sends in a step."""
    total = Volume()
    for stage in rank.stages:
        total += traffic.microbatch(stage) * num_microbatches
    every = [weight for chunk in rank.weights for weight in chunk]
    experts = sum(weight.numel for weight in every if weight.expert)
    total += traffic.step(rank.state, experts / max(1, rank.state.count))
    return total + traffic.copies(sum(weight.numel for weight in every if weight.shared))
