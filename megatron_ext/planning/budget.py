"""The time of a step by class of kernels, for comparison with a measured profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.device.gpus import GB, TFLOPS
from megatron_ext.planning.hardware import FLASH_3, GAP, GRAPH_GAP
from megatron_ext.planning.kernels import KINDS, Work
from megatron_ext.planning.sheet import Column, Sheet
from megatron_ext.planning.step_time import Clock, Estimate, estimate, rank_volume, step_volume


@dataclass(frozen=True)
class Line:
    """One part of a step's time on one rank: a class of kernels, gaps, communication or waiting.

    Attributes:
        kind: a key of `KINDS`, "host" for updates on the host, or "waiting" for the wait for other
            pipeline stages.
        seconds: time of this part in the step.
        rates: the assumed rates as text, such as "530 TFLOP/s".
        flops, num_bytes, kernels: sums over the step, see `Work`; for "communication",
            ``num_bytes`` are the bytes sent.
    """

    kind: str
    seconds: float
    rates: str
    flops: float = 0.0
    num_bytes: float = 0.0
    kernels: float = 0.0


def budget(estimated: Estimate) -> list[Line]:
    """Return the time of a step on the slowest rank, with one line for each class of kernels.

    Besides the classes, "gaps" is the time between kernels, "communication" the messages that
    computation does not hide, and "waiting" the wait for other pipeline stages. All lines add up to
    the time of the step.
    """
    network = estimated.network
    clock = Clock(estimated.network, estimated.rates)
    rank = estimated.ranks[clock.slowest()]
    count = network.num_microbatches
    works = clock.update_work(rank)
    works += [work * count for stage in rank.stages for work in network.work(stage)]
    kinds = [(kind, [work for work in works if work.kind == kind]) for kind in KINDS]
    lines = [_line(kind, estimated, own) for kind, own in kinds if own]
    kernels = sum(work.kernels for work in works)
    gaps = sum(map(estimated.rates.gaps, works))
    words = f"{1e6 * GAP:.0f} µs a kernel"
    words += f", {1e6 * GRAPH_GAP:.1f} in graphs" if any(work.graphed for work in works) else ""
    lines.append(Line("gaps", gaps, words, kernels=kernels))
    volume = step_volume(network, rank, count)
    total = rank_volume(network, rank, count).total
    sent = clock.exchange(volume) + clock.replicas(volume) + clock.update_exchange(rank)
    sent -= count * sum(sum(clock.beside_exchanges(stage)) for stage in rank.stages)
    pairs = estimated.network.schedule.num_pairs(rank.rank)
    if pairs:
        sent -= pairs * clock.rank_durations()[rank.rank].hidden
    if sent:
        lines.append(Line("communication", sent, "links", num_bytes=total))
    if rank.state.hosted:
        from megatron_ext.planning.offload import update_seconds

        lines.append(
            Line("host", update_seconds(network, rank.state), "weights that the host updates")
        )
    waiting = estimated.seconds - sum(line.seconds for line in lines)
    if waiting > 1e-6 * estimated.seconds:
        lines.append(Line("waiting", waiting, "for other pipeline stages"))
    return lines


def _line(kind: str, estimated: Estimate, works: Sequence[Work]) -> Line:
    flops, moved = (sum(getattr(work, name) for work in works) for name in ("flops", "num_bytes"))
    rates = sorted({estimated.rates.operations(work) for work in works if work.flops})
    words = [f"{rate / TFLOPS:.0f} TFLOP/s" for rate in rates]
    words += [f"{estimated.rates.memory(kind) / 1e12:.2f} TB/s"] if moved else []
    seconds = sum(map(estimated.rates.busy, works))
    return Line(kind, seconds, ", ".join(words), flops, moved, sum(work.kernels for work in works))


def budget_sheet(estimated: Estimate) -> Sheet:
    """Return a table of the classes of kernels in a step, with the assumed rates."""
    columns = [
        Column("class", "class"),
        Column("what", "what"),
        Column("TFLOP", "flops", lambda x: f"{x / TFLOPS:,.1f}" if x else ""),
        Column("GB", "bytes", lambda x: f"{x / GB:,.1f}" if x else ""),
        Column("kernels", "kernels", lambda x: f"{x:,.0f}" if x else ""),
        Column("assumed rates", "assumed_rates"),
        Column("ms", "seconds", lambda x: f"{1e3 * x:.1f}"),
        Column("share", "share", "{:.1%}".format),
    ]
    rows = []
    for line in budget(estimated):
        counts = (line.flops, line.num_bytes, line.kernels)
        share = line.seconds / estimated.seconds
        rows.append([line.kind, KINDS.get(line.kind, ""), *counts, line.rates, line.seconds, share])
    title = "time of a step on the slowest rank, by class of kernels"
    return Sheet("step_time", title, columns, rows, _caption(estimated))


def _caption(estimated: Estimate) -> str:
    """Return a caption: the step's time, and the share of it that matrix products alone would take.

    The products are timed at the rate of large ones. On H100 and H200, the caption also has both
    numbers for a step with FlashAttention 3.
    """
    large = estimated.rates.products(estimated.network.sizes.width) / TFLOPS
    text = (
        f"sum {1e3 * estimated.seconds:.1f} ms; the model's products alone, at {large:.0f} "
        f"TFLOP/s, take {estimated.matrix_share:.1%} of it"
    )
    if "H100" in estimated.gpu.name or "H200" in estimated.gpu.name:
        other = estimate(estimated.network, estimated.gpu, FLASH_3)
        text += (
            f"; where flash attention 3 is installed, {other.matrix_share:.1%} of "
            f"{1e3 * other.seconds:.1f} ms"
        )
    return text
