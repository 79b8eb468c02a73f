"""The plan of a run: its memory, bubble, messages and time, as tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.config.batch_size import number_of_iterations
from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.config.rules.sharding import sharding_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GB, Gpu
from megatron_ext.disk.figures import new_figure
from megatron_ext.layers.transformer_config import check_core
from megatron_ext.planning.budget import budget_sheet
from megatron_ext.planning.hardware import assumed, gpu_named, size
from megatron_ext.planning.memory import RankMemory, fullest, memory, worst_case
from megatron_ext.planning.network import Case, Network, Volume
from megatron_ext.planning.pipeline import Schedule
from megatron_ext.planning.sheet import Column, Report, Sheet
from megatron_ext.planning.step_time import Estimate, estimate, memory_use, rank_volume
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.planning.weights import ROUTED, distinct
from megatron_ext.schedules.picture import save as save_schedule
from megatron_ext.schedules.picture import write_figure
from megatron_ext.schedules.price import price

NO_COST = (
    "This task does not say what its model costs, so memory and time are not estimated; give the "
    "task a `cost`."
)


def print_plan(config: RunConfig, cost: TaskCost | None) -> bool:
    """Print the plan of a run for ``--dry-run``, on the GPU of ``--dry-run-gpu``.

    Return whether the run fits this GPU; without that flag, return True.

    Raises:
        ConfigError: megatron-core rejects the model, or the GPU is unknown (`gpu_named`).
    """
    check_core(config)
    name = config.planning.dry_run_gpu
    report = report_of(config, None if name is None else gpu_named(name), cost)
    report.show()
    return report.fits


def report_of(config: RunConfig, gpu: Gpu | None, cost: TaskCost | None) -> Report:
    """Return the report of a run.

    It has times only with a GPU. Without ``cost``, it has only the schedule.
    """
    if cost is None:
        line, values = schedule_line(Schedule.of(config.parallel, config.training))
        return Report(True, [NO_COST, line], values)
    if cost.report is not None:
        return cost.report(config, gpu)
    return report_cases(cost.cases(config), gpu, cost)


def report_cases(cases: Sequence[Case], gpu: Gpu | None, cost: TaskCost) -> Report:
    """Return the report of a run, with tables of its `Case` that has the highest memory peak.

    If the cases have names, a further table compares them. Without a GPU, the report has no times,
    and the run counts as one that fits.
    """
    network, ranks = worst_case(cases)
    sheets = [bucket_sheet(cases, gpu)] if cases[0].name else []
    sheets += [stage_sheet(ranks), memory_sheet(network, ranks), recomputation_sheet(network, cost)]
    sheets.append(volume_sheet(network, ranks))
    sheets += network.sheets()
    if any(rank.host for rank in ranks):
        from megatron_ext.planning.offload import offload_sheet

        sheets.append(offload_sheet(network, ranks, gpu))
    line, values = schedule_line(network.schedule)
    lines = [headline(network, ranks), line]
    values = {**run_values(network, ranks), **values, "peak_bytes": fullest(ranks).total}
    if steps := num_steps(network.config):
        lines.append(f"the run has {steps:,} steps")
        values["steps"] = steps
    if gpu is None:
        return Report(True, lines, values, sheets)
    estimated = estimate(network, gpu, ranks=ranks)
    sheets += [budget_sheet(estimated), reserve_sheet(estimated), assumption_sheet(gpu)]
    values |= estimate_values(estimated)
    return Report(estimated.fits, [*time_lines(estimated, cost), *lines], values, sheets)


def num_steps(config: RunConfig) -> int:
    """Return the number of steps of a run; 0 if it follows from data that has not been opened."""
    parallel = config.parallel
    return number_of_iterations(
        config.training, config.model.seq_length, parallel.data_parallel_size
    )


def run_values(network: Network, ranks: list[RankMemory]) -> dict[str, Any]:
    """Return the sizes of a run for JSON: ranks, batches, parameters and number format."""
    x = network.sizes
    return {
        "ranks": network.config.parallel.world_size,
        "tensor_parallel_size": x.tp,
        "context_parallel_size": x.cp,
        "pipeline_parallel_size": x.pp,
        "data_parallel_size": x.dp,
        "expert_parallel_size": x.ep,
        "parameters": model_parameters(ranks),
        "active_parameters": active_parameters(ranks, network),
        "num_microbatches": network.num_microbatches,
        "micro_batch_size": x.b,
        "tokens_per_sample": network.tokens,
        "number_format": _numbers(network.config),
    }


def estimate_values(estimated: Estimate) -> dict[str, Any]:
    """Return the estimated memory and time of a step for JSON."""
    gpu = estimated.gpu
    return {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory,
        "peak_bytes": estimated.peak,
        "reserve_bytes": sum(estimated.reserve.values()),
        "free_share": estimated.free_share,
        "step_seconds": estimated.seconds,
        "tokens_per_second": estimated.tokens_per_second,
        "model_flops_utilization": estimated.mfu,
        "datasheet_flops_per_second": gpu.peak(estimated.network.sizes.width),
        "bubble_share": estimated.price.bubble_share,
    }


def _numbers(config: RunConfig) -> str:
    """Return the number formats of a run, such as "bf16, layers in fp8 (hybrid, tensorwise)"."""
    numbers = "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32"
    if config.fp8.fp8_format is not None:
        numbers += f", layers in fp8 ({config.fp8.fp8_format}, {config.fp8.fp8_recipe})"
    if config.model.transformer_impl == "transformer_engine":
        numbers += "; Transformer Engine's layers priced as the torch layers"
    return numbers


def headline(network: Network, ranks: list[RankMemory]) -> str:
    """Return a line with the layout, parameters, micro-batches and number formats of a run."""
    x = network.sizes
    world = network.config.parallel.world_size
    sizes = {"tp": x.tp, "cp": x.cp, "pp": x.pp, "dp": x.dp, "ep": x.ep}
    shown = " × ".join(f"{name} {count}" for name, count in sizes.items() if count > 1)
    count = model_parameters(ranks)
    active = active_parameters(ranks, network)
    counted = f"{count / 10**6:,.1f} M parameters"
    if active < count:
        counted += f" ({active / 10**6:,.1f} M of them used by a token)"
    return (f"plan: {world} ranks ({shown})" if world > 1 else "plan: 1 rank") + (
        f", {counted}, {network.num_microbatches} micro-batches of {x.b} × {network.tokens} "
        f"tokens, {_numbers(network.config)}"
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


def bucket_sheet(cases: Sequence[Case], gpu: Gpu | None) -> Sheet:
    """Return a table with a row for each kind of batch (bucket).

    It marks the most frequent kind, and the kind with the highest memory peak. With a GPU, it has
    the estimated seconds of a step.
    """
    own = [Column(name, name.replace(" ", "_").replace("+", "and")) for name in cases[0].columns]
    columns = [
        Column("bucket", "bucket"),
        *own,
        Column("share of steps", "share_of_steps", "{:.1%}".format),
        Column("peak", "peak_bytes", size),
        Column("step (s)", "step_seconds", _seconds),
        Column("", "marks", ", ".join),
    ]
    peaks = [fullest(memory(case.network)).total for case in cases]
    typical = max(cases, key=lambda case: case.share)
    rows = []
    for case, peak in zip(cases, peaks, strict=True):
        seconds = None if gpu is None else estimate(case.network, gpu).seconds
        marks = ["worst"] * (peak == max(peaks)) + ["typical"] * (case == typical)
        rows.append([case.name, *case.columns.values(), case.share, peak, seconds, marks])
    caption = "all other tables, and the lines above, are of the worst bucket"
    return Sheet("buckets", "buckets", columns, rows, caption)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def stage_sheet(ranks: list[RankMemory]) -> Sheet:
    """Return a table of each stage's pipeline rank, layers and number of parameters."""
    columns = [
        Column("stage", "stage"),
        Column("pipeline rank", "pipeline_rank"),
        Column("holds", "holds"),
        Column("parameters of a rank", "parameters_of_a_rank", "{:,}".format),
    ]
    rows = []
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
        rows.append([stage.index, stage.rank, ", ".join(contents), count])
    return Sheet("stages", "stages of the pipeline", columns, rows)


