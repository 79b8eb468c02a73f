"""Interrupted runs go on as if nothing had happened, also in another layout."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.errors import CheckpointError
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.train.run import Run
from tests.training_runs import TINY, Rows, mock_data, train_on_ranks, train_steps

STEPS = 12
BREAK = 7
EP2 = "--expert-model-parallel-size 2"


def _flags(*more: str) -> list[str]:
    words = f"--train-iters {STEPS} --save-interval {BREAK} --eod-mask-loss".split()
    return [*TINY, *mock_data(), *words, *more]


def _rows(save: Path, *more: str, ranks: int = 1) -> Rows:
    return train_steps(_flags(*more), save, ranks)


def _assert_close(rows: Rows, wanted: Rows, tolerance: float) -> None:
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=tolerance), (row["iteration"], key)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (1, "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1"),
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
def test_resuming_the_same_layout_is_identical(ranks: int, layout: str, tmp_path: Path) -> None:
    whole = _rows(tmp_path / "whole", *layout.split(), ranks=ranks)
    save = tmp_path / "broken"
    stop = ["--exit-interval", str(BREAK), *layout.split()]
    assert len(_rows(save, *stop, ranks=ranks)) == BREAK
    resumed = _rows(save, "--load", str(save), *layout.split(), ranks=ranks)
    assert [row["iteration"] for row in resumed] == list(range(1, STEPS + 1))
    for key in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in resumed] == [row[key] for row in whole], key


@pytest.mark.slow
def test_resuming_in_other_layouts_follows_the_uninterrupted_run(tmp_path: Path) -> None:
    """TP1, then TP2 x PP2 from step 4 on, then CP2 x DP2 from step 8 on: within 1e-6."""
    save, uninterrupted = tmp_path / "save", _rows(tmp_path / "whole")
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
        pytest.param("--no-use-distributed-optimizer", "", 1e-6, marks=pytest.mark.slow),
        pytest.param("--no-use-distributed-optimizer", "--bf16", 1e-2, marks=pytest.mark.slow),
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


def test_strict_names_and_another_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    "optimizer", ["--no-use-distributed-optimizer", "--use-distributed-optimizer"]
)
def test_experts_that_the_first_stage_lacks_resume(optimizer: str, tmp_path: Path) -> None:
    """The first stage saves the count of the experts' updates, but has no experts.

    The same layout gives the same bits, another one agrees within 1e-6.
    """
    stages = "--pipeline-model-parallel-size 2"
    size = "--num-layers 2 --train-iters 4 --save-interval 2 --global-batch-size 4"
    words = f"--num-experts 4 --moe-layer-freq [0,1] {size} {optimizer} {EP2}"

    def short(name: str, more: str, ranks: int) -> Rows:
        return _rows(tmp_path / name, *f"{words} {more}".split(), ranks=ranks)

    whole = short("save", stages, 4)
    load = f"--load {tmp_path / 'save'} --ckpt-step 2"
    _assert_close(short("same", f"{stages} {load}", 4), whole[2:], 0.0)
    _assert_close(short("other", load, 2), whole[2:], 1e-6)


def test_frozen_layers_resume_in_another_layout_and_may_be_freed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first stage trains nothing; averages of frozen weights are the weights themselves."""
    frozen = "--freeze embeddings layers.0-1 --ema-decay 0.9".split()
    save = tmp_path / "save"
    load = ("--load", str(save))
    whole = _rows(tmp_path / "whole", *frozen)
    _rows(save, *frozen, "--exit-interval", "4")
    two = "--pipeline-model-parallel-size 2 --exit-interval 8".split()
    _rows(save, *frozen, *load, *two, ranks=2)
    rows = _rows(save, *frozen, *load, "--tensor-model-parallel-size", "2", ranks=4)
    _assert_close(rows, whole, 1e-6)
    capfd.readouterr()
    more = "--ema-decay 0.9 --train-iters 14 --override-opt-param-scheduler".split()
    _rows(tmp_path / "free", *load, *more)
    said = capfd.readouterr().out
    assert "> Other weights are trained than by the run that saved" in said
    assert (
        "> The optimizer starts anew" in said and "`--freeze` (left out, before embeddings" in said
    )


