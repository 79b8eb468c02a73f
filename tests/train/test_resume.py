"""Interrupted runs go on as if nothing had happened, also in another layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

STEPS = 12
BREAK = 7


def _flags(*more: str) -> list[str]:
    words = f"--train-iters {STEPS} --save-interval {BREAK} --eod-mask-loss".split()
    return [*TINY, *mock_data(), *words, *more]


def _rows(save: Path, *more: str, ranks: int = 1) -> list[dict[str, Any]]:
    code, rows = train_on_ranks(_flags(*more), ranks=ranks, save=save)
    assert code == 0
    return training_rows(rows)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The whole run on one rank."""
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
    for row, want in zip(rows, uninterrupted, strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=1e-6), (row["iteration"], key)


EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"


def test_experts_with_biases_resume_whether_or_not_ranks_share_them_out(tmp_path: Path) -> None:
    """EP1, then EP2 from step 4 on, then EP1 again from step 8 on: within 1e-6."""
    more = EXPERTS.split()
    whole = _rows(tmp_path / "whole", *more, ranks=2)
    save, shared = tmp_path / "save", ("--expert-model-parallel-size", "2")
    load = ("--load", str(save))
    _rows(save, *more, "--exit-interval", "4", ranks=2)
    _rows(save, *more, *load, *shared, "--exit-interval", "8", ranks=2)
    rows = _rows(save, *more, *load, ranks=2)
    assert len(rows) == STEPS
    for row, want in zip(rows, whole, strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=1e-6), (row["iteration"], key)


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_experts_resume_without_a_distributed_optimizer_too(precision: str, tmp_path: Path) -> None:
    """EP1, then EP2 from step 4 on, then EP1 again from step 8 on, as above."""
    flags = [x for x in _flags(*EXPERTS.split()) if x != "--use-distributed-optimizer"]
    flags += precision.split()
    save, shared = tmp_path / "save", ["--expert-model-parallel-size", "2"]
    load = ["--load", str(save)]
    _, whole = train_on_ranks(flags, ranks=2, save=tmp_path / "whole")
    stops = ([*flags, "--exit-interval", "4"], [*flags, *load, *shared, "--exit-interval", "8"])
    for words in (*stops, [*flags, *load]):
        code, rows = train_on_ranks(words, ranks=2, save=save)
        assert code == 0
    assert len(training_rows(rows)) == STEPS
    for row, want in zip(training_rows(rows), training_rows(whole), strict=True):
        for key in ("lm loss", "grad_norm"):
            limit = 1e-2 if precision else 1e-6
            assert math.isclose(row[key], want[key], rel_tol=limit), (row["iteration"], key)


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
    """The rows of four steps of a small model with experts, which is saved after the second."""
    size = "--num-experts 4 --num-layers 2 --train-iters 4 --save-interval 2 --global-batch-size 4"
    flags = [x for x in _flags() if x != "--use-distributed-optimizer"]
    code, rows = train_on_ranks([*flags, *f"{size} {words}".split()], ranks=ranks, save=save)
    assert code == 0
    return training_rows(rows)


def _assert_same(rows: list[dict[str, Any]], whole: list[dict[str, Any]], tolerance: float) -> None:
    wanted = {row["iteration"]: row for row in whole}
    assert [row["iteration"] for row in rows] == [3, 4]
    for row in rows:
        for key in ("lm loss", "grad_norm"):
            want = wanted[row["iteration"]][key]
            assert math.isclose(row[key], want, rel_tol=tolerance), (row["iteration"], key)


EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_experts_that_the_first_stage_lacks_resume(optimizer: str, tmp_path: Path) -> None:
    """Its optimizer of experts has no parameters, but the count of their updates is saved there:
    the same bits in the same layout, and 1e-6 in another."""
    stages = "--pipeline-model-parallel-size 2"
    words = f"--moe-layer-freq [0,1] {optimizer} {EP2}"
    save = tmp_path / "save"
    whole = _short(f"{words} {stages}", 4, save)
    load = f"--load {save} --ckpt-step 2"
    _assert_same(_short(f"{words} {stages} {load}", 4, tmp_path / "same"), whole, 0.0)
    _assert_same(_short(f"{words} {load}", 2, tmp_path / "other"), whole, 1e-6)


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