def memory_sheet(network: Network, ranks: list[RankMemory]) -> Sheet:
    """Return a table with the memory of each pipeline rank.

    If the run does not shard its optimizer state, or its gradients, over its replicas, the caption
    names a flag that does, and the bytes that would be left.
    """
    columns = [
        Column("pipeline rank", "pipeline_rank"),
        Column("weights", "weights_bytes", size),
        Column("gradients", "gradients_bytes", size),
        Column("optimizer", "optimizer_bytes", size),
        Column("EMA", "ema_bytes", size, optional=True),
        Column("fp8 weights", "fp8_weights_bytes", size, optional=True),
        Column("in flight", "microbatches_in_flight"),
        Column("activations", "activations_bytes", size),
        Column("transient", "transient_bytes", size),
        Column("set-up", "setup_bytes", size, optional=True),
        Column("peak", "peak_bytes", size),
    ]
    rows = []
    for rank in ranks:
        state = rank.state
        parts = [state.parameters, state.gradients, state.optimizer, state.average]
        moving = [rank.in_flight, rank.activations, rank.transient, state.setup, rank.total]
        rows.append([rank.rank, *parts, rank.fp8_weights, *moving])
    caption = (
        "in flight: micro-batches whose activations a rank holds at its peak; transient: memory "
        "that only the running pass needs"
    )
    if any(rank.state.setup for rank in ranks):
        caption += "; set-up: whole weights, before they are sharded"
    if (saving := _saving(network)) is not None:
        caption += f"\n{saving}"
    return Sheet("memory", "memory of a rank", columns, rows, caption, merges=True)


