"""Checks before any rank starts: megatron-core's own rules, and the host's memory."""

from __future__ import annotations

import os

from megatron_ext.config.run import RunConfig
from megatron_ext.device.host import this_host
from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.planning.hardware import size
from megatron_ext.planning.network import Network, TaskCost
from megatron_ext.planning.state import rank_state


def check_core(config: RunConfig) -> None:
    """Build megatron-core's configuration, which checks itself by assertions.

    Raises:
        ConfigError: with the first rule of megatron-core that the run breaks.
    """
    try:
        build_transformer_config(config)
    except (AssertionError, ValueError) as error:
        said = " ".join(str(error).split()) or "an assertion without a message"
        raise ConfigError(
            f"megatron-core refuses this model: {said.rstrip('.')}; change the flags that it names."
        ) from error


def check_host_memory(config: RunConfig, cost: TaskCost | None) -> None:
    """Check that a run on CPUs does not need more memory than this host has.

    The least is counted: weights, gradients, optimizer state, and the activations of one
    micro-batch. The kernel would end the ranks without a word, the first of them or another
    program.

    Args:
        config: a resolved run, whose ranks are shared equally by its hosts.
        cost: the task's; nothing is checked where it does not follow from the flags alone.

    Raises:
        ConfigError: the run needs more.
    """
    if config.device != "cpu" or cost is None or not cost.from_flags:
        return
    needed = max(_least_memory(case.network) for case in cost.cases(config))
    ranks = config.parallel.world_size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    needed = needed * here // max(1, config.parallel.pipeline_model_parallel_size)
    memory = this_host().memory
    if needed > memory:
        raise ConfigError(
            f"The run needs at least {size(needed)} on this machine for {here} rank(s), but "
            f"it has {size(memory)}; make the model or the micro-batch smaller, use "
            "`--recompute-granularity full`, or take more machines (`--dry-run` prints the shares)."
        )


def _least_memory(network: Network) -> int:
    """Return the bytes that one rank of each place in the pipeline needs at least, in all."""
    config, stages, needed = network.config, network.stages(), 0
    for rank in range(network.sizes.pp):
        mine = [stage for stage in stages if stage.rank == rank]
        weights = [network.weights(stage) for stage in mine]
        state = rank_state(config, network.sizes, rank, weights)
        needed += state.parameters if config.training.skip_train else state.total
        needed += sum(network.activations(stage).kept for stage in mine)
    return needed
