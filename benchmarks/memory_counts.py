"""Memory and time of recomputation, of evaluation without gradients, and of sharding over replicas.

Two tables. The first is measured here: a small model takes steps on this machine's CPU. The kernel
tells the peak of resident memory above what the run holds between steps, and the CPU time of the
process, which a busy machine does not stretch. The second is counted, as `tools/plan.py` counts it,
for a larger model on GPUs that are not here: the bytes of the fullest rank, and the seconds of a
step by datasheet and assumed efficiency.

    python benchmarks/memory_counts.py [--steps 3] [--counted-only] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.memory import fullest, worst_case
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.task import TEXT
from megatron_ext.train.callbacks.evaluation import evaluate_split
from megatron_ext.train.loop import IntervalMetrics, count_step, next_inputs
from megatron_ext.train.main import main as run_trainer
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.run import Run

SHARED = "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
SMALL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 8 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 4 "
    "--train-iters 100 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 "
    f"--num-workers 0 --eval-interval 1000 --no-gradient-accumulation-fusion {SHARED}"
)
LARGE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 "
    "--lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 127999 "
    f"--untie-embeddings-and-output-weights {SHARED}"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODES = {
    "no recomputation": "",
    "selective": "--recompute-granularity selective",
    "full, each layer": FULL,
}
EVALUATION = "evaluation, no gradients"
SHARDING = {
    "none": "",
    "ZeRO-1 (distributed optimizer)": "--use-distributed-optimizer",
    "optim_grads": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
    "optim_grads_params": "--use-distributed-optimizer "
    "--data-parallel-sharding-strategy optim_grads_params",
}
GPU = "H100"


def _resident(field: str) -> int:
    """Return bytes of this process's resident memory: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_here(name: str, steps: int) -> int:
    """Take steps of one kind in this process; print peak bytes and seconds a step as JSON."""
    found: dict[str, float] = {}

    def work(run: Run) -> None:
        metrics = IntervalMetrics(run)

        def train() -> None:
            inputs, stats = next_inputs(run)
            result = run.runner.train(inputs, run.batch_size.global_batch_size)
            count_step(run, metrics, result, stats)

        step: Callable[[], object] = train
        step()  # allocates gradients and optimizer states
        if name == EVALUATION:
            step = lambda: evaluate_split(run, "validation")  # noqa: E731
            step()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        start = time.process_time()
        for _ in range(steps):
            step()
        found["seconds"] = (time.process_time() - start) / steps
        found["bytes"] = _resident("VmHWM") - before

    evaluates = name == EVALUATION
    words = [*SMALL.split(), *MODES.get(name, "").split()]
    words += ["--eval-iters", "1" if evaluates else "0"]
    code = run_trainer(TEXT, words, work=work)
    print(json.dumps(found))
    return code


def measured(name: str, steps: int) -> dict[str, float]:
    """Return what `measure_here` finds in a process of its own."""
    words = [sys.executable, __file__, "--steps", str(steps), "--only", name]
    # The C library gives the memory of freed tensors back at once, so that the peak is that of a
    # step and not of what it keeps for later ones.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def counted(flags: str, replicas: int) -> list[str]:
    """Return the cells of a row: GB of each kind on the fullest rank, and seconds of a step."""
    planned = {"dry_run": True, "dry_run_gpu": GPU}
    parsed = parse_args(
        [*LARGE.split(), *flags.split()],
        TEXT,
        world_size=replicas,
        device="cuda",
        defaults=planned,
    )
    config, _ = with_tokenizer(parsed.config)
    cost = parsed.task.cost
    assert cost is not None
    network, ranks = worst_case(cost.cases(config))
    rank = fullest(ranks)
    state = rank.state
    kinds = [state.parameters, state.gradients, state.optimizer]
    kinds += [rank.activations + rank.transient, rank.total]
    seconds = estimate(network, gpu_named(GPU)).seconds
    return [*(f"{value / 1e9:.1f}" for value in kinds), f"{seconds:.2f}"]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main(argv: list[str]) -> int:
    """Print the tables; with --save also write them to benchmarks/results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (3)")
    parser.add_argument("--counted-only", action="store_true", help="leave out the first table")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    if args.only is not None:
        return measure_here(args.only, args.steps)
    silence_known_warnings("cpu")
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  "
        f"megatron-core {version('megatron-core')}  cpu, {os.cpu_count()} cores",
        f"python benchmarks/memory_counts.py {' '.join(argv)}".rstrip(),
    ]
    if not args.counted_only:
        lines += ["", f"Measured on the CPU, mean of {args.steps} steps: `{SMALL}`", ""]
        rows = []
        for name in (*MODES, EVALUATION):
            found = measured(name, args.steps)
            rows.append([name, f"{found['bytes'] / 1e6:.0f}", f"{found['seconds']:.2f}"])
            print(rows[-1], flush=True)
        lines += table(["step", "peak above the state (MB)", "CPU seconds"], rows)
    lines += ["", f"Counted for {GPU}, not timed: `{LARGE}`", ""]
    rows = [
        [str(replicas), sharding, mode, *counted(f"{flags} {modes}", replicas)]
        for mode, modes in MODES.items()
        for replicas in (2, 4, 8)
        for sharding, flags in SHARDING.items()
        if mode == "no recomputation" or (replicas == 8 and sharding == "optim_grads")
    ]
    head = "DP, sharding, recomputation, parameters (GB), gradients (GB), optimizer (GB)"
    head += ", activations (GB), peak of a rank (GB), seconds of a step (planned)"
    lines += table(head.split(", "), rows)
    print("\n".join(lines))
    if args.save:
        path = Path(__file__).parent / "results" / f"memory_counts_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
