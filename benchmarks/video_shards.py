"""Plan the memory of an 11B video model on 16 GPUs, by how much of its state the GPUs share.

Every number is planned by the code behind ``--dry-run``; no GPU and no data are needed. A line is
one way to share: nothing, the optimizer (ZeRO-1), gradients (ZeRO-2) or weights too (ZeRO-3).
``state`` is what a GPU holds between steps; it does not depend on the clips. With shared weights,
the peak may be that of set-up, before they are cut.

    python benchmarks/video_shards.py [--shape 768x768x129] [--gpus 16] [--save]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ext.config.parser import parse_args
from megatron_ext.planning.memory import RankMemory, worst_case
from megatron_ext.train.main import preflight, silence_known_warnings
from megatron_ext.video.flow import cases
from megatron_ext.video.task import FLOW, VIDEO

ENCODERS = "--codec-channels 16 --text-length 512 --text-width 4096 --pooled-width 768"
"""The widths of HunyuanVideo's VAE, T5-XXL and CLIP-L, which Open-Sora 2.0 uses."""

MODEL = (
    f"--mmdit-size 11b --bf16 --micro-batch-size 1 --train-iters 1 --lr-warmup-iters 0 {ENCODERS}"
)
WAYS = {
    "nothing": "",
    "optimizer and average": "--use-distributed-optimizer",
    "gradients too": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
    "weights too": "--use-distributed-optimizer "
    "--data-parallel-sharding-strategy optim_grads_params",
}
HEAD = "| shared | weights | gradients | optimizer | state | average | activations | peak |"


def planned(way: str, gpus: int, shape: str) -> RankMemory:
    """Return the memory of a GPU with the flags of one way to share."""
    words = f"{MODEL} {way} --global-batch-size {gpus} --dry-run --dry-run-shape {shape}"
    parsed = parse_args(words.split(), VIDEO, world_size=gpus, device="cuda")
    with redirect_stdout(None):
        config, _ = preflight(parsed.config, FLOW.preflight)
    return worst_case(cases(config))[1][0]


def row(name: str, rank: RankMemory) -> str:
    """Return one line of the table, in GB (10^9 bytes)."""
    x = rank.state
    state = x.parameters + x.gradients + x.optimizer
    sizes = [x.parameters, x.gradients, x.optimizer, state, x.average]
    sizes += [rank.activations + rank.transient, rank.total]
    return "| " + " | ".join([name, *(f"{size / 1e9:.1f}" for size in sizes)]) + " |"


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it to results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="768x768x129", help="height x width x frames")
    parser.add_argument("--gpus", type=int, default=16, help="data-parallel GPUs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    silence_known_warnings("cuda")
    lines = [
        f"{date.today()}  megatron-core {version('megatron-core')}  planned, in GB of 10^9 bytes",
        f"python benchmarks/video_shards.py {' '.join(argv)}".rstrip(),
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
        *(row(name, planned(way, args.gpus, args.shape)) for name, way in WAYS.items()),
    ]
    print("\n".join(lines))
    if args.save:
        path = ROOT / "benchmarks" / "results" / f"video_shards_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
