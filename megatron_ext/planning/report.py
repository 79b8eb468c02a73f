"""A plan in tables: parameters and memory of each pipeline rank, bubble, messages, time."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_ext.planning.activations import Activations
from megatron_ext.planning.checks import check_core
from megatron_ext.planning.communication import Traffic, Volume
from megatron_ext.planning.contents import Sizes
from megatron_ext.planning.hardware import GB, Gpu, gpu_named
from megatron_ext.planning.memory import (
    RECOMPUTATION,
    RankMemory,
    memory,
    num_microbatches,
    step_plan,
    with_recomputation,
)
from megatron_ext.planning.search import Found
from megatron_ext.planning.step_time import USABLE, Estimate, estimate, rank_volume
from megatron_ext.schedules import price

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

MILLION = 10**6


def size(count: float) -> str:
    """Bytes in GB, small ones in MB (powers of ten), a dash for none."""
    if not count:
        return "–"
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"


def console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    return Console(
        width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, soft_wrap=False
    )


def print_plan(config: RunConfig) -> None:
    """Print what ``--dry-run`` asks for.

    Raises:
        ConfigError: see `check_core` and `Sizes.of`.
    """
    check_core(config)
    name = config.planning.dry_run_gpu
    show(config, None if name is None else gpu_named(name))


def show(config: RunConfig, gpu: Gpu | None) -> None:
    """Print all tables of a run.

    Args:
        config: a resolved text run with its vocabulary.
        gpu: the kind to estimate time for; None leaves time out.
    """
    out, ranks = console(), memory(config)
    out.print(headline(config, ranks))
    out.print(parameter_table(ranks))
    out.print(memory_table(config, ranks))
    out.print(recomputation_table(config))
    out.print(volume_table(config, ranks))
    for line in schedule_lines(config):
        out.print(line)
    if gpu is not None:
        for line in time_lines(estimate(config, gpu)):
            out.print(line)


def headline(config: RunConfig, ranks: list[RankMemory]) -> str:
    """The layout in one line."""
    x = Sizes.of(config)
    sizes = {"tp": x.tp, "cp": x.cp, "pp": x.pp, "dp": x.dp, "ep": x.ep}
    shown = " × ".join(f"{name} {count}" for name, count in sizes.items() if count > 1) or "1 rank"
    total = model_parameters(config, ranks)
    return (
        f"plan: {config.parallel.world_size} ranks ({shown}), {total / MILLION:,.1f} M parameters, "
        f"{num_microbatches(config)} micro-batches of {x.b} × {x.s} tokens, "
        f"{'bf16' if config.precision.bf16 else 'fp16' if x.half else 'fp32'}"
    )


def model_parameters(config: RunConfig, ranks: list[RankMemory]) -> int:
    """Distinct parameters of the whole model.

    Matrices are cut over the ranks of their kind; norms and some biases are whole on each of them,
    as `_shares` says by their names. A copy of the embedding counts once.
    """
    x, total, copies = Sizes.of(config), 0, 0
    for rank in ranks:
        for chunk in rank.weights:
            for weight in chunk:
                copies += weight.shared
                if weight.shared and copies > 1:
                    continue
                total += weight.numel * _shares(x, weight.name)
    return total


def _shares(sizes: Sizes, name: str) -> int:
    """Ranks that hold different parts of a parameter."""
    parts = name.split(".")
    owner, kind = parts[-2], parts[-1]
    if owner in ("linear_qkv", "linear_fc1", "eh_proj", "word_embeddings", "output_layer"):
        whole = False
    else:
        whole = owner not in ("linear_proj", "linear_fc2") or kind == "bias"
    if "local_experts" in parts:
        return sizes.ep * (1 if whole else sizes.etp)
    return 1 if whole else sizes.tp


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


def memory_table(config: RunConfig, ranks: list[RankMemory]) -> Table:
    """One row for each pipeline rank, as the run is configured."""
    table = Table(
        "pipeline rank", "weights", "gradients", "optimizer", "EMA", "activations", "in flight",
        "for a moment", "peak", title="memory of a rank",
    )  # fmt: skip
    for rank in ranks:
        state = rank.state
        parts = (state.parameters, state.gradients, state.optimizer, state.average)
        table.add_row(
            str(rank.rank),
            *(size(part) for part in (*parts, rank.activations)),
            str(rank.in_flight),
            size(rank.transient),
            size(rank.total),
        )
    x = Sizes.of(config)
    if not config.optimizer.use_distributed_optimizer and x.dp * x.cp > 1:
        table.caption = f"with --use-distributed-optimizer: {_distributed(config)}"
    return table


def _distributed(config: RunConfig) -> str:
    """The largest optimizer state if it were shared over the replicas."""
    shared = replace(config.optimizer, use_distributed_optimizer=True)
    ranks = memory(replace(config, optimizer=shared))
    return f"optimizer {size(max(rank.state.optimizer for rank in ranks))}"


def recomputation_table(config: RunConfig) -> Table:
    """Activations of a layer and of the fullest rank in each mode."""
    table = Table(
        "recomputation", "a layer keeps", "fullest rank: activations", "peak",
        title="activations by recomputation",
    )  # fmt: skip
    for mode in RECOMPUTATION:
        run = with_recomputation(config, mode)
        sizes = Sizes.of(run)
        formulas = Activations(run, sizes)
        kept = formulas.residual if mode == "full" else formulas.layer(sizes.experts[-1]).kept
        fullest = max(memory(run), key=lambda rank: rank.total)
        activations = fullest.activations + fullest.transient
        table.add_row(mode, size(kept), size(activations), size(fullest.total))
    head = Activations(config, Sizes.of(config)).head()
    table.caption = (
        f"of them logits and loss: {size(head.kept)}, for a moment {size(head.transient)}"
    )
    return table


def volume_table(config: RunConfig, ranks: list[RankMemory]) -> Table:
    """Bytes that a rank of each place in the pipeline sends in a step."""
    names = [field.name for field in fields(Volume)]
    table = Table("pipeline rank", *names, title="bytes that a rank sends in a step")
    traffic = Traffic(config, Sizes.of(config))
    for rank in ranks:
        volume = rank_volume(traffic, rank, num_microbatches(config))
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
    room = f"{size(found.peak)} of {size(gpu.memory)}, of which {USABLE:.0%} can be filled"
    lines = [
        f"estimated on {gpu.name}: {found.seconds:.3g} s a step, "
        f"{found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%} (assumed efficiencies, see "
        "planning/step_time.py), bubble "
        f"{found.price.bubble_share:.1%}",
        f"{'fits' if found.fits else 'DOES NOT FIT'}: {room}",
    ]
    if not found.fits:
        lines.append(_advice(found))
    return lines


def _advice(found: Estimate) -> str:
    """The first of the usual remedies that helps."""
    config = found.config
    limit = USABLE * found.gpu.memory
    shared = replace(config.optimizer, use_distributed_optimizer=True)
    remedies = {"--use-distributed-optimizer": replace(config, optimizer=shared)}
    remedies |= {
        f"{mode} recomputation": with_recomputation(config, mode) for mode in ("selective", "full")
    }
    for name, run in remedies.items():
        if max(rank.total for rank in memory(run)) <= limit:
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
