"""The cost of memory checkpoints: of taking a snapshot, and of its copy for the neighbour.

Each rank takes snapshots of one model and optimizer as a run does between two steps. The time of
the state and of a take is what a step waits; a thread makes the copy meanwhile, in memory or over a
process group.

    python benchmarks/snapshot.py [--ranks 2] [--rounds 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext.config.parser import parse_args
from megatron_ext.device import select
from megatron_ext.extras.resilience.memory import Machines, MemoryCheckpoints
from megatron_ext.extras.resilience.snapshots import Snapshots
from megatron_ext.parallel.context import init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.main import preflight
from megatron_ext.train.setup import build_run

FLAGS = (
    "--num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --num-workers 0 "
    "--use-distributed-optimizer --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
)
MODELS = {
    "tiny, 1.8 M": "--num-layers 4 --hidden-size 128 --vocab-size 4000 "
    "--untie-embeddings-and-output-weights",
    "100 M": "--num-layers 12 --hidden-size 768 --vocab-size 20000",
}


def measure(model: str, ranks: int, rounds: int, over_group: bool) -> None:
    """Print the figures of one model on this rank's behalf; all ranks call this together."""
    words = [*FLAGS.split(), *MODELS[model].split(), "--nproc-per-node", str(ranks)]
    device = select()
    parsed = parse_args(words, TEXT, world_size=ranks, device=device.kind)
    config, assets = preflight(parsed.config, GPT.preflight)
    torch_device = device.activate(int(os.environ["LOCAL_RANK"]))
    context = init_groups(Layout.from_config(config.parallel), device)
    seed_everything(context, 1)
    run = build_run(config, GPT, context, torch_device, assets)
    folder = Path(os.environ["SNAPSHOTS"])
    machines = Machines.of(folder, context)
    store = MemoryCheckpoints(folder, 1, machines, context, neighbours=True, over_group=over_group)
    snapshots = Snapshots(run, lambda: None)
    store.prepare(*snapshots.state())
    states, takes, copies, size = list[float](), list[float](), list[float](), 0
    for number in range(rounds + 2):
        start = time.perf_counter()
        state = snapshots.state()
        built = time.perf_counter()
        size = store.take(number, *state).num_bytes
        taken = time.perf_counter()
        store.wait()
        ends = time.perf_counter()
        states.append((built - start) * 1e3)
        takes.append((taken - built) * 1e3)
        copies.append((ends - taken) * 1e3)
    store.close()
    store.remove()
    if context.rank == 0:
        # The first two rounds touch the memory.
        state_ms, take, copy = (statistics.median(x[2:]) for x in (states, takes, copies))
        how = "over a process group" if over_group else "in memory"
        print(
            f"{model}, {ranks} ranks: {size / 1e6:.1f} MB a rank; state {state_ms:.2f} ms, take "
            f"{take:.2f} ms ({size / take / 1e6:.2f} GB/s), copy {how} {copy:.2f} ms "
            f"({size / copy / 1e6:.2f} GB/s)",
            flush=True,
        )
    context.destroy()


def main() -> int:
    """Print one line for each model and way of copying."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    for model in MODELS:
        for over_group in (False, True):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                os.environ["SNAPSHOTS"] = folder
                code = fork_ranks(
                    partial(measure, model, given.ranks, given.rounds, over_group), given.ranks
                )
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
