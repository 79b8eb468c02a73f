"""Counts what the size of the world costs one rank: one real rank of a world of fake ones.

On torch's fake process group messages arrive at once and empty, so that a world of 16,384 ranks
fits into one process. The real rank creates its groups, reads its first batch, runs a whole step,
plans a save, saves again by the same plan, and loads a checkpoint that a single rank has written.
For each part the table has CPU seconds, the number of collective calls, of calls of ``new_group``,
and the bytes that this rank sends or receives in exchanges of Python objects: these are what grows
with the world, unlike tensors of the training.

    python benchmarks/fake_world.py [--worlds 64 1024 16384] [--layouts tensor experts] [--save]
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.checkpoint import manager, publish, resume, state, storage, unpickling
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.resume import Resume
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device import Device, select
from megatron_ext.parallel.context import (
    ParallelContext,
    embedding_ranks,
    init_groups,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.loop import train
from megatron_ext.train.main import preflight
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 32 --max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --lr-decay-style constant --num-workers 0 "
    "--use-distributed-optimizer --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 4000"
)
EXPERTS = (
    "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)


@dataclass(frozen=True)
class Case:
    """A layout to measure.

    Attributes:
        flags: the flags of the layout.
        replica: ranks of a replica of the dense model.
        model: flags that change the model.
    """

    flags: str
    replica: int
    model: str = ""


LAYOUTS = {
    "tensor": Case("--tensor-model-parallel-size 8", 8),
    "pipeline": Case(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 1 --context-parallel-size 2",
        16,
    ),
    "experts": Case(
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall", 1, EXPERTS
    ),
    "pairs": Case(
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex "
        "--moe-ranks-per-node 4 --overlap-moe-expert-parallel-comm",
        1,
        EXPERTS,
    ),
    "gradient shards": Case(
        "--data-parallel-sharding-strategy optim_grads --tensor-model-parallel-size 2", 2
    ),
    "weight shards": Case(
        "--data-parallel-sharding-strategy optim_grads_params --tensor-model-parallel-size 2", 2
    ),
}


MICROBATCHES = 4
"""Micro-batches of a step on each rank."""


@dataclass
class Counts:
    """The calls and bytes of one part of the start or of a save."""

    seconds: float = 0.0
    groups: int = 0
    calls: int = 0
    num_bytes: int = 0


class World:
    """Stands in for the other ranks: counts calls, and answers exchanges of Python objects."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._sent: Any = None

    def _exchanged(self, value: Any, ranks: int) -> None:
        self.counts.calls += 1
        self.counts.num_bytes += len(pickle.dumps(value)) * ranks

    def all_gather_object(self, found: list[Any], own: Any, group: Any = None) -> None:
        """Let every rank have sent what this one sends."""
        self._exchanged(own, len(found))
        found[:] = [own] * len(found)

    def gather_object(self, obj: Any, object_gather_list: Any = None, **_: Any) -> None:
        """Send an object to the first rank of a group; if this is it, let all have sent the same.

        The real rank is never rank 0.
        """
        self._sent = obj
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)
        self._exchanged(obj, len(object_gather_list or [obj]))

    def scatter_object_list(self, scatter_object_output_list: list[Any], **_: Any) -> None:
        """Let rank 0 of a save's plan send back the plan of this rank."""
        plan = getattr(self._sent, "wrapped", self._sent)
        prefix = _StoragePrefix(f"__{dist.get_rank()}_")
        scatter_object_output_list[0] = replace(plan, storage_data=prefix)
        self._exchanged(scatter_object_output_list, 1)

    def broadcast_object_list(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        """Leave what the caller has prepared for the case that nothing went wrong."""
        self._exchanged(object_list, 1)

    def on_first_rank(self, work: Callable[[], Any], what: str) -> Any:
        """Do what rank 0 would do, such as to make a folder, and count that it tells the result."""
        del what
        result = work()
        self._exchanged(result, 1)
        return result

    def new_group(self, *arguments: Any, _original: Any = dist.new_group, **options: Any) -> Any:
        """Create a fake group, whatever backend is asked for."""
        self.counts.groups += 1
        return _original(*arguments, **{**options, "backend": "fake"})

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's functions by these."""
        names = [name for name in vars(World) if name.endswith(("_object", "_list", "_group"))]
        by_name = {name: getattr(self, name) for name in names}
        with ExitStack() as stack:
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.multiple(module, **by_name))
            # What this rank holds is not whole without the others.
            stack.enter_context(mock.patch.object(storage, "sum_of_all_ranks", return_value=0))
            for module in (manager, publish, resume, state, storage, unpickling):
                stack.enter_context(mock.patch.object(module, "on_first_rank", self.on_first_rank))
            yield

    def counted(self, work: Callable[[], Any]) -> tuple[Any, Counts]:
        """Run ``work``; return its result and what it cost."""
        self.counts = Counts()
        started = time.process_time()
        result = work()
        self.counts.seconds = time.process_time() - started
        return result, self.counts


