"""An estimate of a step's time.

The estimate is a model, not a measurement, and depends on the assumptions in `hardware.Efficiency`.
It compares layouts of one model on one kind of GPU well, but its seconds are rough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.planning.hardware import DEFAULT, Efficiency, Rates, reserve_on, size
from megatron_ext.planning.kernels import Phase, Work, update_work
from megatron_ext.planning.memory import RankMemory, fullest, memory, stored
from megatron_ext.planning.muon import muon_volume, muon_work
from megatron_ext.planning.network import Elements, Network, Volume, ring
from megatron_ext.planning.pipeline import PipelineTime
from megatron_ext.planning.stages import Stage
from megatron_ext.planning.state import State
from megatron_ext.schedules.plan import Durations, Kind

TIGHT = 0.05
"""The share of a GPU's memory below which a plan says that little is left."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a step on a kind of GPU.

    Attributes:
        ranks: memory of each pipeline rank.
        price: time and bubble of the pipeline schedule, in seconds.
        seconds: time of a step, including the optimizer's update.
        flops: operations of a step on all ranks together, without recomputation.
    """

    network: Network
    rates: Rates
    ranks: list[RankMemory]
    price: PipelineTime
    seconds: float
    flops: float

    @property
    def gpu(self) -> Gpu:
        """Return the kind of GPU for which the step is estimated."""
        return self.rates.gpu

    @property
    def matrix_share(self) -> float:
        """Return the fraction of a step's time that its operations alone would take.

        All operations are assumed to run at the rate of large matrix products. Recomputed
        operations are not counted.
        """
        large = self.rates.products(self.network.sizes.width)
        return self.flops / (self.seconds * self.network.config.parallel.world_size * large)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization of a step.

        This is the model's operations over those that the GPUs could do in the same time at the
        datasheet's rate. By convention, runs in fp8 are compared with the 16-bit rate.
        """
        world = self.network.config.parallel.world_size
        return self.flops / (self.seconds * world * self.gpu.peak(self.network.sizes.width))

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second that all ranks together train on."""
        x = self.network.sizes
        sequences = self.network.num_microbatches * x.b * x.dp
        return sequences * self.network.tokens / self.seconds

    @property
    def peak(self) -> int:
        """Return the peak bytes of the fullest rank, without the memory that must stay free."""
        return fullest(self.ranks).total

    @property
    def reserve(self) -> dict[str, int]:
        """Return the bytes that the fullest rank must leave free, by use; see `reserve_on`."""
        return _reserve(self.gpu, self.network, self.ranks)

    @property
    def needed(self) -> int:
        """Return the bytes that the fullest rank's `peak` and `reserve` take together."""
        return needed_on(self.gpu, self.network, self.ranks)

    @property
    def fits(self) -> bool:
        """Return whether the bytes that are `needed` fit the GPU's memory."""
        return self.needed <= self.gpu.memory

    @property
    def free_share(self) -> float:
        """Return the fraction of the GPU's memory that is not `needed`; below 0 if it is short."""
        return 1 - self.needed / self.gpu.memory

    @property
    def is_tight(self) -> bool:
        """Return whether the run fits, but with less than `TIGHT` of the memory left."""
        return 0 <= self.free_share < TIGHT


def memory_use(estimated: Estimate) -> str:
    """Return a text with the memory that the fullest rank needs; it warns if it just fits."""
    reserve = sum(estimated.reserve.values())
    text = (
        f"{size(estimated.peak)} and a reserve of {size(reserve)} make "
        f"{size(estimated.needed)} of {size(estimated.gpu.memory)}"
    )
    if not estimated.is_tight:
        return text
    return (
        f"{text}; this leaves {estimated.free_share:.1%}, so a small error of the estimate can let "
        "the run fail for lack of memory"
    )


def _reserve(gpu: Gpu, network: Network, ranks: Sequence[RankMemory]) -> dict[str, int]:
    most = fullest(ranks)
    return reserve_on(gpu, network.sizes, most.activations + most.transient)


def needed_on(gpu: Gpu, network: Network, ranks: Sequence[RankMemory]) -> int:
    """Return the bytes that the fullest rank's peak and the reserve take together on a GPU."""
    return fullest(ranks).total + sum(_reserve(gpu, network, ranks).values())


