"""The check, before a run starts, that this host has the memory that its ranks need there."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config.flags import changed_fields
from megatron_ext.config.run import RunConfig
from megatron_ext.device.host import this_host
from megatron_ext.errors import ConfigError
from megatron_ext.planning.network import Network
from megatron_ext.planning.state import rank_state
from megatron_ext.planning.task_cost import TaskCost, ranks_here


def check_host_memory(config: RunConfig, cost: TaskCost | None) -> None:
    """Check that a run does not need more memory than this host has.

    For a run on GPUs it counts what the flags of offload move to the host. For a run on CPUs it
    uses a lower bound for the ranks of this host: weights, one micro-batch's activations
    and, in training, gradients and optimizer state. Nothing is checked if the task describes no
    ``cost`` (None), or one that depends on data.

    Raises:
        ConfigError: the lower bound is above the host's memory.
    """
    if cost is None or not cost.from_flags:
        return
    here = ranks_here(config)
    if config.device != "cpu":
        if changed_fields(config.offload):
            _check_offload(config, cost, here)
        return
    needed = _host_memory(config, cost, here)
    available = this_host().memory
    if needed > available:
        from megatron_ext.planning.hardware import size

        raise ConfigError(
            f"The run needs at least {size(needed)} on this machine for {here} rank(s), but "
            f"it has {size(available)}; make the model or the micro-batch smaller, use "
            "`--recompute-granularity full`, or take more machines (`--dry-run` prints the shares)"
            f"{_what_would_fit(config, cost, here, available)}."
        )


def _check_offload(config: RunConfig, cost: TaskCost, ranks: int) -> None:
    """Raise a ConfigError if the host has no room for what ``ranks`` GPUs move to it."""
    from megatron_ext.planning.memory import memory

    found = [memory(case.network) for case in cost.cases(config)]
    needed = ranks * max(rank.host for all_ranks in found for rank in all_ranks)
    available = this_host().memory
    if needed > available:
        from megatron_ext.planning.hardware import size

        raise ConfigError(
            f"The flags of offload move {size(needed)} to this machine's memory for {ranks} "
            f"rank(s), but it has {size(available)}; give a smaller `--optimizer-offload-fraction` "
            "or fewer layers and modules, or take more machines."
        )


def _host_memory(config: RunConfig, cost: TaskCost, ranks: int) -> int:
    """Return a lower bound of the bytes that ``ranks`` ranks of a run need."""
    needed = max(_least_memory(case.network) for case in cost.cases(config))
    return needed * ranks // max(1, config.parallel.pipeline_model_parallel_size)


def _what_would_fit(config: RunConfig, cost: TaskCost, ranks: int, available: int) -> str:
    """Return the end of an error message: flags with which the run would fit, if there are any."""
    from megatron_ext.planning.hardware import size

    given, _ = config.training.batch_sizes
    smaller = [each for each in range(given - 1, 0, -1) if given % each == 0]
    full = "`--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`"
    recomputed = cost.recompute(config, "full")
    ways = {f"`--micro-batch-size {each}`": (config, each) for each in smaller}
    ways[full] = (recomputed, given)
    ways |= {f"`--micro-batch-size {each}` and {full}": (recomputed, each) for each in smaller}
    for words, (changed, micro_batch) in ways.items():
        training = replace(config.training, micro_batch_size=micro_batch)
        needed = _host_memory(replace(changed, training=training), cost, ranks)
        if needed <= available:
            return f"; {words} needs at least {size(needed)}"
    return "; no smaller micro-batch alone would fit"


def _least_memory(network: Network) -> int:
    """Return a lower bound of the bytes that all ranks of one pipeline need together."""
    needed = sum(network.activations(stage).kept for stage in network.stages())
    for rank in range(network.sizes.pp):
        weights = [network.weights(stage) for stage in network.stages_of(rank)]
        state = rank_state(network.config, network.sizes, rank, weights)
        trained = state.total + state.host
        needed += state.parameters if network.config.training.skip_train else trained
    return needed
