"""A plan in tables: parameters and memory of each pipeline rank, bubble, messages, time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_ext.config.cuda_graphs import CudaGraphConfig
from megatron_ext.planning.activations import Activations
from megatron_ext.planning.assumptions import assumed
from megatron_ext.planning.checks import check_core
from megatron_ext.planning.communication import Volume
from megatron_ext.planning.contents import Sizes
from megatron_ext.planning.hardware import Gpu, gpu_named, size
from megatron_ext.planning.memory import (
    RankMemory,
    memory,
    modes_of,
    num_microbatches,
    step_plan,
    with_recomputation,
)
from megatron_ext.planning.models import network_of
from megatron_ext.planning.network import Network
from megatron_ext.planning.parameters import distinct
from megatron_ext.planning.search import Found
from megatron_ext.planning.step_time import Estimate, estimate, rank_volume
from megatron_ext.schedules.plan import price
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.streaming.cost import fits_on, streaming_memory, streaming_plan

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

MILLION = 10**6


def console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    return Console(
        width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, soft_wrap=False
    )


def print_plan(config: RunConfig, clips: Sequence[Clip] = ()) -> bool:
    """Print what ``--dry-run`` asks for; returns whether the run fits, see `show`.

    Args:
        config: a resolved run; of text with its vocabulary.
        clips: of flow matching, those of each bucket.

    Raises:
        ConfigError: see `check_core`, `network_of` and `gpu_named`.
    """
    check_core(config)
    name = config.planning.dry_run_gpu
    return show(config, None if name is None else gpu_named(name), clips)


def show(config: RunConfig, gpu: Gpu | None, clips: Sequence[Clip] = ()) -> bool:
    """Print all tables of a run; returns whether it fits, True where no GPU is named.

    Args:
        config: see `print_plan`.
        gpu: the kind to estimate time for; None leaves time out.
        clips: see `print_plan`.
    """
    out = console()
    if config.video.streams:
        found = streaming_memory(config)
        for part in streaming_plan(config, found, gpu):
            out.print(part)
        return gpu is None or fits_on(config, found, gpu)
    network = worst_of(config, clips)
    ranks = memory(config, network=network)
    out.print(headline(network, ranks))
    out.print(parameter_table(ranks))
    if clips:
        out.print(bucket_table(config, clips, gpu))
    out.print(memory_table(network, ranks))
    out.print(recomputation_table(network))
    out.print(volume_table(network, ranks))
    for line in schedule_lines(config):
        out.print(line)
    if gpu is None:
        return True
    cost = estimate(config, gpu, network=network)
    for line in time_lines(cost):
        out.print(line)
    out.print(reserve_table(cost))
    out.print(assumption_table(gpu))
    return cost.fits


def worst_of(config: RunConfig, clips: Sequence[Clip]) -> Network:
    """The network on the bucket whose clips need most memory; of text the network."""
    networks = [network_of(config, clip) for clip in clips] or [network_of(config)]
    return max(
        networks, key=lambda network: max(rank.total for rank in memory(config, network=network))
    )


def headline(network: Network, ranks: list[RankMemory]) -> str:
    """The layout in one line."""
    x, config = network.sizes, network.config
    sizes = {"tp": x.tp, "cp": x.cp, "pp": x.pp, "dp": x.dp, "ep": x.ep}
    shown = " × ".join(f"{name} {count}" for name, count in sizes.items() if count > 1) or "1 rank"
    return (
        f"plan: {config.parallel.world_size} ranks ({shown}), "
        f"{model_parameters(ranks) / MILLION:,.1f} M parameters, "
        f"{num_microbatches(config)} micro-batches of {x.b} × {network.tokens} tokens, "
        f"{number_format(config)}"
    )


def number_format(config: RunConfig) -> str:
    """Of activations and products."""
    wide = "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32"
    eight, te = config.fp8.fp8_format, config.model.transformer_impl == "transformer_engine"
    layers = "; Transformer Engine's layers priced as the torch layers" if te else ""
    if eight is None:
        return wide + layers
    return f"{wide}, layers in fp8 ({eight}, {config.fp8.fp8_recipe}){layers}"


def model_parameters(ranks: list[RankMemory]) -> int:
    """Distinct parameters of the whole model; see `distinct`."""
    return distinct(chunk for rank in ranks for chunk in rank.weights)


def bucket_table(config: RunConfig, clips: Sequence[Clip], gpu: Gpu | None) -> Table:
    """One row for each bucket, the most frequent and the fullest named."""
    table = Table(
        "bucket", "clips at a time", "tokens", "share of steps", "peak", "step (s)", "",
        title="buckets",
    )  # fmt: skip
    networks = [network_of(config, clip) for clip in clips]
    peaks = [max(r.total for r in memory(config, network=network)) for network in networks]
    typical = max(clips, key=lambda clip: clip.share)
    for clip, network, peak in zip(clips, networks, peaks, strict=True):
        seconds = "" if gpu is None else f"{estimate(config, gpu, network=network).seconds:.3g}"
        notes = ["worst"] * (peak == max(peaks)) + ["typical"] * (clip == typical)
        table.add_row(
            clip.name, str(clip.micro_batch_size), f"{clip.num_text} + {clip.num_image}",
            f"{clip.share:.1%}", size(peak), seconds, ", ".join(notes),
        )  # fmt: skip
    table.caption = "tokens: text + image; all other tables are of the worst bucket"
    return table


def parameter_table(ranks: list[RankMemory]) -> Table:
    """One row for each stage."""
    table = Table("stage", "pipeline rank", "holds", "parameters of a rank", title="stages")
    for stage, weights in sorted(
        ((stage, w) for rank in ranks for stage, w in zip(rank.stages, rank.weights, strict=True)),
        key=lambda entry: entry[0].index,
    ):
        held = ["embedding"] * stage.embedding
        if stage.layers:
            first, last = stage.layers[0], stage.layers[-1]
            held.append(f"layers {first}-{last}" if last > first else f"layer {first}")
        held += [f"{stage.depths} MTP"] * (stage.depths > 0)
        held += ["output"] * stage.head
        count = sum(weight.numel for weight in weights)
        table.add_row(str(stage.index), str(stage.rank), ", ".join(held), f"{count:,}")
    return table


def memory_table(network: Network, ranks: list[RankMemory]) -> Table:
    """One row for each pipeline rank, as the run is configured."""
    table = Table(
        "pipeline rank", "weights", "gradients", "optimizer", "EMA", "fp8 weights", "activations",
        "in flight", "for a moment", "peak", title="memory of a rank",
    )  # fmt: skip
    for rank in ranks:
        state = rank.state
        parts = (state.parameters, state.gradients, state.optimizer, state.average, rank.copies)
        table.add_row(
            str(rank.rank),
            *(size(part) for part in (*parts, rank.activations)),
            str(rank.in_flight),
            size(rank.transient),
            size(rank.total),
        )
    x, config = network.sizes, network.config
    if not config.optimizer.use_distributed_optimizer and x.dp * x.cp > 1:
        table.caption = f"with --use-distributed-optimizer: {_distributed(network)}"
    return table


def _distributed(network: Network) -> str:
    """The largest optimizer state if it were shared over the replicas."""
    config = network.config
    shared = replace(config.optimizer, use_distributed_optimizer=True)
    ranks = _memory_as(network, replace(config, optimizer=shared))
    return f"optimizer {size(max(rank.state.optimizer for rank in ranks))}"


def _memory_as(network: Network, config: RunConfig) -> list[RankMemory]:
    """The memory of the same clips or sequences in a run that differs a little."""
    return memory(config, network=network.of_run(config))


def recomputation_table(network: Network) -> Table:
    """Activations of a layer and of the fullest rank in each mode."""
    table = Table(
        "recomputation", "a layer keeps", "fullest rank: activations", "peak",
        title="activations by recomputation",
    )  # fmt: skip
    config = network.config
    for mode in modes_of(config):
        other = network.of_run(with_recomputation(config, mode))
        kept = other.entering if mode == "full" else other.layer().kept
        fullest = max(memory(other.config, network=other), key=lambda rank: rank.total)
        activations = fullest.activations + fullest.transient
        table.add_row(mode, size(kept), size(activations), size(fullest.total))
    if not config.video.video:
        head = Activations(config, Sizes.of(config)).head()
        table.caption = (
            f"of them logits and loss: {size(head.kept)}, for a moment {size(head.transient)}"
        )
    return table


def volume_table(network: Network, ranks: list[RankMemory]) -> Table:
    """Bytes that a rank of each place in the pipeline sends in a step."""
    names = [field.name for field in fields(Volume)]
    table = Table("pipeline rank", *names, title="bytes that a rank sends in a step")
    for rank in ranks:
        volume = rank_volume(network, rank, num_microbatches(network.config))
        table.add_row(str(rank.rank), *(size(getattr(volume, name)) for name in names))
    return table


def schedule_lines(config: RunConfig) -> list[str]:
    """The bubble of the schedule when all stages take the same time."""
    plan = step_plan(config)
    cost = price(plan)
    return [
        f"schedule {plan.schedule}: bubble {cost.bubble_share:.1%} of the step with "
        f"{plan.num_microbatches} micro-batches (equal stages, forward : input gradient : weight "
        "gradient = 1 : 1 : 1)"
    ]


def time_lines(found: Estimate) -> list[str]:
    """Time, throughput, utilization, and whether it fits."""
    gpu = found.gpu
    needed = found.peak + found.reserve.total
    lines = [
        f"estimated on {gpu.name}: {found.seconds:.3g} s a step, "
        f"{found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%} of "
        f"{gpu.peak(found.network.sizes.width) / 1e12:.0f} TFLOP/s, bubble "
        f"{found.price.bubble_share:.1%}",
        f"{'fits' if found.fits else 'DOES NOT FIT'}: {size(found.peak)} and a reserve of "
        f"{size(found.reserve.total)} make {size(needed)} of {size(gpu.memory)}",
    ]
    if not found.fits:
        lines.append(_advice(found))
    return lines


def reserve_table(found: Estimate) -> Table:
    """What no tensor of the run may take; assumed, not measured."""
    reserve = found.reserve
    rows = (
        ("CUDA context and kernels", reserve.context),
        ("cuBLAS and cuBLASLt workspaces", reserve.matrix_library),
        ("NCCL buffers of all groups", reserve.channels),
        ("fragments of the allocator's blocks", reserve.fragments),
    )
    table = Table("reserve (assumed)", "bytes", title="kept free on each GPU")
    for name, count in rows:
        table.add_row(name, size(count))
    return table


def assumption_table(gpu: Gpu) -> Table:
    """Shares of the rates that are taken to be reached, and which of them were measured."""
    table = Table("assumed", "share", "of what, and why", title="what the time rests on")
    for name, value, what, replaced in assumed(gpu):
        table.add_row(name, "measured" if replaced else value, what)
    if gpu.measured is not None:
        found = gpu.measured
        eight = "" if found.fp8 is None else f", fp8 {found.fp8 / 1e12:.0f} TFLOP/s"
        table.caption = (
            f"measured ({found.source}): bf16 {found.bf16 / 1e12:.0f} TFLOP/s{eight}, copy "
            f"{found.copy / 1e12:.2f} TB/s; links are the datasheet's"
        )
    return table


def _advice(found: Estimate) -> str:
    """The first of the usual remedies that helps."""
    config, network = found.config, found.network
    limit = found.gpu.memory - found.reserve.total
    shared = replace(config.optimizer, use_distributed_optimizer=True)
    remedies = {"--use-distributed-optimizer": replace(config, optimizer=shared)}
    graphs = config.cuda_graphs.cuda_graph_impl != "none"
    config = replace(config, cuda_graphs=CudaGraphConfig())
    instead = " in place of --cuda-graph-impl" if graphs else ""
    remedies |= {
        f"{mode} recomputation{instead}": with_recomputation(config, mode)
        for mode in modes_of(config)
        if mode != "none"
    }
    for name, run in remedies.items():
        if max(rank.total for rank in _memory_as(network, run)) <= limit:
            return f"it would fit with {name}"
    return "neither the distributed optimizer nor recomputation suffices; use more ranks (--search)"


def search_table(found: Found) -> Table:
    """The best layouts."""
    table = Table(
        "layout", "dp", "micro-batch", "recompute", "step (s)", "tokens/s", "MFU", "bubble", "peak",
        title=f"best of {found.fitting} layouts that fit ({found.tried} tried)",
    )  # fmt: skip
    for candidate, cost in found.best:
        table.add_row(
            str(candidate),
            str(cost.config.parallel.data_parallel_size),
            str(candidate.micro_batch),
            candidate.recompute,
            f"{cost.seconds:.3g}",
            f"{cost.tokens_per_second:,.0f}",
            f"{cost.mfu:.1%}",
            f"{cost.price.bubble_share:.1%}",
            size(cost.peak),
        )
    return table
