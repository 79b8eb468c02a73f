"""The report of a search: the best layouts, why others are refused, and commands to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import WIDEST_LINE, ConfigError
from megatron_ext.planning.hardware import size
from megatron_ext.planning.layouts import size_fields
from megatron_ext.planning.offload import ASSUMED
from megatron_ext.planning.search import Layout, SearchResult
from megatron_ext.planning.sheet import Column, Report, Sheet
from megatron_ext.planning.step_time import TIGHT, Estimate, memory_use

REASONS = 5
"""Rules that a report names with the number of layouts that break them."""

COLUMNS = (
    Column("layout", "layout"),
    Column("dp", "data_parallel_size"),
    Column("batch", "micro_batch_size"),
    Column("recompute", "recomputation"),
    Column("with", "with", optional=True),
    Column("step (s)", "step_seconds", "{:.3g}".format),
    Column("tokens/s", "tokens_per_second", printed=False),
    Column("MFU", "model_flops_utilization", "{:.1%}".format),
    Column("bubble", "bubble_share", "{:.1%}".format),
    Column("peak", "peak_bytes", size),
    Column("host", "host_bytes", size, printed=False),
    Column("variants", "variants"),
)


def proposal(result: SearchResult, world_size: int, gpu: Gpu, given: Estimate | None) -> Report:
    """Return the report of a search on ``world_size`` GPUs.

    ``given`` is the estimate of the layout that the user's own flags give; None if they give none
    that can run.
    """
    lines = [*_verdict(result, gpu), *_comparison(result, given)]
    lines.append(f"{result.tried:,} layouts of {world_size:,} GPUs can run")
    lines.append(
        f"the memory of {result.checked:,} was computed, and {result.fitting:,} fit in a way that "
        "could be among the fastest; the others are slower than those below, or their weights "
        "alone are too large"
    )
    values: dict[str, Any] = {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory,
        "ranks": world_size,
        "tried": result.tried,
        "checked": result.checked,
        "fitting": result.fitting,
        "refused": [{"layouts": count, "reason": text} for text, count in result.refused],
        "layouts": [
            _values(layout) | row
            for layout, row in zip(result.best, best_sheet(result).records(), strict=True)
        ],
    }
    if given is not None:
        values["given"] = {"step_seconds": given.seconds, "fits": given.fits}
    if result.closest is not None:
        needed, candidate = result.closest
        values["closest"] = {**size_fields(candidate), "needed_bytes": needed}
    sheets = [best_sheet(result)] if result.best else []
    remarks = [*_tight(result), *_refusals(result)]
    return Report(bool(result.best), lines, values, sheets, remarks)


def _verdict(result: SearchResult, gpu: Gpu) -> list[str]:
    """Return lines with the fastest layout, or with the one that comes closest to fitting."""
    if not result.best:
        assert result.closest is not None
        needed, candidate = result.closest
        return [
            f"no layout fits: the closest, {candidate} with recomputation {candidate.recompute}, "
            f"needs at least {size(needed)} of {size(gpu.memory)} on {gpu.name}; use more GPUs, a "
            "GPU with more memory, or a shorter sequence"
        ]
    best = result.best[0]
    cost = best.cost
    return [
        f"best layout: {best.candidate} (dp {cost.network.sizes.dp}), estimated {cost.seconds:.3g} "
        f"s a step, {cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.1%} of "
        f"{gpu.peak(cost.network.sizes.width) / 1e12:.0f} TFLOP/s",
        f"fits {gpu.name}: {memory_use(cost)}",
    ]


def _comparison(result: SearchResult, given: Estimate | None) -> list[str]:
    """Return a line that compares the layout of the user's own flags with the best; [] if none."""
    if given is None:
        return []
    fits = "fits" if given.fits else "DOES NOT FIT"
    line = f"the given layout: {given.seconds:.3g} s a step, {fits}"
    if result.best and given.fits:
        saved = 1 - result.best[0].cost.seconds / given.seconds
        line += f"; the best takes {saved:.0%} less time" if saved > 0.005 else "; it is as fast"
    return [line]


def _tight(result: SearchResult) -> list[str]:
    """Return a line with the listed layouts that leave little memory free; [] if none does."""
    names = [str(layout.candidate) for layout in result.best if layout.cost.is_tight]
    return [f"less than {TIGHT:.0%} of the memory stays free with {', '.join(names)}"] * bool(names)


