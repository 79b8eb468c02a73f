"""Gradients of every parameter and their norm: many layouts against one rank, from the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows
from tools.parity import main

FLAGS = [*(word for word in TINY if word != "--use-cpu-initialization"), *mock_data()]
LAYOUTS = "mbs1,mbs4,dp2,pp2,pp2dp2,tp2,tp2sp,cp2,cp2pp2,pp2vpp2"


def agree(
    layouts: str, words: str, capfd: pytest.CaptureFixture[str], *, limit: float = 1e-5
) -> None:
    """Check that no gradient of two steps and no norm differs by more than the limit."""
    limits = f"--steps 2 --loss-tolerance {limit} --gradient-tolerance {limit}".split()
    code = main(["--layouts", layouts, *limits, "--", *FLAGS, "--eod-mask-loss", *words.split()])
    assert code == 0, capfd.readouterr().out


def test_main_loss_with_ragged_masks(capfd: pytest.CaptureFixture[str]) -> None:
    agree(LAYOUTS, "", capfd)


@pytest.mark.parametrize(
    "reduction", ["token", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sample", "square"))]
)
def test_reductions_agree_on_all_layouts(reduction: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs with multi-token prediction agree to 1e-6; tests/data checks the denominators."""
    words = f"--loss-reduction {reduction} --mtp-num-layers 1"
    agree("mbs4,dp2,pp2,cp2,tp2sp", words, capfd, limit=1e-6)


def test_one_sample_per_microbatch_is_the_mean_of_means(tmp_path: Path) -> None:
    flags = [*FLAGS, "--eod-mask-loss", "--micro-batch-size", "1", "--train-iters", "3"]
    norms = []
    for name, words in (
        ("sample", ["--loss-reduction", "sample"]),
        ("means", ["--no-calculate-per-token-loss"]),
    ):
        _, rows = train_on_ranks([*flags, *words], save=tmp_path / name)
        norms.append([row["grad_norm"] for row in training_rows(rows)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_virtual_chunks_on_two_stages(capfd: pytest.CaptureFixture[str]) -> None:
    """megatron-core's own schedule agrees too; its batched messages are never used."""
    agree("pp2vpp2,pp2vpp2coreint,pp2vpp2dp2[--overlap-grad-reduce]", "", capfd)