@dataclass(frozen=True)
class Clock:
    """Computes the times of the parts of a step on a kind of GPU, in seconds."""

    network: Network
    rates: Rates

    def durations(self, stage: Stage) -> Durations:
        """Return the times of one micro-batch's three passes through a stage.

        They are the forward, the input-gradient and the weight-gradient pass. With
        ``--overlap-moe-expert-parallel-comm`` the result also has the time that a pair of passes
        hides. If some micro-batches recompute fewer layers than others, the times are means.
        """
        alike = self._alike(stage)
        whole = self.network.schedule.whole_share(stage.rank)
        if not whole:
            return alike
        again = Clock(self.network.recomputing_all, self.rates)._alike(stage)
        parts = zip(astuple(alike), astuple(again), strict=True)
        return Durations(*(few * (1 - whole) + all_ * whole for few, all_ in parts))

    def _alike(self, stage: Stage) -> Durations:
        """Return the `durations` of a micro-batch that recomputes ``--recompute-num-layers``."""
        network = self.network
        times = dict.fromkeys(Phase, 0.0)
        for work in network.work(stage):
            times[work.phase] += self.rates.seconds(work)
        volume = network.traffic(stage)
        sent = self.exchange(volume) / 2
        beside = self.beside_exchanges(stage)
        forward = times[Phase.FORWARD] + sent - beside[0]
        inputs = times[Phase.INPUT] + sent - beside[1]
        weights = times[Phase.WEIGHT]
        if network.config.offload.moves_activations:
            from megatron_ext.planning.offload import copy_seconds

            # Copies run beside the passes, which take no less time.
            copied = copy_seconds(network, stage)
            forward = max(forward, copied)
            inputs = max(inputs, copied - weights)
        hidden = 0.0
        if network.schedule.pairs:
            from megatron_ext.schedules.pair_time import hidden_time

            experts = self.hideable_exchange(volume)
            computing = forward - experts / 2, inputs + weights - experts / 2
            early = network.config.parallel.ep_overlap_early_attn_memory_release
            layers, inside, again = network.exchanges(stage)
            hidden = hidden_time(*computing, experts, layers, inside, again, early=early)
            hidden *= self.rates.efficiency.hidden
        return Durations(forward, inputs, weights, hidden)

    def beside_exchanges(self, stage: Stage) -> tuple[float, float]:
        """Return the time of a micro-batch's forward and backward pass that products hide.

        They are the products that run while tokens travel to experts and back.
        """
        work = self.network.beside_exchanges(stage)
        if work is None:
            return 0.0, 0.0
        products = self.rates.busy(work)
        exchanged = self.experts_exchange(self.network.traffic(stage)) / 2
        hidden = self.rates.efficiency.hidden
        return hidden * min(products, exchanged), hidden * min(2 * products, exchanged)

    def exchange(self, volume: Volume) -> float:
        """Return the time of the tensor, context and expert collectives counted in ``volume``."""
        x = self.network.sizes
        rates = self.rates
        if self.network.config.parallel.cp_comm_type[0] == "a2a":
            context = rates.all_to_all(volume.context, x.cp, x.tp)
        else:
            context = volume.context / rates.ring(x.cp, x.tp)
        tensor = volume.tensor / rates.ring(x.tp)
        if self.network.config.engine.tp_comm_overlap:
            # Products wait at least for the first of the pieces into which each message is cut.
            tensor *= max(1 / x.tp, 1 - rates.efficiency.hidden)
        return tensor + context + self.experts_exchange(volume)

    def experts_exchange(self, volume: Volume) -> float:
        """Return the time in which tokens go to experts on other ranks, and their outputs back."""
        if volume.expert_in_node:
            # Two hops, one after the other: between nodes, and inside them.
            return self._between_nodes(volume) + volume.expert_in_node / self.rates.link(1)
        x = self.network.sizes
        return self.rates.all_to_all(volume.expert, x.etp * x.ep)

    def hideable_exchange(self, volume: Volume) -> float:
        """Return the part of `experts_exchange` in which another pass of a pair may compute.

        If tokens make two hops, only the one between nodes gives way to the other pass.
        """
        if volume.expert and volume.expert_in_node:
            return self._between_nodes(volume)
        return self.experts_exchange(volume)

    def _between_nodes(self, volume: Volume) -> float:
        x = self.network.sizes
        return volume.expert / self.rates.link(x.etp * x.ep)

    @property
    def _between(self) -> int:
        """Return the number of pipeline stages whose ranks stand between neighbouring replicas."""
        mapped = self.network.config.parallel.use_tp_pp_dp_mapping
        return self.network.sizes.pp if mapped else 1

    def _replica_ring(self) -> float:
        """Return the bytes per second that a rank can send in a ring of replicas."""
        x = self.network.sizes
        return self.rates.ring(x.dp * x.cp, x.tp * self._between)

    def latency(self) -> float:
        """Return the time of one micro-batch's message between stages."""
        x = self.network.sizes
        mapped = self.network.config.parallel.use_tp_pp_dp_mapping
        stride = x.tp * x.cp * (1 if mapped else x.dp)
        return self.network.boundary / self.rates.link(stride * x.pp) if x.pp > 1 else 0.0

    def update_work(self, rank: RankMemory) -> list[Work]:
        """Return the kernels of the optimizer's update."""
        flags = self.network.config.optimizer
        sizes = self.network.sizes
        work = update_work(flags, sizes, rank.state)
        return work + (muon_work(flags, sizes, rank.all_weights) if _uses_muon(flags) else [])

    def after(self, rank: RankMemory) -> float:
        """Return the time from the last backward pass to the end of the step.

        It includes the optimizer's update and the communication between replicas.
        """
        network = self.network
        volume = replica_volume(network, rank.stages, rank.state, network.num_microbatches)
        work = sum(map(self.rates.seconds, self.update_work(rank)))
        if rank.state.hosted:
            from megatron_ext.planning.offload import update_seconds

            work += update_seconds(network, rank.state)
        return work + self.update_exchange(rank) + self.replicas(volume)

    def update_exchange(self, rank: RankMemory) -> float:
        """Return the time of communication within the optimizer's update, which only Muon needs."""
        sent = update_volume(self.network, rank)
        return self.exchange(sent) + sent.data / self._replica_ring()

    def replicas(self, volume: Volume) -> float:
        """Return the time of communication between replicas that computation does not hide.

        ``volume`` is that of a step. The time includes the exchange of gradients between copies of
        the word embedding.
        """
        x = self.network.sizes
        flags = self.network.config.optimizer
        experts = self.rates.ring(x.expert_dp, x.etp * x.ep * self._between)
        seconds = volume.expert_data / experts if x.expert_dp > 1 else 0.0
        if x.dp * x.cp > 1:
            seconds += volume.data / self._replica_ring()
        shown = 1.0
        if flags.shards_weights:
            reduced = self.network.gradient_width
            overlapped = 2 * x.width + (reduced if flags.overlap_grad_reduce else 0)
            shown -= self.rates.efficiency.hidden * overlapped / (2 * x.width + reduced)
        elif flags.overlap_grad_reduce:
            both = flags.overlap_param_gather or not flags.use_distributed_optimizer
            shown -= self.rates.efficiency.hidden * (1.0 if both else 0.5)
        across = self.rates.link(x.tp * x.dp * x.cp * x.pp)
        return seconds * shown + volume.embedding / across

    def longest_end(self, ranks: Iterable[RankMemory]) -> float:
        """Return the longest time from a rank's last backward pass to the end of the step."""
        unlike = {(rank.state, *map(self.network.kind, rank.stages)): rank for rank in ranks}
        return max(map(self.after, unlike.values()))

    def rank_durations(self) -> list[Durations]:
        """Return the three pass times of each pipeline rank, averaged over its chunks."""
        stages = self.network.stages()
        counted = self.network.of_stages(self.durations, stages)
        ranks: list[list[tuple[float, ...]]] = [[] for _ in range(self.network.sizes.pp)]
        for stage, times in zip(stages, counted, strict=True):
            ranks[stage.rank].append(astuple(times))
        return [
            Durations(*(sum(part) / len(times) for part in zip(*times, strict=True)))
            for times in ranks
        ]

    def steady(self, durations: Durations) -> float:
        """Return the time of a micro-batch's passes through a stage in the steady phase."""
        return durations.of(Kind.PAIR) if self.network.schedule.pairs else durations.passes

    def slowest(self) -> int:
        """Return the pipeline rank whose passes take longest."""
        durations = self.rank_durations()
        return max(range(len(durations)), key=lambda rank: self.steady(durations[rank]))


