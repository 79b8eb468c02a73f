"""Measures what a save costs a step: one that waits for its files, and one with ``--async-save``.

Both kinds alternate in one run of forked ranks, so that both see the same state of the machine; the
helpers are idle when a save begins. For models of three sizes the table has the time of a
save that waits, the time for which a step waits for a save in the background, their ratio, and the
memory of the copy.

    python benchmarks/async_save.py [--ranks 2] [--saves 15] [--save]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

from megatron_ext.text.task import TEXT
from megatron_ext.train.loop import train
from megatron_ext.train.main import main as train_main
from megatron_ext.train.run import Run

FLAGS = (
    "--num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-4 --num-workers 0 "
    "--lr-decay-style constant --use-distributed-optimizer --log-interval 100 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 4000 --async-save --keep-last 1"
)
MODELS = {
    "tiny": "--num-layers 4 --hidden-size 64",
    "larger": "--num-layers 4 --hidden-size 512",
    "large": "--num-layers 12 --hidden-size 768",
}


def copied_bytes() -> int:
    """Return the bytes of this process's memory that are copies of the state."""
    places = psutil.Process().memory_maps()
    return sum(place.rss for place in places if "memfd:checkpoint" in place.path)


def measure(run: Run, saves: int, result: Path) -> None:
    """Train two steps, and write the seconds of alternating saves of rank 0 to a file."""
    train(run)
    assert run.saves is not None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * saves + 2):
        run.saves.wait()
        torch.distributed.barrier()
        run.progress.iteration += 1
        waits = number % 2 == 1
        started = time.perf_counter()
        run.save_now(waits=waits)
        seconds[waits].append(time.perf_counter() - started)
    run.saves.wait()
    if run.context.rank == 0:
        # The first save of each kind makes the plan, and the memory of the copy.
        waiting, stalled = (statistics.median(seconds[waits][1:]) for waits in (True, False))
        ratio, copied = stalled / waiting, copied_bytes() / 2**20
        result.write_text(f"{copied:.0f} | {1e3 * waiting:.0f} | {1e3 * stalled:.1f} | {ratio:.1%}")


def main() -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--saves", type=int, default=15, help="saves of each kind")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}",
        f"python benchmarks/async_save.py --ranks {arguments.ranks} --saves {arguments.saves}",
        "",
        "| model | MiB copied by rank 0 | ms of a save that waits | ms of waiting for one in the "
        "background | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, flags in MODELS.items():
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            result = Path(folder) / "result"
            words = f"{FLAGS} {flags} --nproc-per-node {arguments.ranks} --save {folder}/save"
            code = train_main(
                TEXT,
                words.split(),
                work=lambda run, to=result: measure(run, arguments.saves, to),
            )
            if code:
                return code
            lines.append(f"| {name} | {result.read_text()} |")
    print("\n".join(lines))
    if arguments.save:
        folder = Path(__file__).parent / "results"
        (folder / f"async_save_{date.today()}.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
