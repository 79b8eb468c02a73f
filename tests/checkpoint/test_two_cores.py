"""Runs go on from checkpoints of the other core: the same bits, or 1e-6 in another layout."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.parallel.context import ParallelContext
from tests.checkpoint import cores
from tests.checkpoint.cores import Job, check_same_weights, do, save_as_we, there
from tests.checkpoint.test_optimizer_state import TINY
from tests.checkpoint.tiny import build, load, manager, whole_tensors
from tests.ranks import run_on_ranks
from tests.training_runs import Rows
from tests.video.clips import SHORT, write_clips

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SHARED = "--use-distributed-optimizer"
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"
VIDEO = "--train-iters 4 --save-interval 2 --ema-decay 0.8 --global-batch-size 4"
slow = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A run on two ranks, and the layouts that save it and that go on with it."""

    words: str
    saving: str
    going_on: str
    is_video: bool = False

    def job(self, save: Path, more: str, data: Path) -> Job:
        own = {"clips": str(data)} if self.is_video else {}
        words = f"{'' if self.is_video else ' '.join(TINY)} {self.words} {more}"
        return {"words": words, "ranks": 2, "save": str(save), **own}


CASES = {
    "dense": Case(SHARED, TP2, PP2),
    "experts": Case(f"{EXPERTS} {SHARED}", "--expert-model-parallel-size 2", PP2),
    "MTP": Case(f"--mtp-num-layers 1 --position-embedding-type rope {SHARED}", PP2, TP2),
    "plain optimizer": Case("--no-use-distributed-optimizer --ema-decay 0.8", TP2, PP2),
    "bf16": Case(f"--bf16 {SHARED} --ema-decay 0.8", "", PP2),
    # Only the same layout goes on with the random states.
    "dropout": Case(f"--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 {SHARED}", TP2, TP2),
    "video": Case(f"{VIDEO} {SHARED}", "", TP2, is_video=True),
}
FAST = ("dense", "experts")


def _figures(rows: Rows) -> list[dict[str, float]]:
    keys = ("iteration", "loss", "lm loss", "mtp_1 loss", "grad_norm", "learning_rate")
    return [{key: row[key] for key in keys if key in row} for row in rows if row["iteration"] > 2]


def _check_close(rows: Rows, wanted: Rows) -> None:
    assert len(_figures(rows)) == len(_figures(wanted)) == 2
    for row, want in zip(_figures(rows), _figures(wanted), strict=True):
        assert row.keys() == want.keys() >= {"grad_norm"}
        for key in want:
            assert math.isclose(row[key], want[key], rel_tol=1e-6), (row, want)


def _tensors(save: Path) -> dict[str, torch.Tensor]:
    return whole_tensors(folder_of(save, 4), save / "whole.pt")


def _check_same_tensors(found: Path, wanted: Path) -> None:
    mine, theirs = _tensors(found), _tensors(wanted)
    assert mine.keys() == theirs.keys() and any("exp_avg" in name for name in theirs)
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [slow]) for name in CASES]
)
def test_a_run_goes_on_on_the_other_core(name: str, tmp_path: Path) -> None:
    """Check both directions: losses, norms and all tensors of weights, moments and averages.

    In another layout than the saving one, the two cores must agree to the bit as well.
    """
    case, data = CASES[name], tmp_path / "clips"
    if case.is_video:
        write_clips(data, {SHORT: 16})

    def job(save: str, more: str) -> Job:
        return case.job(tmp_path / save, more, data)

    def resumed(core: str, source: str) -> list[Job]:
        layouts = {"same": case.saving, "other": case.going_on}
        goes_on = f"--load {tmp_path / source} --ckpt-step 2"
        return [job(f"{core}-{key}-{source}", f"{x} {goes_on}") for key, x in layouts.items()]

    here = do(job("here", case.saving))
    away, *of_away, of_here_same, of_here_other = there(
        [job("away", case.saving), *resumed("away", "away"), *resumed("away", "here")]
    )
    of_away_same, of_away_other = map(do, resumed("here", "away"))
    own_other = do(resumed("here", "here")[1])
    for rows, source in ((of_here_same, here), (of_away_same, away)):
        assert _figures(rows) == _figures(source)
    _check_same_tensors(tmp_path / "away-same-here", tmp_path / "here")
    _check_same_tensors(tmp_path / "here-same-away", tmp_path / "away")
    for rows, source in ((of_here_other, here), (of_away_other, away)):
        _check_close(rows, source)
    assert _figures(of_here_other) == _figures(own_other)
    assert _figures(of_away_other) == _figures(of_away[1])
    _check_same_tensors(tmp_path / "away-other-here", tmp_path / "here-other-here")


def _load_stock(context: ParallelContext, root: Path, strict: dict[str, Any]) -> None:
    """Load what stock megatron-core saved after one step into a model with other weights."""
    wanted, found = build(context), build(context)
    wanted.step()
    found.spoil()
    loaded = load(manager(context, root, **strict), found)
    assert loaded.iteration == 1 and loaded.progress["consumed_train_samples"] == 8
    assert loaded.notes == []
    for each in (found, wanted):
        each.step()
    check_same_weights(found, wanted)


def test_both_read_what_stock_megatron_core_saved_and_stock_reads_ours(tmp_path: Path) -> None:
    """Check it between the cores: weights, and what the optimizer makes of them in a step."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    run_on_ranks(save_as_we, cores.TP2, {"root": ours})
    there([{"stock": "save", "save": str(stock)}, {"stock": "load", "save": str(ours)}])
    for strictness in ("assume_ok_unexpected", "raise_all"):
        strict = {"dist_ckpt_strictness": strictness}
        run_on_ranks(_load_stock, cores.TP2, {"root": stock, "strict": strict})