def estimate(
    network: Network,
    gpu: Gpu,
    efficiency: Efficiency = DEFAULT,
    ranks: list[RankMemory] | None = None,
) -> Estimate:
    """Estimate the time and memory of a run's step on ``gpu``.

    All stages are assumed to be as slow as the slowest one, which determines the steady phase of a
    pipeline. ``ranks`` is the memory of the pipeline ranks; None to compute it.

    Raises:
        ConfigError: the run uses fp8, which the GPU lacks.
    """
    rates = Rates(gpu, efficiency)
    clock = Clock(network, rates)
    ranks = ranks or memory(network)
    slowest = max(clock.rank_durations(), key=clock.steady)
    cost = network.schedule.time(slowest, clock.latency())
    seconds = cost.makespan + clock.longest_end(ranks)
    return Estimate(network, rates, ranks, cost, seconds, network.step_flops())


FILLED = "1f1b", "interleaved"
"""Schedules in which the last rank starts after a pass on each other rank, and ends before one."""


def least_seconds(network: Network, gpu: Gpu) -> float:
    """Return a lower bound of what `estimate` returns, without simulating the schedule.

    A rank is only idle until its first micro-batch arrives, and after its last one.
    """
    clock = Clock(network, Rates(gpu, DEFAULT))
    slowest = max(clock.rank_durations(), key=clock.steady)
    schedule = network.schedule
    passes = slowest.passes * schedule.num_microbatches * schedule.num_chunks
    # The way from the first rank and back, for one micro-batch.
    step = slowest.passes + 2 * clock.latency()
    ranks = (0, schedule.pipeline_size - 1) if schedule.name in FILLED else (0,)
    busy = max(step * rank - slowest.hidden * schedule.num_pairs(rank) for rank in ranks)
    return passes + busy + clock.longest_end(stored(network))


