"""Parts that the benchmarks of streaming share: one rank, networks on it, and their results."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from megatron_ext.device import select
from megatron_ext.layers.initialization import initialize_by_name, mark_methods, unmark_methods
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.model import VideoDiT

RESULTS = Path(__file__).parent / "results"
SEED = 1234


@contextmanager
def one_rank() -> Iterator[ParallelContext]:
    """Make groups of a single rank, on the GPU if there is one."""
    device = select()
    silence_known_warnings(device.kind)
    device.activate(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as folder:
        context = init_groups(
            Layout(world_size=1), device, init_method=f"file://{folder}/rendezvous"
        )
        seed_everything(context, SEED)
        yield context
        context.destroy()


def build_network(
    context: ParallelContext,
    sizes: VideoDiTSizes,
    options: VideoDiTOptions,
    *,
    seed: int = SEED,
    deviation: float = 0.02,
) -> VideoDiT:
    """Build a video DiT in float32, its weights drawn with a standard deviation."""
    config = StepTransformerConfig(**sizes.transformer_fields(), init_method_std=deviation)
    mark_methods(config)
    network = VideoDiT.build(sizes, options, config, context)
    initialize_by_name([network], config, seed)
    unmark_methods(config)
    return network


def heading(script: str, argv: Sequence[str]) -> list[str]:
    """Return date, machine and command."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return [
        f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  "
        f"megatron-core {version('megatron-core')}  {where}",
        f"python benchmarks/{script}.py {' '.join(argv)}".rstrip(),
        "",
    ]


def table_head(*cells: str) -> list[str]:
    """Return the first two lines of a table."""
    return [table_row(*cells), "|---" * len(cells) + "|"]


def table_row(*cells: object) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def saved_as(script: str, suffix: str) -> Path:
    """Return the path of today's results."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{script}_{date.today()}{suffix}"


def show(lines: Sequence[str]) -> None:
    """Print a line at once."""
    print("\n".join(lines), flush=True, file=sys.stdout)
