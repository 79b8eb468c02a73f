"""The cost of our training loop over a bare loop, as one ratio from one run.

Both loops drive the same megatron-core model, schedule and optimizer on one rank; the bare one has
nothing else. Blocks of steps alternate, so that both see the same state of the machine.

    python benchmarks/step_overhead.py [--rounds 8] [--steps 10] [--save]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.config.parser import parse_args
from megatron_ext.device import select
from megatron_ext.parallel.context import init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.loop import train
from megatron_ext.train.main import preflight
from megatron_ext.train.reporting.build import Reporters
from megatron_ext.train.reporting.files import MetricsFile
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100000 --lr 1e-4 "
    "--lr-decay-style constant --clip-grad 1.0 --use-distributed-optimizer --num-workers 0 "
    "--log-interval 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 4000"
)


class BareLoop:
    """The least that trains: samples, schedule, update, learning rate, and the loss as a number."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.schedule = get_forward_backward_func()
        assert run.train_source.loader is not None
        self.samples: Iterator[Any] = iter(run.train_source.loader.samples or ())

    def step(self) -> float:
        """Train one step; return its loss."""
        run, chunk = self.run, self.run.chunks[0]
        assert run.optimizer is not None and run.scheduler is not None
        chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        reports = self.schedule(
            forward_step_func=self.forward,
            data_iterator=self.samples,
            model=chunk,
            num_microbatches=run.batch_size.num_microbatches,
            seq_length=run.config.model.seq_length,
            micro_batch_size=run.config.training.micro_batch_size,
            forward_only=False,
        )
        run.optimizer.step()
        run.scheduler.step(increment=run.batch_size.global_batch_size)
        return float(sum(reports) / len(reports))

    @staticmethod
    def forward(samples: Iterator[Any], model: torch.nn.Module) -> Any:
        """Return the model's output and its loss function, as megatron-core's schedules ask."""
        batch = {key: value.to(_device()) for key, value in next(samples).items()}
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

        def loss(losses: torch.Tensor) -> Any:
            mask = batch["loss_mask"].view(-1)
            total = torch.sum(losses.view(-1).float() * mask)
            count = mask.sum().to(torch.int)
            return total, count, (total / count).detach().clone()

        return output, loss


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(block: Callable[[], None], steps: int) -> float:
    """Return the milliseconds of one step of a block."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    block()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps


def measure(rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return step times in milliseconds of alternating blocks: ours, bare."""
    device = select()
    config, tokenizer = preflight(
        parse_args(FLAGS.split(), TEXT, world_size=1, device=device.kind).config,
        GPT.preflight,
    )
    ours: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        torch_device = device.activate(0)
        context = init_groups(
            Layout.from_config(config.parallel), device, init_method=f"file://{folder}/rendezvous"
        )
        runs = []
        for _ in range(2):
            seed_everything(context, config.training.seed)
            runs.append(build_run(config, GPT, context, torch_device, tokenizer))
        full, loop = runs[0], BareLoop(runs[1])
        full.reporters = Reporters([MetricsFile(Path(folder), 0)])

        def block_of_ours() -> None:
            full.num_iterations = full.progress.iteration + steps
            train(full)

        def bare_block() -> None:
            for _ in range(steps):
                loop.step()

        for number in range(rounds + 1):
            pair = timed(block_of_ours, steps), timed(bare_block, steps)
            if number:  # the first round warms up
                ours.append(pair[0])
                bare.append(pair[1])
        context.destroy()
    return ours, bare


def main() -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each loop")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    ours, bare = measure(arguments.rounds, arguments.steps)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  {where}",
        f"python benchmarks/step_overhead.py --rounds {arguments.rounds} --steps {arguments.steps}",
        "",
        "| loop | ms per step, median | fastest block |",
        "|---|---|---|",
        f"| ours | {statistics.median(ours):.1f} | {min(ours):.1f} |",
        f"| bare | {statistics.median(bare):.1f} | {min(bare):.1f} |",
        f"| ratio | {statistics.median(ratios):.3f} | {min(ours) / min(bare):.3f} |",
    ]
    print("\n".join(lines))
    if arguments.save:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"step_overhead_{date.today()}.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
