"""A run in the save folder of a stranger follows no link there and waits for no pipe."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.training_runs import NULL, SMALL

FILES = (
    "faults.jsonl", "metrics.jsonl", "metrics.jsonl.tmp", ".run.json", ".run.tmp", "config.yaml",
    "config.yaml.tmp", "data_ledger.jsonl", "loss.png", ".loss.png.tmp",
    "report.html", ".report.html.tmp", ".latest_checkpointed_iteration.txt.tmp",
    "best_checkpointed_iteration.txt", ".best_checkpointed_iteration.txt.tmp",
)  # fmt: skip
"""Names of files that a run writes or appends to in its save folder."""
FOLDERS = ("iter_0000001.tmp", "iter_0000002.tmp", "iter_0000002.replaced", "postmortem_1")


def _flags(save: Path, folder: Path) -> list[str]:
    data = f"{' '.join(NULL)} --data-path {folder / 'docs'} --data-order direct"
    own = [word for word in SMALL if word != "--mock-data"]
    more = f"--save-interval 1 --log-progress --save {save} --keep-best 1 --max-restarts 1"
    return [*own, *data.split(), *more.split()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "docs", np.dtype(np.int32)) as writer:
        for _ in range(40):
            writer.add_document(np.arange(40), [40])
    return tmp_path


def test_links_in_a_save_folder_lead_nowhere(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The save folder itself may be a link, as a user gives it."""
    secret, inside, real, save = (data / x for x in ("secret", "inside", "real", "save"))
    secret.write_text("secret")
    inside.mkdir()
    (inside / "kept").write_text("kept")
    real.mkdir()
    save.symlink_to(real)
    for name in FILES:
        (real / name).symlink_to(secret)
    for name in FOLDERS:
        (real / name).symlink_to(inside)
    (real / "latest_checkpointed_iteration.txt").symlink_to(data / "absent")
    assert main(GPT, [*_flags(save, data), "--resume-mode", "disable"]) == 0
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    assert secret.read_text() == "secret" and not (data / "absent").exists()
    assert [path.name for path in inside.iterdir()] == ["kept"]
    assert (real / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert {path.name for path in real.glob("iter_*")} == {"iter_0000001", "iter_0000002"}
    for name in ("metrics.jsonl", "config.yaml", "report.html"):
        assert not (real / name).is_symlink()
    assert "data_ledger.jsonl is a symbolic link, which is not written to; remove it" in said.out


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "progress.txt"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_a_run_needs_is_replaced_or_refused_in_a_sentence(
    name: str, kind: str, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = data / "save"
    save.mkdir()
    if kind == "pipe":
        os.mkfifo(save / name)
    else:
        (save / name).symlink_to(data / "absent")
    code = main(GPT, _flags(save, data))
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err and not (data / "absent").exists()
    kinds = {"link": "a symbolic link", "pipe": "a pipe, a device or a socket"}
    if name == "progress.txt":
        assert code == EXIT_CODE_USER_ERROR
        assert f"progress.txt is {kinds[kind]}, which is not written to; remove it" in said.err
    elif (name, kind) == ("metrics.jsonl", "pipe"):
        assert code == EXIT_CODE_USER_ERROR
        assert f"metrics.jsonl cannot be used (it is {kinds[kind]}, not a regular" in said.err
    else:
        assert code == 0 and (save / name).is_file() and not (save / name).is_symlink()
