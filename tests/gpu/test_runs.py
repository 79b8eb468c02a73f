"""A GPU computes what the CPU does: steps in fp32 and bf16, and checkpoints of either."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.gpu.runs import LAYOUTS, losses, needs_gpus, train
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

STEPS = 12
BREAK = 6
FLAGS = [*TINY, *mock_data(), "--train-iters", str(STEPS), "--eod-mask-loss"]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one rank with gloo, the truth."""
    return losses(train(FLAGS, tmp_path_factory.mktemp("cpu"), on="cpu"))


def test_nccl_on_one_gpu_follows_gloo(on_the_cpu: list[float], tmp_path: Path) -> None:
    assert losses(train(FLAGS, tmp_path, on="cuda")) == pytest.approx(on_the_cpu, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nccl_follows_gloo_in_the_same_layout(layout: str, tmp_path: Path) -> None:
    needs_gpus(2)
    flags = [*FLAGS, *LAYOUTS[layout].split()]
    gloo = losses(train(flags, tmp_path / "cpu", on="cpu", ranks=2))
    nccl = losses(train(flags, tmp_path / "cuda", on="cuda", ranks=2))
    assert nccl == pytest.approx(gloo, rel=1e-5)


def test_bf16_stays_beside_fp32(on_the_cpu: list[float], tmp_path: Path) -> None:
    """bf16 rounds to 3 digits; over these steps its losses stay within 0.5% of fp32's, and fall."""
    found = losses(train([*FLAGS, "--bf16"], tmp_path, on="cuda"))
    assert all(map(math.isfinite, found))
    assert found == pytest.approx(on_the_cpu, rel=5e-3)
    assert found != pytest.approx(on_the_cpu, rel=1e-7)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_of_one_resumes_on_the_other(
    first: str, then: str, on_the_cpu: list[float], tmp_path: Path
) -> None:
    save = tmp_path / "run"
    words = [*FLAGS, "--save-interval", str(BREAK)]
    train([*words, "--exit-interval", str(BREAK)], save, on=first)  # type: ignore[arg-type]
    rows = train([*words, "--load", str(save)], save, on=then)  # type: ignore[arg-type]
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    assert losses(rows) == pytest.approx(on_the_cpu, rel=1e-5)