def prepared(case: Case, world_size: int, *flags: str) -> tuple[RunConfig, Any]:
    """Return the configuration of a run with ``world_size`` ranks, and what it has prepared."""
    os.environ["WORLD_SIZE"] = str(world_size)
    layout_flags = case.flags if world_size > 1 else ""
    batch = MICROBATCHES * max(1, world_size // case.replica)
    words = f"{FLAGS} {case.model} {layout_flags} --global-batch-size {batch}".split()
    parsed = parse_args([*words, *flags], TEXT, world_size=world_size, device=select().kind)
    return preflight(parsed.config, GPT.preflight)


def save_on_one_rank(case: Case, folder: Path) -> None:
    """Write a checkpoint of the model in its initial state, as a run with a single rank does."""
    config, assets = prepared(case, 1, "--save", str(folder))
    device = select()
    torch_device = device.activate(0)
    context = init_groups(Layout.from_config(config.parallel), device)
    seed_everything(context, 1)
    run = build_run(config, GPT, context, torch_device, assets)
    run.progress.iteration = 1
    run.save_now(waits=True)
    context.destroy()


def load(run: Run) -> None:
    """Load the checkpoint in the folder of ``--load`` into the parts of a run."""
    checkpoints = CheckpointManager(run.config.checkpoint, run.context)
    resume = Resume(checkpoints, run.config, run.context)
    loaded, _ = resume.load(
        [],
        model=run.chunks,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        ema=None,
        extra_state=run.runner.extra_state,
    )
    assert loaded is not None


def measured(case: Case, world_size: int, folder: Path) -> dict[str, Counts]:
    """Start one rank in the middle of a world, train a step, save twice and load; return costs."""
    saved = folder / "one_rank"
    save_on_one_rank(case, saved)
    world = World()
    device = select()
    torch_device = device.activate(0)
    config, assets = prepared(case, world_size, "--save", str(folder / "fake"))
    layout = Layout.from_config(config.parallel)
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=world_size // 2, world_size=world_size)
    costs = dict[str, Counts]()
    with world.installed():

        def start() -> ParallelContext:
            choose = embedding_ranks(config.model, config.parallel)
            context = init_groups(layout, Device(device.kind, "fake"), get_embedding_ranks=choose)
            assert not context.is_reporting_rank
            return context

        context, costs["groups"] = world.counted(start)
        seed_everything(context, 1)
        build = lambda: build_run(config, GPT, context, torch_device, assets)  # noqa: E731
        run, costs["model, data"] = world.counted(build)
        with mock.patch.object(Run, "save_now"):
            _, costs["first step"] = world.counted(lambda: train(run))
        for part in ("plan, save", "save again"):
            run.progress.iteration += 1
            _, costs[part] = world.counted(lambda: run.save_now(waits=True))
        checkpoint = replace(config.checkpoint, load=str(saved), save=None)
        run.config = replace(run.config, checkpoint=checkpoint)
        _, costs["load"] = world.counted(lambda: load(run))
        context.destroy()
    return costs


def table(costs: dict[str, dict[int, dict[str, Counts]]]) -> list[str]:
    """Return the table of the costs, by layout, world size and part."""
    lines = [
        "| layout | part | ranks | CPU seconds | new_group | object exchanges | KiB in them |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout, by_world in costs.items():
        for part in next(iter(by_world.values())):
            for world_size, of_world in by_world.items():
                cost = of_world[part]
                kibibytes = cost.num_bytes / 1024
                lines.append(
                    f"| {layout} | {part} | {world_size:,} | {cost.seconds:.2f} | "
                    f"{cost.groups:,} | {cost.calls} | {kibibytes:,.1f} |"
                )
    return lines


def main() -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    # megatron-core would warn of rank 0's common state, which is not there.
    logging.disable(logging.WARNING)
    # The first run of a process pays for imports and compilation, which no table should show.
    with tempfile.TemporaryDirectory() as folder:
        measured(LAYOUTS[arguments.layouts[0]], arguments.worlds[0], Path(folder))
    costs: dict[str, dict[int, dict[str, Counts]]] = {}
    for layout in arguments.layouts:
        for world_size in arguments.worlds:
            with tempfile.TemporaryDirectory() as folder:
                cost = measured(LAYOUTS[layout], world_size, Path(folder))
            costs.setdefault(layout, {})[world_size] = cost
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}",
        f"python benchmarks/fake_world.py --worlds {' '.join(map(str, arguments.worlds))}",
        "",
        *table(costs),
    ]
    print("\n".join(lines))
    if arguments.save:
        results = Path(__file__).parent / "results"
        (results / f"fake_world_{date.today()}.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
