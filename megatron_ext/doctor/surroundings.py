"""What the examination looks at, in one place, so that a test can put a made-up machine there.

Nothing that could end or stall this process happens in it: programs and imports run apart, each
with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.doctor.host import Host, this_host

IMPORT_SECONDS = 120.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: its exit code, negative for a signal; None where it ran out of time.
        output: what it wrote.
        errors: what it wrote to standard error.
    """

    code: int | None
    output: str = ""
    errors: str = ""

    @property
    def reason(self) -> str:
        """Why it failed, in a few words."""
        if self.code is None:
            return "it ran out of time"
        if self.code < 0:
            return f"it was ended by signal {-self.code}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it left with exit code {self.code}"


class Surroundings(Protocol):
    """A machine and the Python environment on it."""

    environ: Mapping[str, str]

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, None where there is none."""

    def requirements(self, distribution: str) -> list[str] | None:
        """What a distribution requires, None where it is not installed."""

    def folder(self, module: str) -> Path | None:
        """Where a top-level package lies, found without importing it."""

    def has_module(self, module: str) -> bool:
        """Whether a top-level module exists, found without importing it."""

    def program(self, *names: str) -> str | None:
        """Path of the first program that exists."""

    def file(self, path: Path) -> bool:
        """Whether a file exists."""

    def host(self) -> Host:
        """What a process may take."""

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
        """Run a program to its end."""


class ThisMachine:
    """The machine that this process runs on."""

    environ: Mapping[str, str] = os.environ

    def version(self, distribution: str) -> str | None:
        """See `Surroundings.version`."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requirements(self, distribution: str) -> list[str] | None:
        """See `Surroundings.requirements`."""
        try:
            return importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            return None

    def folder(self, module: str) -> Path | None:
        """See `Surroundings.folder`."""
        spec = _spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None

    def has_module(self, module: str) -> bool:
        """See `Surroundings.has_module`."""
        return _spec(module) is not None

    def program(self, *names: str) -> str | None:
        """See `Surroundings.program`."""
        return next((path for name in names if (path := shutil.which(name))), None)

    def file(self, path: Path) -> bool:
        """See `Surroundings.file`."""
        return path.is_file()

    def host(self) -> Host:
        """See `Surroundings.host`."""
        return this_host()

    def run(self, command: Sequence[str], seconds: float = PROGRAM_SECONDS) -> Outcome:
        """See `Surroundings.run`."""
        try:
            done = subprocess.run(
                list(command), capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(None)
        except OSError as error:
            return Outcome(127, errors=str(error))
        return Outcome(done.returncode, done.stdout, done.stderr)


def _spec(module: str) -> Any:
    """Where a top-level module is; a name that shadows it oddly counts as absent."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def run_python(here: Surroundings, code: str, seconds: float = IMPORT_SECONDS) -> Outcome:
    """Run a few lines in a Python of their own."""
    return here.run([sys.executable, "-W", "ignore", "-c", code], seconds)


def ask_python(
    here: Surroundings, code: str, seconds: float = IMPORT_SECONDS
) -> dict[str, Any] | Outcome:
    """What a few lines print as JSON on their last line, or how they failed."""
    outcome = run_python(here, code, seconds)
    if outcome.code != 0:
        return outcome
    lines = outcome.output.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(1, outcome.output, "it printed nothing that could be read")
    return found
