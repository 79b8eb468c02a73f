"""The best layouts of a model on a number of GPUs: enumerate, check, price, sort."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_ext.config.finalize import finalize
from megatron_ext.config.run import RunConfig, TaskFlags
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError
from megatron_ext.planning.hardware import DEFAULT, Efficiency
from megatron_ext.planning.memory import fullest, worst_case
from megatron_ext.planning.network import TaskCost
from megatron_ext.planning.step_time import Estimate, estimate, reserve_of

MOST_CHUNKS = 4
MOST_REASONS = 5


@dataclass(frozen=True)
class Candidate:
    """A layout to try.

    Attributes:
        tp, pp, cp, ep: ranks along each axis.
        chunks: virtual chunks of each pipeline rank.
        micro_batch: samples of a forward pass.
        recompute: a mode of recomputation, see `TaskCost.modes`.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    chunks: int
    micro_batch: int
    recompute: str

    def of(self, config: RunConfig, task: TaskFlags, world_size: int, cost: TaskCost) -> RunConfig:
        """Return the run in this layout, checked.

        Raises:
            ConfigError: it cannot be run so.
        """
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=1 if config.moe.num_experts else None,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=self.chunks if self.chunks > 1 else None,
            pipeline_schedule=None,
            pipeline_model_parallel_layout=None,
            microbatch_group_size_per_vp_stage=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            sequence_parallel=self.tp > 1,
        )
        training = dataclasses.replace(config.training, micro_batch_size=self.micro_batch)
        optimizer = dataclasses.replace(
            config.optimizer, use_distributed_optimizer=config.optimizer.optimizer == "adam"
        )
        run = dataclasses.replace(config, parallel=parallel, training=training, optimizer=optimizer)
        return finalize(cost.recompute(run, self.recompute), task, world_size, config.device)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.chunks, "cp": self.cp, "ep": self.ep}
        return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp"


@dataclass(frozen=True)
class SearchResult:
    """The layouts that a search finds.

    Attributes:
        best: layouts that fit, the fastest first, each with its estimate.
        tried: how many candidates can be run.
        fitting: how many of them fit.
    """

    best: list[tuple[Candidate, Estimate]]
    tried: int
    fitting: int


def candidates(config: RunConfig, world_size: int, gpu: Gpu, cost: TaskCost) -> Iterator[Candidate]:
    """Yield all layouts worth trying; tensor parallelism stays within a node.

    The micro-batch is that of the run and its halves down to 1.
    """
    sizes = divisors(world_size)
    layers = config.model.num_layers or 1
    in_node = [size for size in sizes if size <= gpu.per_node]
    cuts = [size for size in sizes if size <= layers]
    experts = [size for size in sizes if (config.moe.num_experts or 1) % size == 0]
    micro = config.training.micro_batch_size or 1
    batches = sorted({max(1, micro >> shift) for shift in range(micro.bit_length())})
    for tp, pp, cp, ep in product(in_node, cuts, sizes, experts):
        if world_size % (tp * pp * cp) or world_size % (ep * pp):
            continue
        for chunks in range(1, MOST_CHUNKS + 1 if pp > 1 else 2):
            if layers % (pp * chunks) == 0:
                for batch, mode in product(batches, cost.modes_of(config)):
                    yield Candidate(tp, pp, cp, ep, chunks, batch, mode)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def search(
    config: RunConfig,
    task: TaskFlags,
    world_size: int,
    gpu: Gpu,
    cost: TaskCost,
    *,
    count: int = 10,
    efficiency: Efficiency = DEFAULT,
) -> SearchResult:
    """Find the layouts of a run that fit on a number of GPUs and take the least time.

    Recomputation that a layout does not need is not tried: of each layout the cheapest mode that
    fits is priced.

    Args:
        config: the run in any layout; what is not a matter of layout is kept, but the optimizer is
            distributed and sequences are cut wherever matrices are.
        task: checks each layout by its own rules.
        world_size: GPUs.
        cost: the task's, whose cases must follow from the flags alone.
        count: layouts to return.

    Raises:
        ConfigError: no layout can be run at all, with some of the reasons.
    """
    tried, priced = 0, list[tuple[Candidate, Estimate]]()
    errors: dict[str, None] = {}
    settled: set[Candidate] = set()
    for candidate in candidates(config, world_size, gpu, cost):
        layout = dataclasses.replace(candidate, recompute="")
        if layout in settled:
            continue
        try:
            run = candidate.of(config, task, world_size, cost)
        except ConfigError as error:
            errors |= dict.fromkeys(error.messages)
            settled.add(layout)
            continue
        tried += 1
        network, ranks = worst_case(cost.cases(run))
        if fullest(ranks).total + reserve_of(gpu, network, ranks).total > gpu.memory:
            continue
        settled.add(layout)
        priced.append((candidate, estimate(network, gpu, efficiency)))
    if not tried:
        raise ConfigError(
            [f"No layout of {world_size} ranks can run this model.", *list(errors)[:MOST_REASONS]]
        )
    priced.sort(key=lambda entry: entry[1].seconds)
    return SearchResult(priced[:count], tried, len(priced))
