"""Whole runs of pretrain_gpt.py, each in a process of its own, on a GPU or with the GPUs hidden."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron_ext.device import Device
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.reporting.files import read_metrics
from tests.training_runs import run_python

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "dp2": "",
}


def train(
    flags: Sequence[str], save: Path, *, on: Literal["cuda", "cpu"], ranks: int = 1
) -> list[dict[str, Any]]:
    """Return the rows of a run's training steps; its exit code must be 0."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {}
    words = [*flags, "--nproc-per-node", str(ranks), "--save", str(save)]
    run_python("pretrain_gpt.py", *words, **hidden)
    return [row for row in read_metrics(save / "metrics.jsonl") if row["kind"] == "train"]


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, this machine has {torch.cuda.device_count()}")


def losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["lm loss"] for row in rows]


@contextlib.contextmanager
def one_gpu() -> Iterator[ParallelContext]:
    """Make groups of this process alone, over NCCL."""
    silence_known_warnings("cuda")
    device = Device("cuda", "nccl")
    device.activate(0)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        context = init_groups(
            Layout(world_size=1), device, init_method=f"file://{folder}/rendezvous"
        )
        try:
            yield context
        finally:
            context.destroy()
