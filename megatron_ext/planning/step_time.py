"""An estimate of a step's time: products, memory traffic and messages, through the schedule.

It is a model, not a measurement: `hardware.Efficiency` says which shares of the rates are taken to
be reached. Layouts of one model on one kind of GPU compare well; the seconds are rough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.planning.hardware import DEFAULT, Efficiency, Rates, Reserve
from megatron_ext.planning.memory import RankMemory, fullest, memory, num_microbatches, step_plan
from megatron_ext.planning.network import Network, Volume, ring
from megatron_ext.planning.stages import FP32, Stage
from megatron_ext.schedules.plan import Durations, Plan, Price, price


@dataclass(frozen=True)
class Estimate:
    """The cost of a step on a kind of GPU.

    Attributes:
        network: the model in its run.
        gpu: the kind.
        ranks: memory of each pipeline rank.
        plan: the schedule.
        price: the simulation of the schedule; times are seconds.
        volumes: bytes that a rank of each place in the pipeline sends in a step.
        seconds: time of a step.
        flops: operations of the model in a step, on all ranks.
    """

    network: Network
    gpu: Gpu
    ranks: list[RankMemory]
    plan: Plan
    price: Price
    volumes: list[Volume]
    seconds: float
    flops: float

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        return self.network.config

    @property
    def mfu(self) -> float:
        """Return the operations of the model over what the GPUs could do by the datasheet.

        The rate is that of float32 or of 16 bits; 8-bit products are compared with 16 bits too, as
        is usual.
        """
        world = self.config.parallel.world_size
        return self.flops / (self.seconds * world * self.gpu.peak(self.network.sizes.width))

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens that all ranks together go through in a second."""
        x = self.network.sizes
        sequences = num_microbatches(self.config) * x.b * x.dp
        return sequences * self.network.tokens / self.seconds

    @property
    def peak(self) -> int:
        """Return the bytes of the rank that needs most, without the reserve."""
        return fullest(self.ranks).total

    @cached_property
    def reserve(self) -> Reserve:
        """Return what the fullest rank must leave free."""
        return reserve_of(self.gpu, self.network, self.ranks)

    @property
    def fits(self) -> bool:
        """Return whether the fullest rank leaves the reserve."""
        return self.peak + self.reserve.total <= self.gpu.memory


def reserve_of(gpu: Gpu, network: Network, ranks: list[RankMemory]) -> Reserve:
    """Return what the fullest of some ranks must leave free."""
    most = fullest(ranks)
    return Reserve.of(gpu, network.sizes, most.activations + most.transient)


@dataclass(frozen=True)
class _Clock:
    """Times of the parts of a step on a kind of GPU, in seconds."""

    network: Network
    rates: Rates

    def durations(self, stage: Stage) -> Durations:
        """Return forward, input-gradient and weight-gradient pass of one micro-batch."""
        network = self.network
        counted, width = network.flops(stage), network.sizes.width
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
        # Both factors of a product without weights have gradients.
        inputs = linear + 2 * scores + cast + again + 2 * touched + sent
        return Durations(forward, inputs, weights)

    def exchange(self, volume: Volume) -> float:
        """Return the time of the collectives within a micro-batch's passes.

        Messages between stages are left to the simulation of the schedule.
        """
        x, link = self.network.sizes, self.rates.link
        return (
            volume.tensor / link(x.tp)
            + volume.context / link(x.tp * x.cp)
            + volume.expert / link(x.etp * x.ep)
        )

    def latency(self) -> float:
        """Return the time of a message between stages."""
        x = self.network.sizes
        mapped = self.network.config.parallel.use_tp_pp_dp_mapping
        stride = x.tp * x.cp * (1 if mapped else x.dp)
        return self.network.boundary / self.rates.link(stride * x.pp) if x.pp > 1 else 0.0

    def update(self, rank: RankMemory) -> float:
        """Return the time in which the optimizer reads and writes its state and parameters."""
        state = rank.state
        trained = state.parameters - state.frozen
        moved = 2 * (state.optimizer + state.average) + state.gradients + trained
        return moved / self.rates.memory

    def replicas(self, volume: Volume) -> float:
        """Return the time of the exchange between replicas that computation does not hide."""
        x, flags = self.network.sizes, self.network.config.optimizer
        ranks, link = x.dp * x.cp, self.rates.link
        seconds = volume.data / link(x.tp * ranks) if ranks > 1 else 0.0
        shown = 1.0
        if flags.overlap_grad_reduce:
            both = flags.overlap_param_gather or not flags.use_distributed_optimizer
            shown -= self.rates.efficiency.hidden * (1.0 if both else 0.5)
        return seconds * shown + volume.embedding / link(x.tp * ranks * x.pp)

    def slowest(self) -> Durations:
        """Return the times of the slowest rank, averaged over its chunks."""
        ranks, stages = [], self.network.stages()
        for rank in range(self.network.sizes.pp):
            times = [self.durations(stage) for stage in stages if stage.rank == rank]
            sums = [
                sum(getattr(time, name) for time in times) / len(times)
                for name in ("forward", "input_gradient", "weight_gradient")
            ]
            ranks.append(Durations(*sums))
        return max(ranks, key=lambda x: x.forward + x.input_gradient + x.weight_gradient)


def estimate(network: Network, gpu: Gpu, efficiency: Efficiency = DEFAULT) -> Estimate:
    """Estimate a step of a run.

    The stages are priced as if all took as long as the slowest one, which is what a pipeline in
    its steady phase waits for.

    Raises:
        ConfigError: fp8 on a GPU without it.
    """
    clock, plan = _Clock(network, Rates(gpu, efficiency)), step_plan(network.config)
    cost = price(plan, clock.slowest(), clock.latency())
    ranks = memory(network, plan)
    volumes = [rank_volume(network, rank, plan.num_microbatches) for rank in ranks]
    after = max(
        clock.update(rank) + clock.replicas(volume)
        for rank, volume in zip(ranks, volumes, strict=True)
    )
    return Estimate(
        network=network,
        gpu=gpu,
        ranks=ranks,
        plan=plan,
        price=cost,
        volumes=volumes,
        seconds=cost.makespan + after,
        flops=network.step_flops(),
    )


def rank_volume(network: Network, rank: RankMemory, num_microbatches: int) -> Volume:
    """Return what a rank of one place in the pipeline sends in a step."""
    total = Volume()
    for stage in rank.stages:
        total += network.traffic(stage) * num_microbatches
    return total + _replica_volume(network, rank)


def _replica_volume(network: Network, rank: RankMemory) -> Volume:
    """Return what a rank sends once in a step: gradients, parameters, copies of the embedding."""
    config, x, state = network.config, network.sizes, rank.state
    trained = [weight for chunk in rank.weights for weight in chunk if not weight.frozen]
    count = max(1, sum(weight.numel for weight in trained))
    experts = sum(weight.numel for weight in trained if weight.expert) / count
    share = ring(x.dp * x.cp) * (1 - experts) + ring(x.expert_dp) * experts
    if config.optimizer.use_distributed_optimizer:
        data = share * (state.gradients + state.parameters - state.frozen)
    else:
        data = 2 * share * state.gradients
    copied = sum(weight.numel for weight in trained if weight.shared)
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    return Volume(data=data, embedding=float(copied * (FP32 if in_fp32 else x.width)))
