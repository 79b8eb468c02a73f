"""The cost of our training loop over a bare loop, and of its heartbeat, from one run.

Both loops drive the same megatron-core model, schedule and optimizer on one rank; the bare one has
nothing else. Our loop also runs with a recorder that records nothing. Blocks of steps alternate, so
that all see the same state of the machine. As the cost of the heartbeat is less than the noise of a
step, it is also counted: events of a step times the measured time of one event.

    python benchmarks/step_overhead.py [--rounds 12] [--steps 10] [--save]
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.config.parser import parse_args
from megatron_ext.data.batch import StepLoader
from megatron_ext.device import select
from megatron_ext.disk.host_folder import shared_host_folder
from megatron_ext.extras.resilience.flight import write_flight
from megatron_ext.extras.resilience.watcher import SECONDS_BETWEEN_MEASUREMENTS
from megatron_ext.parallel.board import Board, Word
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.recorder import Action, Recorder
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
        assert isinstance(run.train_source.loader, StepLoader)
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


class NoRecorder(Recorder):
    """A recorder without phases, events and listeners."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def action(self, action: Action, peer: int | None = None) -> AbstractContextManager[None]:
        return _NOTHING

    def waiting(
        self, kind: str, microbatch: int, stage: int, peer: int
    ) -> AbstractContextManager[None]:
        return _NOTHING

    def step(self, iteration: int) -> None:
        pass


_NOTHING = nullcontext()


@dataclass(frozen=True)
class Times:
    """Step times in milliseconds of alternating blocks, and the heartbeat by counting.

    Attributes:
        silent: times of our loop with a recorder that records nothing.
        events: events of a step.
        event_us: microseconds of one event.
        flight_ms: processor time in a rank of one answer to a watcher, in milliseconds.
    """

    ours: list[float]
    silent: list[float]
    bare: list[float]
    events: float
    event_us: float
    flight_ms: float


def event_microseconds(board: Board) -> float:
    """Return the time of one event: half of an empty phase, which begins and ends."""
    recorder, number = Recorder(board.slot(1)), 20_000
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(number):
            with recorder.phase("forward"):
                pass
        times.append((time.perf_counter() - start) * 1e6 / (2 * number))
    return min(times)


def flight_milliseconds(folder: Path) -> float:
    """Return the processor time of one answer with the last collectives of this process."""
    start = time.process_time()
    for _ in range(5):
        write_flight(folder / "flight")
    return (time.process_time() - start) * 1e3 / 5


def measure(rounds: int, steps: int) -> Times:
    """Return the times of alternating blocks of steps, and those of the heartbeat."""
    device = select()
    config, tokenizer = preflight(
        parse_args(FLAGS.split(), TEXT, world_size=1, device=device.kind).config,
        GPT.preflight,
    )
    blocks: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        torch_device = device.activate(0)
        with shared_host_folder() as shared:
            assert shared is not None
            board = Board(shared / "board", 2)
            recorder = Recorder(board.slot(0))
            board.slot(0).set(Word.PID, os.getpid())
        context = init_groups(
            Layout.from_config(config.parallel),
            device,
            init_method=f"file://{folder}/rendezvous",
            recorder=recorder,
        )
        silent_context = replace(context, recorder=NoRecorder())
        runs = []
        for _ in range(2):
            seed_everything(context, config.training.seed)
            runs.append(build_run(config, GPT, context, torch_device, tokenizer))
        full, loop = runs[0], BareLoop(runs[1])
        full.reporters = Reporters([MetricsFile(Path(folder), 0)])

        def block_of_ours(context: ParallelContext) -> None:
            full.context = full.runner.context = context
            assert full.runner.engine is not None
            full.runner.engine.context = context
            full.num_iterations = full.progress.iteration + steps
            train(full)

        def bare_block() -> None:
            for _ in range(steps):
                loop.step()

        kinds = [partial(block_of_ours, context), partial(block_of_ours, silent_context)]
        kinds.append(bare_block)
        orders = list(itertools.permutations(range(len(kinds))))
        for number in range(rounds + 1):
            before = board.read(1)[0].events[-1].number if number else 0
            times = [0.0] * len(kinds)
            # Each kind is the first as often as the others: a block of another model comes before.
            for place in orders[number % len(orders)]:
                times[place] = timed(kinds[place], steps)
            events = (board.read(1)[0].events[-1].number - before) / steps
            if number:  # the first round warms up
                blocks.append(times)
        flight_ms = flight_milliseconds(Path(folder))
        context.destroy()
    ours, silent, bare = (list(times) for times in zip(*blocks, strict=True))
    return Times(ours, silent, bare, events, event_microseconds(board), flight_ms)


def heartbeat_lines(times: Times) -> list[str]:
    """Return the rows of the table about the heartbeat, which stays below 0.5% of a step."""
    step = statistics.median(times.silent)
    counted = times.events * times.event_us / 1e3
    asked = times.flight_ms / (1e3 * SECONDS_BETWEEN_MEASUREMENTS)
    pairs = statistics.median(a / b for a, b in zip(times.ours, times.silent, strict=True))
    fastest = min(times.ours) / min(times.silent)
    return [
        f"| ours without heartbeat | {step:.1f} | {min(times.silent):.1f} |",
        f"| heartbeat, by blocks | {100 * (pairs - 1):+.2f}% | {100 * (fastest - 1):+.2f}% |",
        f"| heartbeat, {times.events:.0f} events of {times.event_us:.2f} us | {counted:.3f} | "
        f"{100 * counted / step:.2f}% |",
        f"| answers to a watcher, {times.flight_ms:.1f} ms each | | {100 * asked:.3f}% |",
    ]


def main() -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each loop")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    times = measure(arguments.rounds, arguments.steps)
    ours, bare = times.ours, times.bare
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
        *heartbeat_lines(times),
    ]
    print("\n".join(lines))
    if arguments.save:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"step_overhead_{date.today()}.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
