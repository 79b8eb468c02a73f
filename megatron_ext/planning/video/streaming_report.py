"""The plan of streaming long-tuning in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from megatron_ext.planning.assumptions import reserve
from megatron_ext.planning.contents import Ranks, ranks_of
from megatron_ext.planning.units import size
from megatron_ext.planning.video.streaming import StreamingMemory, not_estimated

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.planning.hardware import Gpu


def streaming_plan(config: RunConfig, found: StreamingMemory, gpu: Gpu | None) -> list[Table | str]:
    """What `report.show` prints.

    Args:
        config: of a checked run.
        found: its memory.
        gpu: whose memory is to suffice; None for any.
    """
    ranks = Ranks(**ranks_of(config))
    lines: list[Table | str] = [
        f"plan: {config.parallel.world_size} ranks (tp {ranks.tp} × cp {ranks.cp} × dp "
        f"{ranks.dp}), three networks, {ranks.b} sequence(s) at a time, "
        f"{'bf16' if ranks.half else 'fp32'}",
        network_table(found),
        pass_table(found),
        f"at the peak: {size(found.state.total)} of networks, {size(found.cache)} of cache, "
        f"{size(found.largest.size)} of {found.largest.name}: {size(found.total)}",
    ]
    if gpu is not None:
        kept = reserve(gpu, ranks, found.largest.size).total
        fits = fits_on(config, found, gpu)
        lines.append(
            f"{'fits' if fits else 'DOES NOT FIT'} on {gpu.name}: with an assumed reserve of "
            f"{size(kept)} it takes {size(found.total + kept)} of {size(gpu.memory)}"
        )
    return [*lines, *not_estimated(config)]


def fits_on(config: RunConfig, found: StreamingMemory, gpu: Gpu) -> bool:
    """Whether a GPU holds all of it and leaves the reserve."""
    kept = reserve(gpu, Ranks(**ranks_of(config)), found.largest.size).total
    return found.total + kept <= gpu.memory


def network_table(found: StreamingMemory) -> Table:
    """One row for each network."""
    table = Table(
        "network", "parameters", "of a rank", "weights", "gradients", "optimizer", "EMA",
        title="networks on a rank",
    )  # fmt: skip
    for network in found.networks:
        state = network.state
        parts = (state.parameters, state.gradients, state.optimizer, state.average)
        table.add_row(
            network.name,
            f"{network.parameters / 1e6:,.1f} M",
            f"{state.count:,}",
            *(size(part) for part in parts),
        )
    return table


def pass_table(found: StreamingMemory) -> Table:
    """One row for each kind of work."""
    table = Table("pass", "holds at most", title="activations, of one pass at a time")
    for work in found.passes:
        table.add_row(work.name, size(work.size))
    return table
