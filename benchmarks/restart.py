"""How soon a fault of a rank is seen, and how soon the next step begins and ends, on forked ranks.

Faults of one kind after another strike random ranks of one run, before random steps; the run keeps
its state as the flags after ``--`` say. Times count from the strike itself. A hang is seen after
its floor at the earliest.

    python benchmarks/restart.py [--faults 20] [--kinds SIGKILL SIGSTOP] [--ranks 4] [-- FLAGS]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext.disk.events import read_events
from megatron_ext.disk.host_folder import generation
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.main import main as train
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult

KINDS = "SIGKILL SIGSEGV exception SIGSTOP".split()
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --use-distributed-optimizer --num-workers 0 --eval-iters 0 "
    "--log-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 2000"
).split()
STEPS_BETWEEN = 5
"""Steps of each restart before its fault, so that the usual length of a step is known."""


class Strikes(Callback):
    """Lets a fault happen in each restart, and writes when it did and when steps end after it."""

    def __init__(self, run: Run, kind: str, faults: int, seed: int) -> None:
        super().__init__(run)
        chosen = random.Random(1000 * seed + generation())
        self._kind, self._strikes = kind, generation() < faults
        self._rank = chosen.randrange(run.context.layout.world_size)
        self._at = run.progress.iteration + STEPS_BETWEEN + chosen.randrange(3)
        self._is_first = True

    def _write(self, what: str) -> None:
        folder = Path(self.run.config.checkpoint.save or "")
        (folder / f"{what}_{generation()}").write_text(repr(time.time()))

    def before_step(self) -> None:
        if not self._strikes or self.run.progress.iteration != self._at:
            return
        if self.run.context.rank == self._rank:
            self._write("struck")
            if self._kind == "exception":
                raise RuntimeError("a fault of the benchmark")
            os.kill(os.getpid(), signal.Signals[self._kind])

    def after_update(self, result: StepResult) -> None:
        if self._is_first and self.run.context.is_reporting_rank:
            self._write("stepped")
        self._is_first = False


def measure(kind: str, faults: int, ranks: int, flags: list[str]) -> dict[str, list[float]]:
    """Return the seconds from each fault to its being seen, and to begin and end of a new step."""
    callback = partial(Strikes, kind=kind, faults=faults, seed=KINDS.index(kind))
    task = dataclasses.replace(GPT, callbacks=(callback,))
    steps = (faults + 1) * (STEPS_BETWEEN + 3)
    with tempfile.TemporaryDirectory() as name:
        words = [*FLAGS, "--train-iters", str(steps), "--nproc-per-node", str(ranks)]
        words += ["--save", name, "--max-restarts", str(faults), *flags]
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            code = train(task, words)
        assert code == 0, shown.getvalue()[-4000:]
        events = read_events(name)
        after = {(event["kind"], event.get("generation")): event["time"] for event in events}
        found: dict[str, list[float]] = {"seen": [], "begun": [], "ended": []}
        for number in range(faults):
            struck = float((Path(name) / f"struck_{number}").read_text())
            found["seen"].append(after["fault", number] - struck)
            found["begun"].append(after["restart", number + 1] - struck)
            stepped = float((Path(name) / f"stepped_{number + 1}").read_text())
            found["ended"].append(stepped - struck)
    return found


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the arguments of the benchmark; those after ``--`` go to the run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=20, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file for all seconds, as JSON")
    own, onward = words, []
    if "--" in words:
        own, onward = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments = parser.parse_args(own)
    arguments.flags = onward or ["--save-interval", "2"]
    return arguments


def main(words: list[str]) -> int:
    """Measure, and print a table of medians and largest values."""
    given = parsed(words)
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"{given.ranks} ranks, {' '.join(given.flags)}; seconds after the fault: median (most)\n")
    print("| fault | seen | new step begins | new step ends |\n|---|---|---|---|")
    seconds = {}
    for kind in given.kinds:
        seconds[kind] = measure(kind, given.faults, given.ranks, given.flags)
        cells = [f"{statistics.median(x):.2f} ({max(x):.2f})" for x in seconds[kind].values()]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