def _refusals(result: SearchResult) -> list[str]:
    """Return lines that say how many layouts cannot run, with one reason of each kind."""
    if not result.refused:
        return []
    total = sum(count for _, count in result.refused)
    lines = ["", f"{total:,} layouts cannot run; the rules that most of them break, by an example:"]
    lines += [f"  {count:,} × {text}" for text, count in result.refused[:REASONS]]
    return lines


def best_sheet(result: SearchResult) -> Sheet:
    """Return a table of the best layouts of a search."""
    rows = []
    for layout in result.best:
        cost = layout.cost
        candidate = layout.candidate
        sizes = [str(candidate), cost.network.sizes.dp, candidate.micro_batch, candidate.recompute]
        sizes.append(", ".join(candidate.uses))
        figures = [cost.seconds, cost.tokens_per_second, cost.mfu, cost.price.bubble_share]
        host = max(rank.host for rank in cost.ranks)
        rows.append([*sizes, *figures, cost.peak, host, layout.variants])
    caption = (
        "vpp: virtual chunks of a pipeline rank; batch: micro-batch size; variants: layouts with "
        "these sizes, of which the fastest that fits is shown"
    )
    if most := max((rank.host for layout in result.best for rank in layout.cost.ranks), default=0):
        rates = ", ".join(f"{what} {rate}" for what, rate, _ in ASSUMED)
        caption += f"; host: a GPU moves up to {size(most)} to its host's memory (assumed: {rates})"
    return Sheet("best", "the fastest layouts that fit", COLUMNS, rows, caption)


def _values(layout: Layout) -> dict[str, Any]:
    """Return a layout's sizes, and the memory that it needs, for JSON."""
    cost = layout.cost
    return {
        **size_fields(layout.candidate),
        "needed_bytes": cost.needed,
        "free_share": cost.free_share,
    }


Parse = Callable[[Sequence[str]], RunConfig]
"""Returns the checked configuration of a command line; raises a ConfigError if it has errors."""


def fewest_words(layout: Layout, parse: Parse) -> list[list[str]]:
    """Return the flags of a layout without those that change nothing."""
    whole = parse(_flat(layout.words))
    kept = [list(entry) for entry in layout.words]
    for entry in list(kept):
        rest = [other for other in kept if other is not entry]
        if _runs_as(parse, rest, whole):
            kept = rest
    return kept


def _runs_as(parse: Parse, words: Sequence[Sequence[str]], whole: RunConfig) -> bool:
    try:
        return parse(_flat(words)) == whole
    except ConfigError:
        return False


def _flat(entries: Sequence[Sequence[str]]) -> list[str]:
    return [word for entry in entries for word in entry]


def nodes_of(world_size: int, gpu: Gpu) -> tuple[int, int]:
    """Return the number of nodes for ``world_size`` GPUs, and of GPUs on each."""
    each = max(x for x in range(1, gpu.per_node + 1) if world_size % x == 0)
    return world_size // each, each


def command(program: str, flags: Sequence[str], world_size: int, gpu: Gpu) -> str:
    """Return the command for a shell that starts ``program`` on ``world_size`` GPUs.

    It is the command of each node if there are several.
    """
    nodes, each = nodes_of(world_size, gpu)
    if nodes == 1:
        return _wrapped([f"python {program} --nproc-per-node {each}"], flags)
    start = f"torchrun --nnodes {nodes} --nproc-per-node {each}"
    place = '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
    return _wrapped([start, f"    {place} {program}"], flags)


def check_line(program: str, world_size: int, gpu_name: str, gpu: Gpu) -> str:
    """Return lines that say how to check a proposed command without GPUs."""
    nodes, each = nodes_of(world_size, gpu)
    several = f" --dry-run-nodes {nodes}" if nodes > 1 else ""
    return (
        "To check one without a GPU, give its flags to\n"
        f"python {program} --nproc-per-node {each} --dry-run{several} --dry-run-gpu {gpu_name}"
    )


def _wrapped(start: Sequence[str], flags: Sequence[str]) -> str:
    """Return a command whose lines take at most `WIDEST_LINE` columns, if no flag alone takes more.

    ``start`` has its first lines.
    """
    lines = list(start)
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    for group in groups:
        text = " ".join(group)
        if len(lines) > len(start) and len(lines[-1]) + len(text) + 3 <= WIDEST_LINE:
            lines[-1] += f" {text}"
        else:
            lines.append(f"    {text}")
    return " \\\n".join(lines)
