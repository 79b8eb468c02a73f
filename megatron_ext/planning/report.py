"""Tables and pictures of a run's cost: parameters, memory, bubble, messages and time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.config.rules.optimizer import sharding_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GB, Gpu
from megatron_ext.disk.figures import new_figure
from megatron_ext.layers.transformer_config import check_core
from megatron_ext.planning.budget import budget_table
from megatron_ext.planning.hardware import assumed, gpu_named, size
from megatron_ext.planning.memory import RankMemory, fullest, memory, worst_case
from megatron_ext.planning.network import Case, Network, Report, Volume, step_plan
from megatron_ext.planning.state import ROUTED, distinct
from megatron_ext.planning.step_time import Estimate, SearchResult, estimate, rank_volume
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.schedules.picture import save as save_schedule
from megatron_ext.schedules.picture import write_figure
from megatron_ext.schedules.plan import Plan, price

NO_COST = (
    "This task does not say what its model costs, so memory and time are not estimated; give the "
    "task a `cost`."
)


def console() -> Console:
    """Return a console as wide as the terminal, or 160 columns wide if there is no terminal."""
    return Console(
        width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, soft_wrap=False
    )


def print_plan(config: RunConfig, cost: TaskCost | None) -> bool:
    """Print the cost of a run for ``--dry-run``, as `show` does, on the GPU of ``--dry-run-gpu``.

    Return whether the run fits this GPU; without that flag, return True.

    Raises:
        ConfigError: megatron-core rejects the model, or the GPU is unknown (`gpu_named`).
    """
    check_core(config)
    name = config.planning.dry_run_gpu
    return show(config, None if name is None else gpu_named(name), cost)


def show(config: RunConfig, gpu: Gpu | None, cost: TaskCost | None) -> bool:
    """Print the report of a run; return whether the run fits the GPU, or True without a GPU.

    Times are printed only with a GPU. Without ``cost``, only the schedule is printed.
    """
    parts: Sequence[Table | str]
    if cost is None:
        plan = step_plan(config.parallel, config.training)
        parts = [NO_COST, schedule_line(plan)]
        fits = True
    elif cost.report is not None:
        parts, fits = cost.report(config, gpu)
    else:
        parts, fits = report_cases(cost.cases(config), gpu, cost)
    out = console()
    for part in parts:
        out.print(part)
    return fits


def report_cases(cases: Sequence[Case], gpu: Gpu | None, cost: TaskCost) -> Report:
    """Return the report of a run, with tables of its `Case` that has the highest memory peak.

    If the cases have names, a further table compares them. Without a GPU, the report has no times,
    and the run counts as one that fits.
    """
    network, ranks = worst_case(cases)
    parts: list[Table | str] = [headline(network, ranks), parameter_table(ranks)]
    if cases[0].name:
        parts.append(bucket_table(cases, gpu))
    parts += [memory_table(network, ranks), recomputation_table(network, cost)]
    parts += [volume_table(network, ranks), schedule_line(network.schedule)]
    if gpu is None:
        return parts, True
    estimated = estimate(network, gpu)
    parts += [*time_lines(estimated, cost), budget_table(estimated)]
    parts += [reserve_table(estimated), assumption_table(gpu)]
    return parts, estimated.fits


def headline(network: Network, ranks: list[RankMemory]) -> str:
    """Return a line with the layout, parameters, micro-batches and number formats of a run."""
    x = network.sizes
    config = network.config
    sizes = {"tp": x.tp, "cp": x.cp, "pp": x.pp, "dp": x.dp, "ep": x.ep}
    shown = " × ".join(f"{name} {count}" for name, count in sizes.items() if count > 1) or "1 rank"
    numbers = "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32"
    if config.fp8.fp8_format is not None:
        numbers += f", layers in fp8 ({config.fp8.fp8_format}, {config.fp8.fp8_recipe})"
    if config.model.transformer_impl == "transformer_engine":
        numbers += "; Transformer Engine's layers priced as the torch layers"
    count = model_parameters(ranks)
    active = active_parameters(ranks, network)
    counted = f"{count / 10**6:,.1f} M parameters"
    if active < count:
        counted += f" ({active / 10**6:,.1f} M of them used by a token)"
    return (
        f"plan: {config.parallel.world_size} ranks ({shown}), {counted}, "
        f"{network.num_microbatches} micro-batches of {x.b} × {network.tokens} tokens, "
        f"{numbers}"
    )


def model_parameters(ranks: list[RankMemory]) -> int:
    """Return the number of parameters of the whole model, from those of each rank."""
    return distinct(chunk for rank in ranks for chunk in rank.weights)


def active_parameters(ranks: list[RankMemory], network: Network) -> int:
    """Return the number of parameters that one token uses: all but those of experts not chosen."""
    chunks = [chunk for rank in ranks for chunk in rank.weights]
    routed = distinct([weight for weight in chunk if ROUTED in weight.name] for chunk in chunks)
    count, used = network.experts
    return distinct(chunks) - routed // count * (count - used)


def bucket_table(cases: Sequence[Case], gpu: Gpu | None) -> Table:
    """Return a table with a row for each kind of batch (bucket).

    It marks the most frequent kind, and the kind with the highest memory peak. With a GPU, it has
    the estimated seconds of a step.
    """
    table = Table(
        "bucket", *cases[0].columns, "share of steps", "peak", "step (s)", "", title="buckets"
    )
    peaks = [fullest(memory(case.network)).total for case in cases]
    typical = max(cases, key=lambda case: case.share)
    for case, peak in zip(cases, peaks, strict=True):
        seconds = "" if gpu is None else f"{estimate(case.network, gpu).seconds:.3g}"
        notes = ["worst"] * (peak == max(peaks)) + ["typical"] * (case == typical)
        table.add_row(
            case.name, *case.columns.values(), f"{case.share:.1%}", size(peak), seconds,
            ", ".join(notes),
        )  # fmt: skip
    table.caption = "all other tables are of the worst bucket"
    return table


def parameter_table(ranks: list[RankMemory]) -> Table:
    """Return a table of each stage's pipeline rank, layers and number of parameters."""
    table = Table("stage", "pipeline rank", "holds", "parameters of a rank", title="stages")
    for stage, weights in sorted(
        ((stage, w) for rank in ranks for stage, w in zip(rank.stages, rank.weights, strict=True)),
        key=lambda entry: entry[0].index,
    ):
        contents = ["embedding"] * stage.embedding
        if stage.layers:
            first = stage.layers[0]
            last = stage.layers[-1]
            contents.append(f"layers {first}-{last}" if last > first else f"layer {first}")
        contents += [f"{stage.depths} MTP"] * (stage.depths > 0)
        contents += ["output"] * stage.head
        count = sum(weight.numel for weight in weights)
        table.add_row(str(stage.index), str(stage.rank), ", ".join(contents), f"{count:,}")
    return table


