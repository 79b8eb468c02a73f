"""What is asked before any rank is started: megatron-core's own rules, and the host's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_ext.device.host import this_host
from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.planning.hardware import size
from megatron_ext.planning.memory import rank_state
from megatron_ext.planning.models import network_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.config.run import RunConfig
    from megatron_ext.planning.contents import Stage


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


def check_host_memory(config: RunConfig) -> None:
    """Check that a text run on CPUs does not need more memory than this host has.

    What is counted is the least: weights, gradients, optimizer state, and the activations of one
    micro-batch. The kernel would end the ranks without a word, the first of them or another
    program.

    Args:
        config: resolved, with its vocabulary; ranks are shared equally by its hosts.

    Raises:
        ConfigError: it needs more.
    """
    if config.device != "cpu" or config.video.video:
        return
    network, ranks = network_of(config), config.parallel.world_size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    needed = 0
    for stages in _stages_by_rank(network.stages()):
        weights = [list(network.weights(stage)) for stage in stages]
        state = rank_state(config, network.sizes, stages[0].rank, weights)
        held = state.parameters if config.training.skip_train else state.total
        needed += held + sum(network.activations(stage).kept for stage in stages)
    needed = needed * here // max(1, config.parallel.pipeline_model_parallel_size)
    memory = this_host().memory
    if needed > memory:
        raise ConfigError(
            f"The run needs at least {size(needed)} on this machine for {here} rank(s), but "
            f"it has {size(memory)}; make the model or the micro-batch smaller, use "
            "`--recompute-granularity full`, or take more machines (`--dry-run` prints the shares)."
        )


def _stages_by_rank(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Return the stages of a model as lists, one for each pipeline rank."""
    ranks = sorted({stage.rank for stage in stages})
    return [[stage for stage in stages if stage.rank == rank] for rank in ranks]
