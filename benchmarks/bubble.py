"""Measured step times of pipeline schedules beside the price of their plans and the theory.

Each rank holds a stub stage that sleeps instead of computing, so the times of the actions are
known, and the runtime, its messages and the waiting are all that is measured. With ``--exchange``,
each layer also waits for two exchanges of its experts' tokens in each pass, and the schedules run
forward and backward passes in pairs that hide them.

Example: python benchmarks/bubble.py --pipeline-sizes 4 8 --microbatches 8 16
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.parallel import SPLIT_SCHEDULES, V_SHAPED
from megatron_ext.device import select
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.turns import Turns
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.pair_time import Piece, pair_time
from megatron_ext.schedules.plan import Durations
from megatron_ext.schedules.price import price
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.main import silence_known_warnings

SHAPE = (4, 1, 8)
CHUNKS = {"interleaved": 2, **dict.fromkeys(V_SHAPED, 2)}
LAYERS = 4
"""The layers of a rank that exchange tokens."""


class Work:
    """The times of one stage's passes, and of the exchanges of experts' tokens in each pass."""

    def __init__(self, schedule: str, times: Sequence[float], exchange: float) -> None:
        chunks = CHUNKS.get(schedule, 1)
        self.computing = Durations(*(time / chunks for time in times))
        self.exchange = exchange / chunks
        self.splits = schedule in SPLIT_SCHEDULES
        self.layers = LAYERS // chunks

    @property
    def durations(self) -> Durations:
        """Return the times of passes alone, and the time that a pair of them takes less."""
        forward, inputs, weights = astuple(self.computing)[:3]
        alone = Durations(forward + self.exchange, inputs + self.exchange, weights)
        if not self.exchange:
            return alone
        back = self.backward()
        if self.splits:
            back[-1] = (back[-1][0] + weights, 0.0)
        return replace(alone, hidden=alone.passes - pair_time(back, self.forward()))

    def forward(self) -> list[Piece]:
        """Return half of each layer's computing before and half after its first exchange."""
        piece = self.computing.forward / (2 * self.layers)
        return [(piece, self.exchange / (2 * self.layers))] * (2 * self.layers)

    def backward(self) -> list[Piece]:
        """Return the pieces of a backward pass, which begins with an exchange."""
        taken = self.computing.input_gradient
        taken += 0.0 if self.splits else self.computing.weight_gradient
        piece = taken / (2 * self.layers)
        one = self.exchange / (2 * self.layers)
        return [(0.0, one), *[(piece, one)] * (2 * self.layers - 1), (piece, 0.0)]


class _Sleep(torch.autograd.Function):
    """Identity that takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, stage: StubStage) -> Tensor:
        ctx.stage = stage
        stage.spend(stage.work.forward())
        return entering.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stage = ctx.stage
        stage.spend(stage.work.backward())
        if stage.work.splits:
            stage.queue.add(lambda: time.sleep(stage.work.computing.weight_gradient))
        return gradient.clone(), None


class StubStage(torch.nn.Module):
    """A model chunk that sleeps.

    Attributes:
        network: the time at which the rank's last exchange of tokens has ended.
    """

    network = 0.0

    def __init__(self, work: Work, queue: DeferredWeightGradients, turns: Turns) -> None:
        super().__init__()
        self.work = work
        self.queue = queue
        self.turns = turns
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.entering = tensors[0]

    def forward(self) -> Tensor:
        entering = self.entering
        if entering is None:
            entering = torch.ones(SHAPE, requires_grad=True)
        result: Tensor = _Sleep.apply(entering, self)
        return result

    def spend(self, pieces: list[Piece]) -> None:
        """Sleep for each piece, and let the other pass of a pair go on during its exchange."""
        for computing, exchange in pieces:
            time.sleep(computing)
            if exchange:
                StubStage.network = max(StubStage.network, time.perf_counter()) + exchange
                arrives = StubStage.network
                self.turns.give_way()
                time.sleep(max(0.0, arrives - time.perf_counter()))


def forward_step(_batch: Any, model: torch.nn.Module, _counts: Any) -> tuple[Tensor, Any]:
    """Return the stub's output; the loss is its sum."""
    return model(), lambda output: (output.sum(), torch.tensor(1, dtype=torch.int), {})