def memory_table(network: Network, ranks: list[RankMemory]) -> Table:
    """Return a table with the memory of each pipeline rank.

    If the run does not shard its optimizer state, or its gradients, over its replicas, the caption
    names a flag that does, and the bytes that would be left.
    """
    table = Table(
        "pipeline rank", "weights", "gradients", "optimizer", "EMA", "fp8 weights", "activations",
        "in flight", "for a moment", "peak", title="memory of a rank",
    )  # fmt: skip
    for rank in ranks:
        state = rank.state
        parts = (state.parameters, state.gradients, state.optimizer, state.average)
        table.add_row(
            str(rank.rank),
            *(size(part) for part in (*parts, rank.fp8_weights, rank.activations)),
            str(rank.in_flight),
            size(rank.transient),
            size(rank.total),
        )
    x = network.sizes
    config = network.config
    if not config.optimizer.use_distributed_optimizer and x.dp * x.cp > 1:
        others = memory(network.with_config(_distributed(config)))
        most = max(rank.state.optimizer for rank in others)
        table.caption = f"with --use-distributed-optimizer: optimizer {size(most)}"
    elif x.dp * x.cp > 1 and not config.optimizer.shards_gradients:
        sharded = _sharded(config)
        if not list(sharding_errors(sharded)):
            most = max(x.state.gradients for x in memory(network.with_config(sharded)))
            name = "--data-parallel-sharding-strategy optim_grads"
            table.caption = f"with {name}: gradients {size(most)}"
    return table


