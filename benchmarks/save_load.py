"""Measures saves and loads of a checkpoint beside torch's own, in one run of one rank.

Three kinds alternate, so that all see the same state of the machine, on a model of 77 million
parameters with Adam's two moments:

- here: a checkpoint as the training saves and loads it, with all checks;
- torch: the same tensors in one file by ``torch.save`` with ``fsync``, in place of the last one,
  whose memory in the page cache it reuses; read by ``torch.load`` and copied into the model;
- DCP: the same tensors by ``torch.distributed.checkpoint``, copied into the model.

The tables have medians: seconds, and CPU seconds, which a busy machine changes less.

    python benchmarks/save_load.py [--rounds 5] [--folder DIR] [--save]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_ext.text.task import TEXT
from megatron_ext.train.loop import train
from megatron_ext.train.main import main as train_main
from megatron_ext.train.run import Run

FLAGS = (
    "--num-layers 10 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 1 --lr 1e-4 --lr-decay-style constant --use-distributed-optimizer "
    "--num-workers 0 --log-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 4000 --nproc-per-node 1 --keep-last 1"
)


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Return the weights and the two moments of each of the run's parameters, by name."""
    state = dict[str, Tensor]()
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        inner = optimizer.optimizer
        for group_number, group in enumerate(inner.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = f"{group_number}.{number}"
                state[name] = parameter.detach()
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[f"{name}.{moment}"] = inner.state[parameter][moment]
    return state


class Kinds:
    """The three ways to save and to load, each into a folder of its own below ``folder``."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._state = tensors_of(run)
        self._file = folder / "torch.pt"
        self.saves: dict[str, Callable[[], Any]] = {
            "here": self._save,
            "torch": self._save_file,
            "DCP": self._save_dcp,
        }
        self.loads: dict[str, Callable[[], Any]] = {
            "here": self._load,
            "torch": self._load_file,
            "DCP": self._load_dcp,
        }

    def _save(self) -> None:
        self._run.progress.iteration += 1
        self._run.save_now(waits=True)

    def _save_file(self) -> None:
        with self._file.open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def _save_dcp(self) -> None:
        folder = self._folder / "dcp"
        shutil.rmtree(folder, ignore_errors=True)
        dcp.save(self._state, checkpoint_id=folder, no_dist=True)

    def _load(self) -> None:
        run = self._run
        checkpoints = run.checkpoints
        assert checkpoints is not None
        checkpoints.load(
            model=run.chunks,
            optimizer=run.optimizer,
            scheduler=run.scheduler,
            run_config=run.config,
        )

    def _load_file(self) -> None:
        read = torch.load(self._file, weights_only=True)
        for name, value in self._state.items():
            value.copy_(read[name])

    def _load_dcp(self) -> None:
        dcp.load(self._state, checkpoint_id=self._folder / "dcp", no_dist=True)


def measure(run: Run, rounds: int, folder: Path, result: Path) -> None:
    """Train one step, time all kinds in turn, and write the table to the file ``result``."""
    train(run)
    kinds = Kinds(run, folder)
    number = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
    total = sum(value.nbytes for value in kinds._state.values())
    lines = [f"{number / 1e6:.0f} million parameters, {total / 2**20:.0f} MiB", ""]
    for what, calls in (("save", kinds.saves), ("load", kinds.loads)):
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in calls}
        for _ in range(rounds + 1):
            for kind, call in calls.items():
                started = time.perf_counter(), time.process_time()
                call()
                spent = time.perf_counter() - started[0], time.process_time() - started[1]
                seconds[kind].append(spent)
        lines += [f"| {what} | seconds | over torch | CPU seconds |", "|---|---|---|---|"]
        # The first save makes the plan, and the first of each kind finds no file in the cache.
        medians = {
            kind: [statistics.median(column) for column in zip(*values[1:], strict=True)]
            for kind, values in seconds.items()
        }
        for kind, (wall, cpu) in medians.items():
            ratio = wall / medians["torch"][0]
            lines.append(f"| {kind} | {wall:.2f} | {ratio:.2f} | {cpu:.2f} |")
        firsts = ", ".join(f"{kind} {values[0][0]:.2f}" for kind, values in seconds.items())
        lines += [f"The first {what}: {firsts} seconds.", ""]
    result.write_text("\n".join(lines))


def main() -> int:
    """Print the tables; with --save also write them beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument("--folder", default=str(ROOT), help="folder on the disk to measure")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        result = folder / "result"
        words = f"{FLAGS} --save {folder}/save --load {folder}/save"
        code = train_main(
            TEXT,
            words.split(),
            work=lambda run: measure(run, arguments.rounds, folder, result),
        )
        if code:
            return code
        lines = [
            f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}",
            f"python benchmarks/save_load.py --rounds {arguments.rounds}",
            "",
            result.read_text(),
        ]
    print("\n".join(lines))
    if arguments.save:
        folder = Path(__file__).parent / "results"
        (folder / f"save_load_{date.today()}.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
