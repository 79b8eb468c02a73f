"""Measured step times of pipeline schedules beside the price of their plans and the theory.

Each rank holds a stub stage that sleeps instead of computing, so the times of the actions are
known, and the runtime, its messages and the waiting are all that is measured.

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
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.device import select
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import Durations, price
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.train.launch import fork_ranks
from megatron_ext.train.main import silence_known_warnings

SHAPE = (4, 1, 8)
CHUNKS = {"interleaved": 2, "zb-v": 2}


class _Sleep(torch.autograd.Function):
    """Identity that takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, durations: Durations, queue: Any) -> Tensor:
        ctx.durations, ctx.queue = durations, queue
        time.sleep(durations.forward)
        return entering.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.durations.input_gradient)
        ctx.queue.add(lambda: time.sleep(ctx.durations.weight_gradient))
        return gradient.clone(), None, None


class StubStage(torch.nn.Module):
    """A model chunk that sleeps."""

    def __init__(self, durations: Durations, queue: DeferredWeightGradients) -> None:
        super().__init__()
        self.durations = durations
        self.queue = queue
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.entering = tensors[0]

    def forward(self) -> Tensor:
        entering = self.entering
        if entering is None:
            entering = torch.ones(SHAPE, requires_grad=True)
        result: Tensor = _Sleep.apply(entering, self.durations, self.queue)
        return result


def forward_step(_batch: Any, model: torch.nn.Module, _counts: Any) -> tuple[Tensor, Any]:
    """Return the stub's output; the loss is its sum."""
    return model(), lambda output: (output.sum(), torch.tensor(1, dtype=torch.int), {})


def measure(
    schedule: str,
    durations: Durations,
    num_microbatches: int,
    repeats: int,
    context: ParallelContext,
) -> float:
    """Return the shortest step of the slowest rank, in seconds."""
    queue = DeferredWeightGradients()
    config: TransformerConfig = StepTransformerConfig(
        num_layers=8,
        hidden_size=SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=context.layout.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        weight_gradients=queue,
    )
    chunks = [StubStage(durations, queue) for _ in range(context.placement.num_chunks)]
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
    schedule: str, durations: Durations, size: int, num_microbatches: int, repeats: int
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
                v_shape=schedule == "zb-v",
            )
            context = init_groups(layout, device, init_method=f"file://{folder}/store")
            taken = measure(schedule, durations, num_microbatches, repeats, context)
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
    durations = Durations(*(time / chunks for time in args.times))
    shape = {"pipeline_size": size, "num_microbatches": num_microbatches}
    cost = price(build_plan(schedule, num_chunks=chunks, **shape), durations)
    classic = price(build_plan("1f1b", **shape), whole)
    taken = measure_on_ranks(schedule, durations, size, num_microbatches, args.repeats)
    return [
        str(size),
        str(num_microbatches),
        schedule,
        f"{cost.makespan:.3f}",
        f"{taken:.3f}",
        f"{taken / cost.makespan:.3f}",
        f"{cost.bubble:.3f}",
        theory(schedule, whole, size),
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
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved", "zb-h1", "zb-v"])
    parser.add_argument(
        "--times",
        type=float,
        nargs=3,
        default=[0.1, 0.1, 0.1],
        metavar=("F", "I", "W"),
        help="seconds of a rank's forward pass, input gradient and weight gradient",
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
