"""``--resume-mode`` decides where a run goes on, and refuses folders without checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.text.task import GPT
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows


def run(save: Path, words: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Run at most four steps, and return the rows of all training steps in the folder."""
    flags = [*TINY, *mock_data(), "--train-iters", "4", *words.split()]
    code, rows = train_on_ranks(flags, ranks=ranks, save=save)
    assert code == 0
    return training_rows(rows)


def test_auto_starts_anew_and_then_goes_on_by_the_same_command(tmp_path: Path) -> None:
    words = "--resume-mode auto --exit-interval 2"
    first = run(tmp_path, words, ranks=2)
    assert [row["iteration"] for row in first] == [1, 2]
    second = run(tmp_path, words, ranks=2)
    assert second[:2] == first
    assert [row["iteration"] for row in second] == [1, 2, 3, 4]


def test_auto_prefers_its_own_checkpoints_to_those_it_began_from(tmp_path: Path) -> None:
    base, save = tmp_path / "base", tmp_path / "save"
    run(base, "--exit-interval 3")
    for source in (f"--load {base} --finetune", f"--pretrained-checkpoint {base}"):
        folder = save / source.split()[0]
        words = f"--resume-mode auto {source} --exit-interval 2"
        assert [row["iteration"] for row in run(folder, words)] == [1, 2]
        assert [row["iteration"] for row in run(folder, words)] == [1, 2, 3, 4]
    assert [row["iteration"] for row in run(save, f"--resume-mode auto --load {base}")] == [4]


def test_disable_starts_anew_whatever_the_folder_holds(tmp_path: Path) -> None:
    first = run(tmp_path, "")
    again = run(tmp_path, "--resume-mode disable --exit-interval 2")
    assert [row["lm loss"] for row in again] == [row["lm loss"] for row in first[:2]]
    assert (tmp_path / TRACKER).read_text() == "2"


def test_path_goes_on_from_the_folder(tmp_path: Path) -> None:
    run(tmp_path, "--exit-interval 2")
    rows = run(tmp_path, f"--resume-mode path --load {tmp_path}")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("made", [False, True], ids=["no folder", "empty folder"])
def test_path_without_a_checkpoint_is_refused_before_any_rank_starts(
    made: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mode the same flags start anew, as in Megatron-LM."""
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
    assert main(GPT, flags) == 99