def _distributed(config: RunConfig) -> RunConfig:
    """Return the run's configuration, changed to use the distributed optimizer."""
    return replace(config, optimizer=replace(config.optimizer, use_distributed_optimizer=True))


def _sharded(config: RunConfig) -> RunConfig:
    """Return the run's configuration, changed to shard gradients."""
    optimizer = replace(config.optimizer, data_parallel_sharding_strategy="optim_grads")
    return replace(config, optimizer=optimizer)


def recomputation_table(network: Network, cost: TaskCost) -> Table:
    """Return a table with a row for each recomputation mode.

    It shows the bytes that a layer keeps, and the activations and peak memory of the fullest rank.
    """
    table = Table(
        "recomputation", "a layer keeps", "fullest rank: activations", "peak",
        title="activations by recomputation",
    )  # fmt: skip
    for mode in cost.modes_with(network.config.cuda_graphs):
        other = network.with_config(cost.recompute(network.config, mode))
        kept = other.layer_input if mode == "full" else other.layer().kept
        most = fullest(memory(other))
        table.add_row(mode, size(kept), size(most.activations + most.transient), size(most.total))
    loss = network.loss()
    if loss is not None:
        table.caption = (
            f"of them logits and loss: {size(loss.kept)}, for a moment {size(loss.transient)}"
        )
    return table


def volume_table(network: Network, ranks: list[RankMemory]) -> Table:
    """Return a table with the bytes that each pipeline rank sends in a step.

    It has a column for each kind of communication in `Volume`.
    """
    names = [field.name for field in fields(Volume)]
    table = Table("pipeline rank", *names, title="bytes that a rank sends in a step")
    for rank in ranks:
        volume = rank_volume(network, rank, network.num_microbatches)
        table.add_row(str(rank.rank), *(size(getattr(volume, name)) for name in names))
    return table


def schedule_line(plan: Plan) -> str:
    """Return a line with the bubble of the schedule, assuming equally slow stages."""
    return (
        f"schedule {plan.schedule}: bubble {price(plan).bubble_share:.1%} of the step with "
        f"{plan.num_microbatches} micro-batches (equal stages, forward : input gradient : weight "
        "gradient = 1 : 1 : 1)"
    )


def time_lines(estimated: Estimate, cost: TaskCost) -> list[str]:
    """Return lines with a step's time, throughput and MFU, and whether the run fits the GPU.

    If it does not, the last line is advice, for which ``cost`` gives the recomputation modes.
    """
    gpu = estimated.gpu
    reserve = sum(estimated.reserve.values())
    lines = [
        f"estimated on {gpu.name}: {estimated.seconds:.3g} s a step, "
        f"{estimated.tokens_per_second:,.0f} tokens/s, MFU {estimated.mfu:.1%} of "
        f"{gpu.peak(estimated.network.sizes.width) / 1e12:.0f} TFLOP/s, bubble "
        f"{estimated.price.bubble_share:.1%}",
        f"{'fits' if estimated.fits else 'DOES NOT FIT'}: {size(estimated.peak)} and a reserve of "
        f"{size(reserve)} make {size(estimated.peak + reserve)} of {size(gpu.memory)}",
    ]
    if not estimated.fits:
        lines.append(_advice(estimated, cost))
    return lines


def reserve_table(estimated: Estimate) -> Table:
    """Return a table of the memory that must stay free on each GPU; see `reserve_on`."""
    table = Table("reserve (assumed)", "bytes", title="kept free on each GPU")
    for name, count in estimated.reserve.items():
        table.add_row(name, size(count))
    return table


