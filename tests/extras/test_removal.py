"""Each add-on can be removed: runs train without its folder, and its flags are named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import extras
from tests.training_runs import ROOT

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 "
    "--tensor-model-parallel-size 2 --nproc-per-node 2"
)
ASKED = {
    "resilience": ("pretrain_gpt.py", f"{TINY} --max-restarts 1", "--max-restarts"),
    "audit": ("pretrain_gpt.py", f"{TINY} --audit", "tools/audit.py"),
    "report": ("tools/report.py", "out", "tools/report.py"),
    "ledger": ("tools/ledger.py", "out", "tools/ledger.py"),
    "chaos": ("tools/chaos.py", "--kills 1 -- --lr 1", "tools/chaos.py"),
    "quality": ("tools/inspect_dataset.py", "data --quality", "--quality"),
}
"""By add-on, a program and flags that need it, and how its sentence names them."""


def _copy(tmp_path: Path, removed: list[str]) -> Path:
    """Return a copy of the programs and the package in which some add-ons are removed."""
    for name in ("megatron_ext", "tools", "pretrain_gpt.py", "pretrain_video.py"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    for name in removed:
        shutil.rmtree(tmp_path / "megatron_ext/extras" / name)
    return tmp_path


def _run(root: Path, program: str, words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *words.split()],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_the_list_of_this_test_is_complete() -> None:
    folders = (ROOT / "megatron_ext/extras").iterdir()
    assert {x.name for x in folders if x.is_dir() and x.name != "__pycache__"} == set(ASKED)


def test_a_folder_of_caches_is_no_add_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "__init__.py"))
    for name in ("empty", "whole"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
    (tmp_path / "whole" / "tool.py").write_text("")
    assert [extras.is_there(name) for name in ("none", "empty", "whole")] == [False, False, True]


@pytest.mark.parametrize(
    "removed",
    [list(ASKED), *(pytest.param([name], marks=pytest.mark.slow) for name in ASKED)],
    ids=lambda removed: "all" if len(removed) > 1 else removed[0],
)
def test_without_add_ons_runs_train_and_their_flags_are_named(
    removed: list[str], tmp_path: Path
) -> None:
    root = _copy(tmp_path, removed)
    trained = _run(root, "pretrain_gpt.py", f"{TINY} --save {root}/out --save-interval 1")
    assert trained.returncode == 0, trained.stderr
    assert (root / "out/report.html").exists() == ("report" not in removed)
    for name in removed:
        program, words, asked = ASKED[name]
        refused = _run(root, program, words)
        assert refused.returncode == 2
        expected = f"`{asked}` needs the add-on {name}, but the folder megatron_ext/extras/{name} "
        assert expected in refused.stderr
        assert "Traceback" not in refused.stderr


PLAIN = f"""
import json, runpy, sys
sys.argv = ["pretrain_gpt.py", *{TINY.split()[:-4]!r}]
try:
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
except SystemExit as end:
    assert not end.code
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
own = {str(ROOT / "megatron_ext") + "/"!r}
print("MODULES", json.dumps([file for file in files if file.startswith(own)]))
"""


def test_a_plain_run_imports_no_add_on_and_little_else() -> None:
    """One rank without an optional flag reads what a newcomer reads: the plain path."""
    words = [sys.executable, "-c", PLAIN]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
    listed = next(x for x in ended.stdout.splitlines() if x.startswith("MODULES "))
    package = ROOT / "megatron_ext"
    modules = {str(Path(x).relative_to(package)) for x in json.loads(listed.partition(" ")[2])}
    assert {x for x in modules if x.startswith("extras/")} == {"extras/__init__.py"}
    for part in ("checkpoint/manager", "layers/fp8/linear", "optim/muon", "text/data/splits"):
        assert f"{part}.py" not in modules
    assert len(modules) <= 140
