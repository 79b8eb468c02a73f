"""The environments that the scripts make: one for each megatron-core, from a stand-in for pip."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import ROOT, start

PIP = '''
"""Installs empty packages in no time, and writes down which."""
import os, pathlib, sys

words = sys.argv[1:]
with open(pathlib.Path(__file__).parents[1] / "pip.calls", "a") as calls:
    print(*words, file=calls)
if "--target" in words:
    place = words.index("--target") + 1
    for name, version in (word.split("==") for word in words[place + 1 :]):
        folder = pathlib.Path(words[place], name.replace("-core", "/core"))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"version = {version!r}")
        about = pathlib.Path(words[place], f"{name.replace('-', '_')}-{version}.dist-info")
        about.mkdir()
        told = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}"
        (about / "METADATA").write_text(told)
        if os.environ.get("INTERRUPTED"):
            sys.exit("pip: interrupted")
'''
SHOW = """
import importlib.metadata, importlib.util, megatron.core, of_venv, of_pth
has_triton = importlib.util.find_spec("triton") is not None
print(megatron.core.version, importlib.metadata.version("megatron-core"), has_triton)
"""
CONSTRAINTS = """\
megatron-core==0.16.1; python_version < "3.12"
megatron-core==0.19.2; python_version >= "3.12"
torch==2.13.0
triton==3.7.1
"""
SCRIPT = 'set -euo pipefail\nsource examples/lib/venv.sh\n"$PYTHON" -c "$SHOW"\necho "$PYTHON"\n'
FOLDER = ".venv-core-0.19"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository whose .venv is finished and holds megatron-core 0.16.1 and a module."""
    (tmp_path / "examples/lib").mkdir(parents=True)
    shutil.copy(ROOT / "examples/lib/venv.sh", tmp_path / "examples/lib")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS)
    (tmp_path / "show.sh").write_text(SCRIPT)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    install_pip(packages(tmp_path))
    words = ["-m", "pip", "install", "--target", packages(tmp_path), "megatron-core==0.16.1"]
    subprocess.run([tmp_path / ".venv/bin/python", *words], check=True)
    (packages(tmp_path) / "of_venv.py").touch()
    (packages(tmp_path) / "elsewhere.pth").write_text(f"{tmp_path}\n")
    (tmp_path / "of_pth.py").touch()
    stamp(tmp_path)
    return tmp_path


def stamp(repository: Path) -> None:
    """Say that .venv has what the constraints ask for."""
    asked = (repository / "constraints.txt").read_bytes()
    (repository / ".venv/.megatron_ext").write_text(hashlib.sha256(asked).hexdigest() + "\n")


def packages(repository: Path, folder: str = ".venv") -> Path:
    return (
        repository
        / folder
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    )


def install_pip(site: Path) -> None:
    (site / "pip").mkdir()
    (site / "pip/__init__.py").touch()
    (site / "pip/__main__.py").write_text(PIP)


def show(repository: Path, **environment: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a script that shows the environment that it got."""
    asked = {"PYTHON": "", "CORE": "", "SHOW": SHOW, "PYTHONPATH": "", **environment}
    code, shown = start(repository / "show.sh", cwd=repository, **asked)
    return code, shown.replace(f"{repository}/", "").splitlines()


def calls(repository: Path) -> list[str]:
    return (packages(repository) / "pip.calls").read_text().splitlines()[1:]


@pytest.mark.parametrize("asked", ["", "0.16", "0.16.1"])
def test_the_core_of_venv_needs_no_second_environment(repository: Path, asked: str) -> None:
    assert show(repository, CORE=asked) == (0, ["0.16.1 0.16.1 False", ".venv/bin/python"])
    assert not calls(repository) and not list(repository.glob(".venv-*"))


@pytest.mark.parametrize("asked", ["0.19", "0.19.2", "other"])
def test_another_core_stands_in_an_environment_on_top_of_venv_that_is_made_once(
    repository: Path, asked: str
) -> None:
    code, lines = show(repository, CORE=asked)
    assert code == 0, lines
    assert lines[0] == (
        "> making .venv-core-0.19 with megatron-core==0.19.2 triton==3.7.1 on top of .venv (once)"
    )
    assert lines[1].startswith("> .venv-core-0.19 is ready after ")
    assert lines[2:] == ["0.19.2 0.19.2 True", ".venv-core-0.19/bin/python"]
    assert show(repository, CORE=asked) == (0, lines[2:])
    assert len(calls(repository)) == 1
    assert show(repository) == (0, ["0.16.1 0.16.1 False", ".venv/bin/python"])


def test_an_interrupted_pip_is_told_and_the_next_call_starts_afresh(repository: Path) -> None:
    code, lines = show(repository, CORE="0.19", INTERRUPTED="1")
    assert (code, lines[-1]) == (
        1,
        "error: megatron-core==0.19.2 triton==3.7.1 could not be installed; "
        "see pip's message above.",
    )
    assert (packages(repository, FOLDER) / "megatron").exists()
    code, lines = show(repository, CORE="0.19")
    assert (code, lines[2:]) == (0, ["0.19.2 0.19.2 True", ".venv-core-0.19/bin/python"])


def test_another_version_in_constraints_makes_the_environment_anew(repository: Path) -> None:
    assert show(repository, CORE="0.19")[0] == 0
    constraints = repository / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("core==0.19.2", "core==0.19.7"))
    stamp(repository)
    code, lines = show(repository, CORE="0.19")
    assert (code, lines[2:]) == (0, ["0.19.7 0.19.7 True", ".venv-core-0.19/bin/python"])


def test_a_venv_that_has_triton_lends_it(repository: Path) -> None:
    (packages(repository) / "triton").mkdir()
    (packages(repository) / "triton/__init__.py").touch()
    code, lines = show(repository, CORE="0.19")
    assert (code, lines[2]) == (0, "0.19.2 0.19.2 True")
    assert calls(repository)[0].split()[-1] == "megatron-core==0.19.2"


def test_a_core_that_constraints_do_not_name_is_refused_before_anything_is_made(
    repository: Path,
) -> None:
    shutil.rmtree(repository / ".venv")
    message = (
        "error: CORE (0.18) must be 0.16, 0.19 or other; "
        "constraints.txt names the versions of megatron-core."
    )
    assert show(repository, CORE="0.18") == (1, [message])
    assert not list(repository.glob(".venv*"))


def test_an_interpreter_with_another_core_than_the_one_asked_for_is_refused(
    repository: Path,
) -> None:
    python = str(repository / ".venv/bin/python")
    assert show(repository, PYTHON=python, CORE="0.16")[0] == 0
    assert show(repository, PYTHON=python, CORE="0.19") == (
        1,
        [
            "error: CORE (0.19) is not the megatron-core of PYTHON (.venv/bin/python), "
            "which has 0.16.1; leave one of them out."
        ],
    )