def assumption_table(gpu: Gpu) -> Table:
    """Return a table of the assumed efficiencies; it marks those replaced by rates of ``gpu``."""
    table = Table("assumed", "share", "of what, and why", title="what the time rests on")
    for name, value, what, replaced in assumed(gpu):
        table.add_row(name, "measured" if replaced else value, what)
    if gpu.measured is not None:
        measured = gpu.measured
        eight = "" if measured.fp8 is None else f", fp8 {measured.fp8 / 1e12:.0f} TFLOP/s"
        table.caption = (
            f"measured ({measured.source}): bf16 {measured.bf16 / 1e12:.0f} TFLOP/s{eight}, copy "
            f"{measured.copy / 1e12:.2f} TB/s; links are the datasheet's"
        )
    return table


def _advice(estimated: Estimate, cost: TaskCost) -> str:
    """Return a sentence that tells how to change the flags so that the run fits the GPU.

    It names the first sufficient remedy: the distributed optimizer, then each recomputation mode.
    If none is enough, it advises more ranks.
    """
    config = estimated.network.config
    remedies = {"--use-distributed-optimizer": _distributed(config)}
    graphs = config.cuda_graphs.cuda_graph_impl != "none"
    config = replace(config, cuda_graphs=CudaGraphConfig())
    instead = " in place of --cuda-graph-impl" if graphs else ""
    remedies |= {
        f"{mode} recomputation{instead}": cost.recompute(config, mode)
        for mode in cost.modes
        if mode != "none"
    }
    for name, run in remedies.items():
        most = fullest(memory(estimated.network.with_config(run))).total
        if most + sum(estimated.reserve.values()) <= estimated.gpu.memory:
            return f"it would fit with {name}"
    return "neither the distributed optimizer nor recomputation suffices; use more ranks (--search)"


def search_table(result: SearchResult) -> Table:
    """Return a table of the best layouts of a search."""
    table = Table(
        "layout", "dp", "micro-batch", "recompute", "step (s)", "tokens/s", "MFU", "bubble", "peak",
        title=f"best of {result.fitting} layouts that fit ({result.tried} tried)",
    )  # fmt: skip
    for candidate, cost in result.best:
        table.add_row(
            str(candidate),
            str(cost.network.sizes.dp),
            str(candidate.micro_batch),
            candidate.recompute,
            f"{cost.seconds:.3g}",
            f"{cost.tokens_per_second:,.0f}",
            f"{cost.mfu:.1%}",
            f"{cost.price.bubble_share:.1%}",
            size(cost.peak),
        )
    return table


def save_pictures(network: Network, path: Path, gpu: Gpu) -> list[Path]:
    """Draw the schedule of a run into ``path``, and the memory of each pipeline rank beside it.

    Return the paths of both pictures. The second has ``_memory`` added to its name; a dashed line
    in it marks the memory of ``gpu``.

    Raises:
        ConfigError: a file cannot be written, or its suffix is no image format.
    """
    save_schedule(network.schedule, price(network.schedule), path)
    second = path.with_name(f"{path.stem}_memory{path.suffix}")
    ranks = memory(network)
    parts = {
        "weights": ("#7aa6da", [rank.state.parameters for rank in ranks]),
        "gradients": ("#8cc98c", [rank.state.gradients for rank in ranks]),
        "optimizer": ("#f2c14e", [rank.state.optimizer for rank in ranks]),
        "EMA": ("#c39bd3", [rank.state.average for rank in ranks]),
        "activations": ("#e08e79", [rank.activations for rank in ranks]),
        "for a moment": ("#bbbbbb", [rank.transient for rank in ranks]),
    }
    figure = new_figure(figsize=(min(30.0, 4 + 0.6 * len(ranks)), 4.5))
    axes = figure.add_subplot()
    bottoms = [0.0] * len(ranks)
    for name, (color, counts) in parts.items():
        heights = [count / GB for count in counts]
        if any(heights):
            axes.bar(range(len(ranks)), heights, bottom=bottoms, color=color, label=name)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.axhline(gpu.memory / GB, color="black", linestyle="--", label=gpu.name)
    axes.set_xticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write_figure(figure, second)
    return [path, second]