def _uses_muon(flags: OptimizerConfig) -> bool:
    return flags.optimizer == "muon"


def rank_volume(network: Network, rank: RankMemory, num_microbatches: int) -> Volume:
    """Return the bytes that a pipeline rank sends in a step."""
    return step_volume(network, rank, num_microbatches) + update_volume(network, rank)


def update_volume(network: Network, rank: RankMemory) -> Volume:
    """Return the bytes that a pipeline rank sends within the optimizer's update; 0 without Muon."""
    flags = network.config.optimizer
    if not _uses_muon(flags):
        return Volume()
    return muon_volume(flags, network.sizes, rank.all_weights)


def step_volume(network: Network, rank: RankMemory, num_microbatches: int) -> Volume:
    """Return the bytes that a pipeline rank sends in a step outside the update."""
    total = Volume()
    for stage in rank.stages:
        total += network.traffic(stage) * num_microbatches
    return total + replica_volume(network, rank.stages, rank.state, num_microbatches)


def gradient_volume(network: Network, stages: Sequence[Stage]) -> Volume:
    """Return the bytes of `replica_volume` if no buffer of gradients had any padding."""
    trained = sum(network.elements(stage).trained for stage in stages)
    gathered = 1 if network.config.fp8.fp8_param_gather else network.sizes.width
    state = State(reduced=trained * network.gradient_width, gathered=trained * gathered)
    return replica_volume(network, stages, state, network.num_microbatches)


def replica_volume(
    network: Network, stages: Sequence[Stage], state: State, num_microbatches: int
) -> Volume:
    """Return the bytes that a rank with these stages and state sends to its replicas in a step."""
    config = network.config
    x = network.sizes
    elements = sum((network.elements(stage) for stage in stages), Elements())
    experts = elements.expert / max(1, elements.trained)
    moved = 2 * state.reduced
    if config.optimizer.use_distributed_optimizer:
        times = num_microbatches if config.optimizer.shards_gradients else 1
        # Sharded weights are gathered in each of a micro-batch's two passes.
        gathers = 2 * num_microbatches if config.optimizer.shards_weights else 1
        moved = times * state.reduced + gathers * state.gathered
    data = ring(x.dp * x.cp) * (1 - experts) * moved
    expert_data = ring(x.expert_dp) * experts * moved
    embedding = float(elements.shared * network.gradient_width)
    return Volume(data=data, expert_data=expert_data, embedding=embedding)
