"""From one checkpoint, every layout trains with the losses and gradient norms of one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

TOLERANCE = 1e-6
STEPS = 5

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2+sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2xvpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "cp2 all_gather": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "cp2 a2a": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "cp4": (4, "--context-parallel-size 4"),
    "dp2": (2, ""),
    "dp4": (4, ""),
    "tp2xpp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2xcp2": (4, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    "pp2xcp2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "cp2xdp2": (4, "--context-parallel-size 2"),
    "tp2xpp2xdp2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def _flags(checkpoint: Path) -> list[str]:
    words = f"--eod-mask-loss --train-iters {STEPS} --load {checkpoint} --finetune".split()
    return [*TINY, *mock_data(), *words]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of the llama model, and what one rank makes of it."""
    folder = tmp_path_factory.mktemp("one_rank")
    checkpoint = folder / "checkpoint"
    flags = [*TINY, *mock_data(), "--train-iters", "1"]
    assert train_on_ranks(flags, save=checkpoint)[0] == 0
    code, rows = train_on_ranks(_flags(checkpoint), save=folder / "run")
    assert code == 0
    return checkpoint, training_rows(rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_losses_of_one_rank(
    name: str, one_rank: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoint, truth = one_rank
    ranks, layout = LAYOUTS[name]
    code, rows = train_on_ranks(
        [*_flags(checkpoint), *layout.split()], ranks=ranks, save=tmp_path / "run"
    )
    assert code == 0
    mine = training_rows(rows)
    assert len(mine) == len(truth) == STEPS
    for row, want in zip(mine, truth, strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=TOLERANCE), (
                f"{name} iteration {row['iteration']} {key}: {row[key]} instead of {want[key]}"
            )


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-token-dispatcher-type alltoall"
).split()

EXPERT_LAYOUTS = {
    "dp2": (2, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2+sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2xcp2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
}


@pytest.fixture(scope="module")
def experts_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    checkpoint = folder / "checkpoint"
    flags = [*TINY, *mock_data(), *EXPERTS, "--train-iters", "1"]
    assert train_on_ranks(flags, save=checkpoint)[0] == 0
    code, rows = train_on_ranks([*_flags(checkpoint), *EXPERTS], save=folder / "run")
    assert code == 0
    return checkpoint, training_rows(rows)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_and_their_auxiliary_losses_do_not_depend_on_the_layout(
    name: str, experts_on_one_rank: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoint, truth = experts_on_one_rank
    ranks, layout = EXPERT_LAYOUTS[name]
    flags = [*_flags(checkpoint), *EXPERTS, *layout.split()]
    code, rows = train_on_ranks(flags, ranks=ranks, save=tmp_path / "run")
    assert code == 0
    for row, want in zip(training_rows(rows), truth, strict=True):
        for key in ("lm loss", "grad_norm", "load_balancing_loss", "z_loss"):
            assert math.isclose(row[key], want[key], rel_tol=TOLERANCE), (name, key)