@pytest.mark.slow
def test_runs_resume_in_another_layout_with_and_without_sharded_gradients(tmp_path: Path) -> None:
    """Averages of the weights and checks of the replicas are on; all agree within 1e-6."""
    size = "--num-layers 2 --train-iters 4 --save-interval 2 --global-batch-size 8"
    more = f"{size} --ema-decay 0.9 --check-invariants 1"
    sharded = "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 5000"

    def short(name: str, words: str, ranks: int) -> Rows:
        return _rows(tmp_path / name, *f"{more} {words}".split(), ranks=ranks)

    whole = short("whole", "", 2)
    _assert_close(short("save", f"{sharded} --exit-interval 2", 2), whole[:2], 1e-6)
    load = f"--load {tmp_path / 'save'} --tensor-model-parallel-size 2"
    _assert_close(short("other", load, 2), whole[2:], 1e-6)
    load = f"--load {tmp_path / 'whole'} --ckpt-step 2 --pipeline-model-parallel-size 2"
    _assert_close(short("stages", f"{sharded} {load}", 4), whole[2:], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "other"),
    [
        ("--ema-decay 0.9 --check-invariants 1 --eval-ema --eval-iters 1 "
         "--eval-interval 2 --log-params-norm", 2,
         "--tensor-model-parallel-size 2"),
        (f"--num-experts 4 {EP2} --bf16", 4, "--pipeline-model-parallel-size 2"),
        # One layer of the stacked weights is whole on each rank, the other is not.
        ("--freeze layers.0 --num-experts 4", 2, "--pipeline-model-parallel-size 2"),
    ],
)  # fmt: skip
def test_runs_resume_in_another_layout_with_and_without_sharded_weights(
    tmp_path: Path, model: str, ranks: int, other: str
) -> None:
    size = "--num-layers 2 --train-iters 4 --save-interval 2 --global-batch-size 8"
    sharded = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    tolerance = 1e-3 if "bf16" in model else 1e-6

    def short(name: str, words: str) -> Rows:
        return _rows(tmp_path / name, *f"{size} {model} {words}".split(), ranks=ranks)

    whole = short("whole", "--use-distributed-optimizer")
    saved = short("save", f"{sharded} --exit-interval 2")
    _assert_close(saved, whole[:2], tolerance)
    load = f"--load {tmp_path / 'save'}"
    _assert_close(short("same", f"{sharded} {load}"), whole[2:], tolerance)
    _assert_close(short("other", f"{load} {other}"), whole[2:], tolerance)
    load = f"--load {tmp_path / 'whole'} --ckpt-step 2"
    _assert_close(short("back", f"{sharded} {load} {other}"), whole[2:], tolerance)


def test_another_schedule_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    _rows(save, "--exit-interval", str(BREAK))
    flags = _flags("--load", str(save), "--lr-decay-iters", "30")
    with pytest.raises(CheckpointError) as caught:  # before a rank starts
        train_on_ranks(flags, save=save)
    assert "because of `--lr-decay-iters` (30, before 12); give the flags" in str(caught.value)
    assert "`--override-opt-param-scheduler` to go on from its rate" in str(caught.value)
    rows = train_steps([*flags, "--override-opt-param-scheduler"], save)
    assert rows[-1]["iteration"] == STEPS


def run(save: Path, words: str, ranks: int = 1, **options: Any) -> Rows:
    """Run at most four steps, and return the rows of all training steps in the folder."""
    flags = [*TINY, *mock_data(), "--train-iters", "4", *words.split()]
    return train_steps(flags, save, ranks, **options)


def test_auto_starts_anew_and_then_goes_on_by_the_same_command(tmp_path: Path) -> None:
    words = "--resume-mode auto --exit-interval 2"

    def note_start(run: Run) -> None:
        start = run.progress.iteration, run.saved_at, run.restored_from
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{start}\n")

    first = run(tmp_path, words, ranks=2, prepare=note_start)
    assert [row["iteration"] for row in first] == [1, 2]
    second = run(tmp_path, words, ranks=2, prepare=note_start)
    # What has just been loaded need not be saved again.
    starts = [(0, 0, "start")] * 2 + [(2, 2, "checkpoint")] * 2
    assert (tmp_path / "starts").read_text().splitlines() == list(map(str, starts))
    assert second[:2] == first
    assert [row["iteration"] for row in second] == [1, 2, 3, 4]


@pytest.mark.slow
def test_auto_prefers_its_own_checkpoints_to_those_it_began_from(tmp_path: Path) -> None:
    base, save = tmp_path / "base", tmp_path / "save"
    run(base, "--exit-interval 3")
    for source in (f"--load {base} --finetune", f"--pretrained-checkpoint {base}"):
        folder = save / source.split()[0]
        words = f"--resume-mode auto {source} --exit-interval 2"
        assert [row["iteration"] for row in run(folder, words)] == [1, 2]
        assert [row["iteration"] for row in run(folder, words)] == [1, 2, 3, 4]
    assert [row["iteration"] for row in run(save, f"--resume-mode auto --load {base}")] == [4]


@pytest.mark.slow
def test_disable_starts_anew_whatever_the_folder_holds_and_path_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, "")
    again = run(tmp_path, "--resume-mode disable --exit-interval 2")
    assert [row["lm loss"] for row in again] == [row["lm loss"] for row in first[:2]]
    assert (tmp_path / TRACKER).read_text() == "2"
    rows = run(tmp_path, f"--resume-mode path --load {tmp_path}")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("made", [False, True], ids=["no folder", "empty folder"])
def test_path_without_a_checkpoint_is_refused_before_any_rank_starts(
    made: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = tmp_path / "load"
    if made:
        load.mkdir()
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: 99)
    flags = [*TINY, *mock_data(), "--train-iters", "1", "--load", str(load)]
    assert main(GPT, [*flags, "--resume-mode", "path"]) == EXIT_CODE_USER_ERROR
    assert capfd.readouterr().err == (
        f"error: `--load` ({load}) holds no checkpoint, but `--resume-mode path` is given; give a "
        "folder that does.\n"
    )
    # A folder that the run saves to may have none yet.
    assert main(GPT, [*flags, "--save", str(load)]) == 99
