"""Example scripts and programs as a shell starts them, and stubs that record what they start."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STUB = '#!/bin/sh\n{{ printf "%s\\0" "$@"; echo; }} >> {record}\n{more}\n'
SECONDS = 1200.0
"""Time for any script, on a machine that does much else."""
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def start(*command: object, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
    """Return exit code and output of a command, a script of bash or of Python by its ending."""
    words = [str(word) for word in command]
    shell = words[0].endswith((".sh", ".sbatch"))
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    done = subprocess.run(
        ["bash" if shell else sys.executable, *words],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment}, cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def succeed(*command: object, **options: Any) -> str:
    """Return the output of a command; fail with it where the exit code is not 0."""
    code, shown = start(*command, **options)
    assert code == 0, shown
    return shown


def smoke(script: str, out: Path, **environment: str) -> str:
    return succeed(
        EXAMPLES / script,
        cwd=out.parent,
        **{"SMOKE": "1", "OUT": str(out), "PYTHON": sys.executable, **environment},
    )


def stub(folder: Path, name: str, more: str = "") -> Path:
    """Make a program that writes its words down, one line a call, and then runs ``more``."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(STUB.format(record=folder / f"{name}.calls", more=more))
    path.chmod(0o755)
    return path


def start_stubbed(folder: Path, *command: object, **environment: str) -> tuple[int, str]:
    """Start a script that finds the stubs of a folder before other programs."""
    programs = folder / "bin"
    path = f"{programs}:{os.environ['PATH']}"
    return start(*command, PATH=path, PYTHON=str(programs / "python"), **environment)


def calls(folder: Path, name: str) -> list[list[str]]:
    path = folder / f"{name}.calls"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line.split("\0")[:-1] for line in lines]


def rows(folder: Path, *kinds: str) -> list[Mapping[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if not kinds or row["kind"] in kinds]
