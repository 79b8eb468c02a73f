"""How long a user waits for an answer about flags, and for the first step of a tiny run.

Prints the CPU seconds of a whole program, children included: user and system time, as medians.
Programs of a round run one after another, so that a change of the machine's load meets all of them.
To compare two versions of the package, run the script in a checkout of each with ``--root``.

    python benchmarks/answers.py [--rounds 10] [--root FOLDER]
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 "
    "--lr 1e-2 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
)
FOUR = "--nproc-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
PROGRAMS = {
    "import torch": "-c|import torch",
    "import megatron.core": "-c|import torch, megatron.core.transformer",
    "help": "pretrain_gpt.py --help",
    "help of a word": "pretrain_gpt.py --help optimizer",
    "a misspelt flag": f"pretrain_gpt.py {MODEL} --hiden-size 64",
    "a wrong value": f"pretrain_gpt.py {MODEL} --lr -1",
    "print-config": f"pretrain_gpt.py {MODEL} --print-config",
    "dry run that is refused": f"pretrain_gpt.py {MODEL} --dry-run --tensor-model-parallel-size 3",
    "dry run": f"pretrain_gpt.py {MODEL} --dry-run",
    "video: help": "pretrain_video.py --help",
    "video: a misspelt flag": "pretrain_video.py --video-data-path x --vidoe-model mmdit",
    "first step, 1 rank": f"pretrain_gpt.py {MODEL}",
    "first step, 4 ranks": f"pretrain_gpt.py {MODEL} {FOUR}",
}
"""Arguments of Python by name; words are separated by ``|`` if there is one, else by spaces."""


def cpu_seconds(words: str, root: Path) -> tuple[float, int]:
    """Run Python with ``words`` in ``root``; return its CPU seconds and its exit code."""
    split = words.split("|") if "|" in words else words.split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *split], cwd=root, env=env, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main() -> None:
    """Measure all programs in rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="runs of each program")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    codes: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, words in PROGRAMS.items():
            taken, codes[name] = cpu_seconds(words, args.root)
            seconds[name].append(taken)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {args.rounds} rounds\n")
    print("| program | exit code | CPU s, median | least | most |\n|---|---|---|---|---|")
    for name, taken_all in seconds.items():
        middle = statistics.median(taken_all)
        least, most = min(taken_all), max(taken_all)
        print(f"| {name} | {codes[name]} | {middle:.2f} | {least:.2f} | {most:.2f} |")


if __name__ == "__main__":
    main()
