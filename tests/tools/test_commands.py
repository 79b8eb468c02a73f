"""Each program is a file to start and a command that pip installs, also far from the repository."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.examples.scripts import SECONDS
from tests.training_runs import ROOT, parsed

PROGRAMS = sorted(path.stem for path in (ROOT / "megatron_ext/programs").glob("[a-z]*.py"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SOURCES = "pyproject.toml README.md LICENSE pretrain_gpt.py pretrain_video.py recipes megatron_ext"
COMMAND = """
import sys
from megatron_ext.programs import run_command
sys.argv = sys.argv[1:]
run_command()
"""
TEXTS = '{"text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"}\n' * 40
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 63"
RUN = (
    f"--config recipes/tiny_gpt.yaml --layout 2xCPU {NUMBERS} --train-iters 2 --eval-iters 0 "
    "--lr-warmup-iters 0 --data-path texts_text_document --save run --seq-length 32 "
    "--max-position-embeddings 32"
)


def test_each_program_has_a_file_and_a_command() -> None:
    commands = re.findall(r'^megatron-ext-(.*) = "(.*)"$', PYPROJECT, re.MULTILINE)
    assert {target for _, target in commands} == {"megatron_ext.programs:run_command"}
    assert sorted(name.replace("-", "_") for name, _ in commands) == PROGRAMS
    files = [*ROOT.glob("pretrain_*.py"), *(ROOT / "tools").glob("*.py")]
    started = {path: re.search(r'\brun\("(\w+)"\)', path.read_text("utf-8")) for path in files}
    names = [path.stem if found is None else found[1] for path, found in started.items()]
    assert sorted(names) == PROGRAMS


def test_what_is_no_python_is_packaged_too() -> None:
    found = re.search(r"^megatron_ext = (\[.*\])$", PYPROJECT, re.MULTILINE)
    assert found is not None
    package = ROOT / "megatron_ext"
    packaged = {path for glob in ast.literal_eval(found[1]) for path in package.glob(glob)}
    files = {path for path in package.rglob("*") if path.is_file()}
    files |= set((package / "recipes").iterdir())
    assert {path for path in files - packaged if path.suffix not in (".py", ".pyc")} == set()


def run(command: str, words: str, *, cwd: Path = ROOT, site: Path = ROOT) -> str:
    """Return what a command prints; run it with the package in ``site``."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, f"/anywhere/megatron-ext-{command}", *words.split()],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_help_of_a_command_names_commands() -> None:
    said = run("plan", "--help")
    assert said.startswith("usage: megatron-ext-plan ")
    assert "    megatron-ext-plan --world-size 64" in said
    assert "-- <flags of megatron-ext-pretrain-gpt>" in said
    assert ".py" not in said.partition("\noptions:")[0]


def test_a_recipe_is_found_without_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--config recipes/tiny_gpt.yaml --layout 1xCPU --mock-data"
    assert not any("is read" in note for note in parsed(words).notes)
    monkeypatch.chdir(tmp_path)
    found = parsed(words)
    assert found.config.model.num_layers == parsed(words).config.model.num_layers
    own = ROOT / "megatron_ext/recipes/tiny_gpt.yaml"
    assert f"`recipes/tiny_gpt.yaml` is not in this folder, so {own} is read." in found.notes


@pytest.mark.slow
def test_a_wheel_alone_preprocesses_trains_and_reports(tmp_path: Path) -> None:
    source, site, away = (tmp_path / name for name in ("source", "site", "away"))
    for folder in (source, away):
        folder.mkdir()
    for name in SOURCES.split():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(pip, cwd=source, check=True, timeout=SECONDS)
    (wheel,) = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (away / "texts.jsonl").write_text(TEXTS)
    run("preprocess", f"--input texts.jsonl --output-prefix texts {NUMBERS}", cwd=away, site=site)
    said = run("pretrain-gpt", RUN, cwd=away, site=site)
    assert f"{site}/megatron_ext/recipes/tiny_gpt.yaml is read" in said
    assert (away / "run/report.html").stat().st_size > 50_000
    said = run("audit", "--list", cwd=away, site=site)
    assert "D1" in said