def _saving(network: Network) -> str | None:
    """Return a line with a flag that shards more over the replicas, and the bytes that it leaves.

    Return None if there is none.
    """
    x = network.sizes
    config = network.config
    if not config.optimizer.use_distributed_optimizer and x.dp * x.cp > 1:
        distributed = config.with_values({"use_distributed_optimizer": True})
        others = memory(network.with_config(distributed))
        most = max(rank.state.optimizer for rank in others)
        return f"with --use-distributed-optimizer: optimizer {size(most)}"
    if x.dp * x.cp == 1 or config.optimizer.shards_weights:
        return None
    shards = config.optimizer.shards_gradients
    strategy = "optim_grads_params" if shards else "optim_grads"
    sharded = config.with_values({"data_parallel_sharding_strategy": strategy})
    if list(sharding_errors(sharded)):
        return None
    states = [rank.state for rank in memory(network.with_config(sharded))]
    left = f"gradients {size(max(state.gradients for state in states))}"
    if shards:
        left = f"weights {size(max(state.parameters for state in states))}"
    return f"with --data-parallel-sharding-strategy {strategy}: {left}"


def recomputation_sheet(network: Network, cost: TaskCost) -> Sheet:
    """Return a table with a row for each recomputation mode.

    It shows the bytes that a layer keeps, and the activations and peak memory of the fullest rank.
    """
    columns = [
        Column("recomputation", "recomputation"),
        Column("a layer keeps", "bytes_kept_by_a_layer", size),
        Column("fullest rank: activations", "activations_bytes", size),
        Column("peak", "peak_bytes", size),
    ]
    rows = []
    for mode in cost.modes_with(network.config.cuda_graphs):
        other = network.with_config(cost.recompute(network.config, mode))
        kept = other.layer_input if mode == "full" else other.layer().kept
        most = fullest(memory(other))
        rows.append([mode, kept, most.activations + most.transient, most.total])
    loss = network.loss()
    caption = ""
    if loss is not None:
        caption = f"of them logits and loss: {size(loss.kept)}, transient {size(loss.transient)}"
    return Sheet("recomputation", "activations by recomputation", columns, rows, caption)


