"""An estimate of a step's time: products, memory traffic and messages, through the schedule.

It is a model, not a measurement: `assumptions.Efficiency` says which shares of the rates are taken
to be reached. Layouts of one model on one kind of GPU compare well; the seconds are rough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext.planning.assumptions import DEFAULT, Efficiency, Rates, Reserve, reserve
from megatron_ext.planning.communication import Volume, copies_volume, step_volume
from megatron_ext.planning.contents import Stage
from megatron_ext.planning.hardware import Gpu
from megatron_ext.planning.memory import RankMemory, memory, num_microbatches, step_plan
from megatron_ext.planning.models import network_of
from megatron_ext.planning.network import Network
from megatron_ext.schedules.plan import Durations, Plan, Price, price

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class Estimate:
    """What a step costs on a kind of GPU.

    Attributes:
        config: the run.
        network: its model.
        gpu: the kind.
        ranks: memory of each pipeline rank.
        plan: the schedule.
        price: its simulation; times are seconds.
        volumes: bytes that a rank of each place in the pipeline sends in a step.
        seconds: a step.
        flops: operations of the model in a step, on all ranks.
    """

    config: RunConfig
    network: Network
    gpu: Gpu
    ranks: list[RankMemory]
    plan: Plan
    price: Price
    volumes: list[Volume]
    seconds: float
    flops: float

    @property
    def mfu(self) -> float:
        """Operations of the model over what the GPUs could do at the datasheet's 16-bit rate.

        Of float32 that of float32; 8-bit products are compared with 16 bits too, as is usual.
        """
        world = self.config.parallel.world_size
        return self.flops / (self.seconds * world * self.gpu.peak(self.network.sizes.width))

    @property
    def tokens_per_second(self) -> float:
        """On all ranks."""
        x = self.network.sizes
        sequences = num_microbatches(self.config) * x.b * x.dp
        return sequences * self.network.tokens / self.seconds

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most, without the reserve."""
        return self.fullest.total

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)

    @cached_property
    def reserve(self) -> Reserve:
        """What the fullest rank must leave free."""
        return reserve_of(self.gpu, self.network, self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank leaves the reserve."""
        return self.peak + self.reserve.total <= self.gpu.memory


def reserve_of(gpu: Gpu, network: Network, ranks: list[RankMemory]) -> Reserve:
    """What the fullest of some ranks must leave free."""
    fullest = max(ranks, key=lambda rank: rank.total)
    return reserve(gpu, network.sizes, fullest.activations + fullest.transient)


@dataclass(frozen=True)
class _Clock:
    """Times of one stage on a kind of GPU."""

    network: Network
    rates: Rates

    def durations(self, stage: Stage) -> Durations:
        """Forward, input-gradient and weight-gradient pass of one micro-batch."""
        network = self.network
        counted, width = network.operations(stage), network.sizes.width
        rate, rate8 = self.rates.products(width), 1.0
        if counted.fp8:
            rate8 = self.rates.products(1)
        linear = counted.linear / rate + counted.fp8 / rate8
        scores = counted.scores / rate
        weights = counted.weights / rate + counted.fp8_weights / rate8
        again = counted.again / rate + counted.fp8_again / rate8
        cast = counted.cast / self.rates.memory / 2
        touched = network.activations(stage).kept / self.rates.memory
        sent = self.exchange(network.traffic(stage)) / 2
        forward = linear + scores + cast + touched + sent
        # Of a product without weights both factors have gradients.
        inputs = linear + 2 * scores + cast + again + 2 * touched + sent
        return Durations(forward, inputs, weights)

    def exchange(self, volume: Volume) -> float:
        """Seconds of the collectives within a micro-batch's passes; pipelines are simulated."""
        x, link = self.network.sizes, self.rates.link
        return (
            volume.tensor / link(x.tp)
            + volume.context / link(x.tp * x.cp)
            + volume.expert / link(x.etp * x.ep)
        )

    def latency(self) -> float:
        """Of a message between stages."""
        x = self.network.sizes
        mapped = self.network.config.parallel.use_tp_pp_dp_mapping
        stride = x.tp * x.cp * (1 if mapped else x.dp)
        return self.network.boundary / self.rates.link(stride * x.pp) if x.pp > 1 else 0.0

    def update(self, rank: RankMemory) -> float:
        """Seconds of the optimizer: its state, gradients and parameters, read and written."""
        state = rank.state
        trained = state.parameters - state.frozen
        moved = 2 * (state.optimizer + state.average) + state.gradients + trained
        return moved / self.rates.memory

    def replicas(self, volume: Volume) -> float:
        """Seconds of the exchange between replicas that computation does not hide."""
        x, flags = self.network.sizes, self.network.config.optimizer
        ranks, link = x.dp * x.cp, self.rates.link
        seconds = volume.data / link(x.tp * ranks) if ranks > 1 else 0.0
        shown = 1.0
        if flags.overlap_grad_reduce:
            both = flags.overlap_param_gather or not flags.use_distributed_optimizer
            shown -= self.rates.efficiency.hidden * (1.0 if both else 0.5)
        return seconds * shown + volume.embedding / link(x.tp * ranks * x.pp)


def estimate(
    config: RunConfig,
    gpu: Gpu,
    efficiency: Efficiency = DEFAULT,
    network: Network | None = None,
) -> Estimate:
    """Estimate a step of a run.

    The stages are priced as if all took as long as the slowest one, which is what a pipeline in
    its steady phase waits for.

    Args:
        config: a resolved run; of text with its vocabulary.
        gpu: the kind of GPU.
        efficiency: see `Efficiency`.
        network: its model; None for that of a text run.

    Raises:
        ConfigError: see `network_of`; fp8 on a GPU without it.
    """
    network = network or network_of(config)
    clock, plan = _Clock(network, Rates(gpu, efficiency)), step_plan(config)
    cost = price(plan, _slowest(clock, network.stages()), clock.latency())
    ranks = memory(config, plan, network)
    volumes = [rank_volume(network, rank, plan.num_microbatches) for rank in ranks]
    after = max(
        clock.update(rank) + clock.replicas(volume)
        for rank, volume in zip(ranks, volumes, strict=True)
    )
    return Estimate(
        config=config,
        network=network,
        gpu=gpu,
        ranks=ranks,
        plan=plan,
        price=cost,
        volumes=volumes,
        seconds=cost.makespan + after,
        flops=network.step_flops(),
    )


def _slowest(clock: _Clock, everything: list[Stage]) -> Durations:
    """The mean over its chunks of the rank whose passes take longest."""
    ranks = []
    for rank in range(clock.network.sizes.pp):
        times = [clock.durations(stage) for stage in everything if stage.rank == rank]
        sums = [
            sum(getattr(time, name) for time in times) / len(times)
            for name in ("forward", "input_gradient", "weight_gradient")
        ]
        ranks.append(Durations(*sums))
    return max(ranks, key=lambda x: x.forward + x.input_gradient + x.weight_gradient)


def rank_volume(network: Network, rank: RankMemory, num_microbatches: int) -> Volume:
    """What a rank of one place in the pipeline sends in a step."""
    total = Volume()
    for stage in rank.stages:
        total += network.traffic(stage) * num_microbatches
    every = [weight for chunk in rank.weights for weight in chunk]
    trained = [weight for weight in every if not weight.frozen]
    experts = sum(weight.numel for weight in trained if weight.expert)
    count = sum(weight.numel for weight in trained)
    config, sizes = network.config, network.sizes
    total += step_volume(config, sizes, rank.state, experts / max(1, count))
    shared = sum(weight.numel for weight in trained if weight.shared)
    return total + copies_volume(config, sizes, shared)