def measure(
    schedule: str,
    work: Work,
    num_microbatches: int,
    repeats: int,
    context: ParallelContext,
) -> float:
    """Return the shortest step of the slowest rank, in seconds."""
    queue = DeferredWeightGradients()
    turns = Turns()
    config: TransformerConfig = StepTransformerConfig(
        num_layers=8,
        hidden_size=SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=context.layout.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        weight_gradients=queue,
        turns=turns if work.exchange else None,
    )
    chunks = [StubStage(work, queue, turns) for _ in range(context.placement.num_chunks)]
    engine = PipelineEngine(schedule, chunks, config, context)
    best = float("inf")
    for _ in range(repeats):
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.run(forward_step, None, num_microbatches, SHAPE)
        taken = torch.tensor(time.perf_counter() - start)
        torch.distributed.all_reduce(taken, op=torch.distributed.ReduceOp.MAX)
        best = min(best, float(taken))
    return best


def measure_on_ranks(
    schedule: str, work: Work, size: int, num_microbatches: int, repeats: int
) -> float:
    """Fork the ranks of one pipeline and measure a schedule on them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def rank() -> int:
            device = select()
            device.activate(0)
            torch.set_num_threads(1)
            layout = Layout(
                world_size=size,
                pipeline_model_parallel_size=size,
                virtual_pipeline_model_parallel_size=CHUNKS.get(schedule),
                v_shape=schedule in V_SHAPED,
            )
            context = init_groups(layout, device, init_method=f"file://{folder}/store")
            taken = measure(schedule, work, num_microbatches, repeats, context)
            if context.rank == 0:
                (folder / "taken").write_text(str(taken))
            context.destroy()
            return 0

        if fork_ranks(rank, size) != 0:
            raise SystemExit("a rank failed; its message is above")
        return float((folder / "taken").read_text())


def theory(schedule: str, whole: Durations, size: int) -> str:
    """Return the papers' bubble in seconds; none is stated for zb-v with uneven times."""
    full = whole.forward + whole.input_gradient + whole.weight_gradient
    bubbles = {
        "1f1b": (size - 1) * full,
        "interleaved": (size - 1) * full / CHUNKS["interleaved"],
        "zb-h1": (size - 1) * (whole.forward + whole.input_gradient - whole.weight_gradient),
    }
    return f"{bubbles[schedule]:.3f}" if schedule in bubbles else "-"


def row(schedule: str, args: argparse.Namespace, size: int, num_microbatches: int) -> list[str]:
    """Return one line of the table."""
    chunks = CHUNKS.get(schedule, 1)
    whole = Durations(*args.times)
    work = Work(schedule, args.times, args.exchange)
    durations = work.durations
    shape = {"pipeline_size": size, "num_microbatches": num_microbatches}
    plan = build_plan(schedule, num_chunks=chunks, pairs=bool(args.exchange), **shape)
    cost = price(plan, durations)
    classic = price(build_plan("1f1b", **shape), whole)
    taken = measure_on_ranks(schedule, work, size, num_microbatches, args.repeats)
    return [
        str(size),
        str(num_microbatches),
        schedule,
        f"{cost.makespan:.3f}",
        f"{taken:.3f}",
        f"{taken / cost.makespan:.3f}",
        f"{cost.bubble:.3f}",
        "-" if args.exchange else theory(schedule, whole, size),
        f"{cost.bubble / classic.bubble:.2f}",
        f"{max(cost.peak_activations) / chunks:g}",
    ]


HEAD = (
    "| ranks | micro-batches | schedule | price (s) | measured (s) | measured / price | bubble (s) "
    "| theory (s) | bubble / 1f1b's | peak micro-batches in flight |"
)


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
    )
    parser.add_argument(
        "--times",
        type=float,
        nargs=3,
        default=[0.1, 0.1, 0.1],
        metavar=("F", "I", "W"),
        help="seconds of a rank's forward pass, input gradient and weight gradient",
    )
    parser.add_argument(
        "--exchange",
        type=float,
        default=0.0,
        help="seconds of all exchanges of tokens in a pass; the schedules then run in pairs",
    )
    parser.add_argument("--repeats", type=int, default=2, help="the shortest counts")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    silence_known_warnings(select().kind)
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  CPU",
        f"python benchmarks/bubble.py {' '.join(argv)}".rstrip(),
        "",
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
    ]
    print("\n".join(lines), flush=True)
    for size in args.pipeline_sizes:
        for num_microbatches in args.microbatches:
            for schedule in args.schedules:
                cells = row(schedule, args, size, num_microbatches)
                lines.append("| " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    if args.save:
        path = Path(__file__).parent / "results" / f"bubble_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
