"""Rules of the flags that pair forward with backward passes to hide the exchange of experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_ext.config.parallel import PAIRED_SCHEDULES, ParallelConfig
from megatron_ext.errors import FlagError


def pair_errors(parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each option that does not go with pairs of passes."""
    if not parallel.overlap_moe_expert_parallel_comm:
        for field in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"):
            if getattr(parallel, field):
                flag = f"--{field.replace('_', '-')}"
                yield FlagError(
                    flag, None, "needs `--overlap-moe-expert-parallel-comm`", "give both"
                )
        return
    refused = partial(FlagError, "--overlap-moe-expert-parallel-comm", None)
    schedule = parallel.pipeline_schedule
    if schedule not in PAIRED_SCHEDULES:
        yield refused(
            f"does not go with `--pipeline-schedule` ({schedule}), which has no pairs of a forward "
            "and a backward pass",
            f"use one of {', '.join(PAIRED_SCHEDULES)}",
        )
    ranks = parallel.expert_model_parallel_size
    if ranks < 2:
        yield refused(
            f"needs `--expert-model-parallel-size` ({ranks}) of at least 2, since only ranks that "
            "share the experts exchange tokens",
            "leave it out",
        )