def volume_sheet(network: Network, ranks: list[RankMemory]) -> Sheet:
    """Return a table with the bytes that each pipeline rank sends in a step.

    It has a column for each kind of communication in `Volume`.
    """
    names = [field.name for field in fields(Volume)]
    columns = [Column("pipeline rank", "pipeline_rank")]
    columns += [Column(name, f"{name}_bytes", size, optional=True) for name in names]
    rows = []
    for rank in ranks:
        volume = rank_volume(network, rank, network.num_microbatches)
        rows.append([rank.rank, *(getattr(volume, name) for name in names)])
    caption = "" if any(any(row[1:]) for row in rows) else "none: there is one rank"
    title = "bytes that a rank sends in a step"
    return Sheet("sent", title, columns, rows, caption, merges=True)


def schedule_line(schedule: Schedule) -> tuple[str, dict[str, Any]]:
    """Return a line with the bubble of the schedule, assuming equally slow stages, and its values.

    Forward pass, input gradient and weight gradient are taken to be equally long.
    """
    bubble = schedule.time().bubble_share
    line = (
        f"schedule {schedule.name}: bubble {bubble:.1%} of the step with "
        f"{schedule.num_microbatches} micro-batches (equal stages, forward : input gradient : "
        "weight gradient = 1 : 1 : 1)"
    )
    return line, {"schedule": schedule.name, "equal_stages_bubble_share": bubble}


def time_lines(estimated: Estimate, cost: TaskCost) -> list[str]:
    """Return lines that say whether the run fits the GPU, and a step's time, throughput and MFU.

    If it does not fit, the second line is advice, for which ``cost`` gives the recomputation modes.
    """
    gpu = estimated.gpu
    lines = [f"{'fits' if estimated.fits else 'DOES NOT FIT'}: {memory_use(estimated)}"]
    if not estimated.fits:
        lines.append(_advice(estimated, cost))
    lines.append(
        f"estimated on {gpu.name}: {estimated.seconds:.3g} s a step, "
        f"{estimated.tokens_per_second:,.0f} tokens/s, MFU {estimated.mfu:.1%} of "
        f"{gpu.peak(estimated.network.sizes.width) / 1e12:.0f} TFLOP/s, bubble "
        f"{estimated.price.bubble_share:.1%}"
    )
    return lines


def reserve_sheet(estimated: Estimate) -> Sheet:
    """Return a table of the memory that must stay free on each GPU; see `reserve_on`."""
    columns = [Column("reserve (assumed)", "what"), Column("bytes", "bytes", size)]
    rows = list(estimated.reserve.items())
    return Sheet("reserve", "kept free on each GPU", columns, rows)


def assumption_sheet(gpu: Gpu) -> Sheet:
    """Return a table of the assumed efficiencies; it marks those replaced by rates of ``gpu``."""
    columns = [
        Column("assumed", "name"),
        Column("share", "share"),
        Column("of what, and why", "of_what_and_why"),
    ]
    rows = [
        (name, "measured" if replaced else value, what)
        for name, value, what, replaced in assumed(gpu)
    ]
    caption = ""
    if gpu.measured is not None:
        measured = gpu.measured
        eight = "" if measured.fp8 is None else f", fp8 {measured.fp8 / 1e12:.0f} TFLOP/s"
        caption = (
            f"measured ({measured.source}): bf16 {measured.bf16 / 1e12:.0f} TFLOP/s{eight}, copy "
            f"{measured.copy / 1e12:.2f} TB/s; links are the datasheet's"
        )
    return Sheet("assumptions", "what the time rests on", columns, rows, caption)


def _advice(estimated: Estimate, cost: TaskCost) -> str:
    """Return a sentence that tells how to change the flags so that the run fits the GPU.

    It names the first sufficient remedy: the distributed optimizer, then each recomputation mode.
    If none is enough, it advises more ranks.
    """
    config = estimated.network.config
    distributed = config.with_values({"use_distributed_optimizer": True})
    remedies = {"--use-distributed-optimizer": distributed}
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


def save_pictures(network: Network, path: Path, gpu: Gpu) -> list[Path]:
    """Draw the schedule of a run into ``path``, and the memory of each pipeline rank beside it.

    Return the paths of both pictures. The second has ``_memory`` added to its name; a dashed line
    in it marks the memory of ``gpu``.

    Raises:
        ConfigError: a file cannot be written, or its suffix is no image format.
    """
    plan = network.schedule.plan()
    save_schedule(plan, price(plan), path)
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
