"""Bytes that a rank keeps between steps for parameters, gradients, optimizer and average.

A video model is built by the code that trains it and takes a step on each number of replicas. Then
every tensor that the run holds is found and its memory counted once. Beside it stands the formula
for P parameters on a rank and DP replicas with the distributed optimizer:

    bf16: 2 P parameters + 4 P gradients + (4 + 4 + 4) P / DP optimizer + 4 P / DP average
    fp32: 4 P parameters + 4 P gradients +     (4 + 4) P / DP optimizer + 4 P / DP average

The optimizer keeps two moments, and in bf16 the fp32 parameters, which in fp32 are the parameters
themselves. What is measured beyond it is mostly padding: megatron-core lets each parameter start at
a multiple of 64 elements, and each bucket end at one of 128 and DP.

    python benchmarks/video_memory.py [--mmdit-size small] [--save]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.parallel.context import init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.loop import train
from megatron_ext.train.main import preflight, silence_known_warnings
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.video.data.cli import main as preprocess
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.task import FLOW, VIDEO

FLAGS = (
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr-warmup-iters 0 "
    "--num-workers 0 --use-distributed-optimizer"
)
KINDS = ("parameters", "gradients", "optimizer", "average")
FORMULA = {"bf16": (2, 4, 12, 4), "fp32": (4, 4, 8, 4)}
"""Bytes a parameter of each kind; the last two are shared by the replicas."""


def make_latents(folder: Path) -> Path:
    """Encode a few rendered clips; the contents do not matter, the widths hardly."""
    clips, latents = folder / "clips", folder / "latents"
    script = ROOT / "examples" / "video" / "make_clips.py"
    subprocess.run([sys.executable, script, clips, "--per-caption", "1"], check=True)
    flags = "--codec-channels 16 --text-length 8 --text-width 64 --pooled-width 64".split()
    words = ["--input", str(clips / "clips.jsonl"), "--output", str(latents), *flags]
    if preprocess([*words, "--buckets", '{"32px": {"9": [1.0, 1]}}']) != 0:
        raise SystemExit("the clips could not be encoded; the message is above")
    return latents


def reachable(root: Any) -> Iterator[torch.Tensor]:
    """Return every tensor that an object holds, directly or through others."""
    waiting, seen = [root], set()
    while waiting:
        entry = waiting.pop()
        if id(entry) in seen or isinstance(entry, (type, str, bytes)):
            continue
        seen.add(id(entry))
        if isinstance(entry, torch.Tensor):
            yield entry
        if isinstance(entry, dict):
            waiting += [*entry.keys(), *entry.values()]
        elif isinstance(entry, (list, tuple, set, frozenset)):
            waiting += entry
        elif type(entry).__module__.partition(".")[0] in ("torch", "megatron", "megatron_ext"):
            waiting += getattr(entry, "__dict__", {}).values()


class Storages:
    """Bytes of memory blocks, each of which counts for the first that names it."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def take(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the blocks that were not counted before."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def measured(run: Run, before: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the bytes of each kind on this rank, and of the run's other tensors."""
    storages = Storages()
    storages.take(before)
    buffers = [b for chunk in run.chunks for b in chunk.buffers]
    parameters = [p for chunk in run.chunks for p in chunk.parameters()]
    gradients = [b.grad_data for b in buffers] + [p.grad for p in parameters if p.grad is not None]
    found = {"count": sum(p.numel() for p in parameters if p.requires_grad)}
    found["parameters"] = storages.take([*(b.param_data for b in buffers), *parameters])
    found["gradients"] = storages.take(gradients)
    found["optimizer"] = storages.take(reachable(run.optimizer))
    found["average"] = storages.take(reachable(run.ema))
    found["others"] = storages.take(living())
    return found


def living() -> list[torch.Tensor]:
    """Return every tensor of this process."""
    gc.collect()
    return [entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor)]


def run_rank(config: RunConfig, tokenizer: Tokenizer, folder: Path) -> int:
    """Build the run, take its step, and write down what it holds."""
    before = living()
    device = select()
    torch_device = device.activate(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    context = init_groups(
        Layout.from_config(config.parallel), device, init_method=f"file://{folder}/store"
    )
    seed_everything(context, config.training.seed)
    run = build_run(config, FLOW, context, torch_device, tokenizer)
    with redirect_stdout(None):
        train(run)
    (folder / f"rank_{context.rank}.json").write_text(json.dumps(measured(run, before)))
    context.destroy()
    return 0


def measure(size: str, precision: str, replicas: int, latents: Path) -> dict[str, int]:
    """Return what the rank with the most memory holds."""
    words = [*FLAGS.split(), "--mmdit-size", size, "--video-data-path", str(latents)]
    words += ["--nproc-per-node", str(replicas)]
    words += ["--bf16"] if precision == "bf16" else []
    device = select()
    parsed = parse_args(words, VIDEO, world_size=0, device=device.kind)
    with redirect_stdout(None):
        config, tokenizer = preflight(parsed.config, FLOW.preflight)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if fork_ranks(lambda: run_rank(config, tokenizer, folder), replicas) != 0:
            raise SystemExit("a rank failed; its message is above")
        ranks = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    return max(ranks, key=lambda found: sum(found[kind] for kind in KINDS))  # type: ignore[no-any-return]


HEAD = (
    "| precision | DP | parameters (MB) | gradients (MB) | optimizer (MB) | average (MB) "
    "| sum (MB) | formula (MB) | deviation | other tensors (MB) |"
)


def row(precision: str, replicas: int, found: dict[str, int]) -> str:
    """Return one line of the table."""
    shares = (1, 1, replicas, replicas)
    per_parameter = sum(x / share for x, share in zip(FORMULA[precision], shares, strict=True))
    total, formula = sum(found[kind] for kind in KINDS), per_parameter * found["count"]
    cells = [precision, str(replicas)]
    cells += [f"{found[kind] / 1e6:.3f}" for kind in KINDS]
    cells += [f"{total / 1e6:.3f}", f"{formula / 1e6:.3f}", f"{total / formula - 1:+.5%}"]
    return "| " + " | ".join([*cells, f"{found['others'] / 1e6:.3f}"]) + " |"


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mmdit-size", choices=tuple(SIZES), default="small")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--precisions", nargs="+", choices=tuple(FORMULA), default=list(FORMULA))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    silence_known_warnings(select().kind)
    lines = [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  "
        f"megatron-core {version('megatron-core')}  {select().kind}",
        f"python benchmarks/video_memory.py {' '.join(argv)}".rstrip(),
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        latents = make_latents(Path(folder))
        print("\n".join(lines), flush=True)
        for precision in args.precisions:
            for replicas in args.replicas:
                found = measure(args.mmdit_size, precision, replicas, latents)
                lines.append(row(precision, replicas, found))
                print(lines[-1], flush=True)
    lines += ["", f"P = {found['count']} parameters on each rank."]
    print("\n".join(lines[-2:]))
    if args.save:
        path = Path(__file__).parent / "results" / f"video_memory_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
