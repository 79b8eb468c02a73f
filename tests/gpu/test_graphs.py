"""CUDA graphs change the time of a step and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.runs import LAYOUTS, losses, needs_gpus, train
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

STEPS = 10
FLAGS = [*TINY, *mock_data(), *f"--train-iters {STEPS} --eval-iters 1 --eval-interval 4".split()]
GRAPHS = ["--cuda-graph-impl", "local"]


def check(words: str, folder: Path, *, ranks: int = 1, tolerance: float = 1e-6) -> None:
    """Check that losses are equal to the last bit, since only the launches differ."""
    flags = [*FLAGS, *words.split()]
    without = losses(train(flags, folder / "without", on="cuda", ranks=ranks))
    recorded = losses(train([*flags, *GRAPHS], folder / "with", on="cuda", ranks=ranks))
    assert len(recorded) == STEPS
    assert recorded == pytest.approx(without, rel=tolerance)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16",
        "--bf16 --hidden-dropout 0.1",
        "--bf16 --reset-attention-mask",
        "--rampup-batch-size 4 4 16",
    ],
)
def test_one_gpu(words: str, tmp_path: Path) -> None:
    check(words, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus(layout: str, tmp_path: Path) -> None:
    """The end of the run also shows that the graphs go before the communicators of NCCL."""
    needs_gpus(2)
    check(f"{LAYOUTS[layout]} --bf16", tmp_path, ranks=2)


def test_overlap_on_two_gpus(tmp_path: Path) -> None:
    needs_gpus(2)
    check("--bf16 --overlap-grad-reduce --overlap-param-gather", tmp_path, ranks=2)


def test_virtual_chunks_on_two_gpus(tmp_path: Path) -> None:
    needs_gpus(2)
    words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    check(words, tmp_path, ranks=2)
