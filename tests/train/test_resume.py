"""Interrupted runs go on as if nothing had happened, also in another layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

STEPS = 12
BREAK = 7
EP2 = "--expert-model-parallel-size 2"


def _flags(*more: str) -> list[str]:
    words = f"--train-iters {STEPS} --save-interval {BREAK} --eod-mask-loss".split()
    return [*TINY, *mock_data(), *words, *more]


def _rows(save: Path, *more: str, ranks: int = 1) -> list[dict[str, Any]]:
    code, rows = train_on_ranks(_flags(*more), ranks=ranks, save=save)
    assert code == 0
    return training_rows(rows)


def _assert_close(
    rows: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float
) -> None:
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=tolerance), (row["iteration"], key)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the rows of the whole run on one rank."""
    return _rows(tmp_path_factory.mktemp("whole") / "save")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        pytest.param(4, "--context-parallel-size 2", marks=pytest.mark.slow),
        (2, "--overlap-grad-reduce --ddp-bucket-size 5000"),
        # The embedding's copy has a bucket of its own, with padding before the next one.
        pytest.param(
            3,
            "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Etttt|mm|L "
            "--mtp-num-layers 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resuming_in_the_same_layout_is_bit_identical(
    ranks: int, layout: str, tmp_path: Path
) -> None:
    whole = _rows(tmp_path / "whole", *layout.split(), ranks=ranks)
    save = tmp_path / "broken"
    stop = ["--exit-interval", str(BREAK), *layout.split()]
    assert len(_rows(save, *stop, ranks=ranks)) == BREAK
    resumed = _rows(save, "--load", str(save), *layout.split(), ranks=ranks)
    assert [row["iteration"] for row in resumed] == list(range(1, STEPS + 1))
    for key in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in resumed] == [row[key] for row in whole], key


def test_dropout_and_bf16_resume_bit_identically(tmp_path: Path) -> None:
    more = "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1".split()
    whole = _rows(tmp_path / "whole", *more)
    save = tmp_path / "broken"
    _rows(save, *more, "--exit-interval", str(BREAK))
    resumed = _rows(save, *more, "--load", str(save))
    assert [row["lm loss"] for row in resumed] == [row["lm loss"] for row in whole]


def test_resuming_in_other_layouts_follows_the_uninterrupted_run(
    uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """TP1, then TP2 x PP2 from step 4 on, then CP2 x DP2 from step 8 on: within 1e-6."""
    save = tmp_path / "save"
    load = ("--load", str(save))
    _rows(save, "--exit-interval", "4")
    four = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    _rows(save, *load, "--exit-interval", "8", *four, ranks=4)
    rows = _rows(save, *load, "--context-parallel-size", "2", ranks=4)
    assert len(rows) == STEPS
    _assert_close(rows, uninterrupted, 1e-6)


EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"


@pytest.mark.parametrize(
    ("optimizer", "precision", "tolerance"),
    [
        ("--use-distributed-optimizer", "", 1e-6),
        ("--no-use-distributed-optimizer", "", 1e-6),
        ("--no-use-distributed-optimizer", "--bf16", 1e-2),
    ],
)
def test_experts_with_biases_resume_whether_or_not_ranks_share_them_out(
    optimizer: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    """The run has EP1, EP2 from step 4 on, and EP1 again from step 8 on."""
    more = f"{EXPERTS} {optimizer} {precision}".split()
    whole = _rows(tmp_path / "whole", *more, ranks=2)
    save = tmp_path / "save"
    load = ("--load", str(save))
    _rows(save, *more, "--exit-interval", "4", ranks=2)
    _rows(save, *more, *load, *EP2.split(), "--exit-interval", "8", ranks=2)
    rows = _rows(save, *more, *load, ranks=2)
    assert len(rows) == STEPS
    _assert_close(rows, whole, tolerance)


def test_strict_names_do_not_forbid_another_layout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The random states of the layout that saved are left where they are."""
    save, strict = tmp_path / "save", "--dist-ckpt-strictness raise_all".split()
    _rows(save, *strict, "--exit-interval", "4")
    load = ["--load", str(save), "--exit-interval", "5", "--tensor-model-parallel-size", "2"]
    assert len(_rows(save, *strict, *load, ranks=2)) == 5
    # Names of the optimizer count.
    words = _flags(*strict, "--load", str(save), "--no-load-optim")
    assert train_on_ranks(words, save=tmp_path / "refused")[0] != 0
    shown = capfd.readouterr().err
    assert "these names are not wanted by the run: ['optimizer.state.exp_avg" in shown
    assert "or another `--dist-ckpt-strictness` than raise_all." in shown


def _short(words: str, ranks: int, save: Path) -> list[dict[str, Any]]:
    """Return the rows of four steps of a small model with experts, saved after the second."""
    size = "--num-experts 4 --num-layers 2 --train-iters 4 --save-interval 2 --global-batch-size 4"
    return _rows(save, "--no-use-distributed-optimizer", *f"{size} {words}".split(), ranks=ranks)


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_experts_that_the_first_stage_lacks_resume(optimizer: str, tmp_path: Path) -> None:
    """The first stage saves the count of the experts' updates, but has no experts.

    The same layout gives the same bits, another one agrees within 1e-6.
    """
    stages = "--pipeline-model-parallel-size 2"
    words = f"--moe-layer-freq [0,1] {optimizer} {EP2}"
    save = tmp_path / "save"
    whole = _short(f"{words} {stages}", 4, save)
    load = f"--load {save} --ckpt-step 2"
    _assert_close(_short(f"{words} {stages} {load}", 4, tmp_path / "same"), whole[2:], 0.0)
    _assert_close(_short(f"{words} {load}", 2, tmp_path / "other"), whole[2:], 1e-6)


def test_another_schedule_is_refused_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    _rows(save, "--exit-interval", str(BREAK))
    flags = _flags("--load", str(save), "--lr-decay-iters", "30")
    assert train_on_ranks(flags, save=save)[0] != 0
    shown = capfd.readouterr().err
    assert "The learning-rate schedule is not the checkpoint's" in shown
    assert "`--override-opt-param-scheduler`" in shown
    code, rows = train_on_ranks([*flags, "--override-opt-param-scheduler"], save=save)
    assert code == 0
    assert training_rows(rows)[-1]["iteration"] == STEPS
