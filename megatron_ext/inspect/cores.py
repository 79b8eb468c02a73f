"""Trains with several releases of megatron-core, each in its own Python environment.

For each environment, `record_on` starts a process with that environment's Python. The started
process trains in each layout (`serve`), and prints the index of each layout whose recording is
complete; `record_on` then reads the recording.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import megatron.core

from megatron_ext.device import Device
from megatron_ext.disk.reading import read_json_object
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError, end_with_parent
from megatron_ext.inspect.layouts import NamedLayout
from megatron_ext.inspect.parity import Recording, record
from megatron_ext.train.task import Task, TaskChoice

_ASK = "import importlib.metadata; print(importlib.metadata.version('megatron-core'))"
_FILE = "recording.json"
_STORED = ("rows", "padded_vocab_size", "failure")


@dataclass(frozen=True)
class Environment:
    """A Python interpreter, the ``PYTHONPATH`` that it needs, and its release of megatron-core."""

    core: str
    python: Path
    search_path: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process of this Python."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return own | ({"PYTHONPATH": self.search_path} if self.search_path else {})


def find_environments(root: Path) -> Iterator[Environment]:
    """Yield the running interpreter, then each ``.venv*`` in ``root`` that has megatron-core.

    The release is read from the metadata of an interpreter's packages, which needs no torch.
    """
    running = Path(sys.executable)
    yield Environment(version("megatron-core"), running, os.environ.get("PYTHONPATH"))
    for python in sorted(root.glob(".venv*/bin/python")):
        environment = Environment("", python)
        answer = subprocess.run(
            [python, "-c", _ASK],
            env=environment.variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0:
            yield dataclasses.replace(environment, core=answer.stdout.strip())


def choose_environments(names: str, root: Path) -> list[Environment]:
    """Return an environment for each of the comma-separated releases, such as ``0.16.1,0.19``.

    A release without its last number, such as ``0.19``, matches the first one that begins with it.
    ``root`` is the folder with the environments, and with ``constraints.txt``, whose pinned
    releases an error message suggests.

    Raises:
        ConfigError: no environment has a named release, two names mean the same release, or there
            are no names.
    """
    environments = list(find_environments(root))
    chosen = list[Environment]()
    for name in filter(None, names.split(",")):
        fits = (e for e in environments if e.core == name or e.core.startswith(f"{name}."))
        environment = next(fits, None)
        if environment is None:
            raise ConfigError(_missing(name, environments, root))
        if environment in chosen:
            raise ConfigError(
                f"`--cores` ({names}) names megatron-core {environment.core} twice; name it once."
            )
        chosen.append(environment)
    if not chosen:
        raise ConfigError(
            f"`--cores` ({names}) names no megatron-core; give such as 0.16.1,0.19.2."
        )
    return chosen


def _missing(name: str, environments: Sequence[Environment], root: Path) -> str:
    """Return a sentence that says how to make an environment with the release ``name``."""
    here = ", ".join(dict.fromkeys(f"{e.core} in {e.python}" for e in environments))
    constraints = root / "constraints.txt"
    text = constraints.read_text(encoding="utf-8") if constraints.is_file() else ""
    pins = list(dict.fromkeys(re.findall(r"^megatron-core==([\w.]+)", text, re.MULTILINE)))
    if not pins:
        remedy = "name one of these; a clone of the repository can make others"
    elif any(pin == name or pin.startswith(f"{name}.") for pin in pins):
        remedy = f"make one by `CORE={name} bash tests/run.sh`"
    else:
        remedy = f"name one of these, or of {' and '.join(pins)}, which `tests/run.sh` can make"
    return (
        f"`--cores` has `{name}`, but no environment has that megatron-core (found: {here}); "
        f"{remedy}."
    )


def record_on(
    environment: Environment,
    start: str,
    words: Sequence[str],
    layouts: Sequence[NamedLayout],
    steps: int,
    folder: Path,
) -> Iterator[Recording]:
    """Train with the flags ``words`` in each layout, and yield each complete recording.

    A process of ``environment`` runs ``start``, Python code that reads the arguments and calls
    `serve`. If the process ends early, the remaining layouts yield recordings with a ``failure``.
    Closing the iterator ends the process.
    """
    command = [str(environment.python), "-c", start, "--record-into", str(folder)]
    command += ["--steps", str(steps)]
    command += ["--layouts", ",".join(layout.name for layout in layouts), "--", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment.variables()
    )
    assert process.stdout is not None
    left = list(layouts)
    with process.stdout:
        try:
            for line in process.stdout:
                own = folder / line.strip()
                stored = read_json_object(own / _FILE, not_finite=True)
                yield Recording(left.pop(0), own, **stored)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
    failure = f"the process with megatron-core {environment.core} ended with exit code {code}"
    for layout in left:
        yield Recording(layout, folder, [], failure=failure, core=environment.core)


def serve(
    program: Task | TaskChoice,
    words: Sequence[str],
    layouts: Sequence[NamedLayout],
    steps: int,
    folder: Path,
    device: Device,
) -> None:
    """Record training in each layout, in a subfolder of ``folder``.

    This runs in the process that `record_on` starts. Standard output carries only the indices of
    the layouts that are complete; whatever the runs print goes to stderr.
    """
    end_with_parent(os.getppid())
    with os.fdopen(os.dup(1), "w") as complete:
        os.dup2(2, 1)
        for index, layout in enumerate(layouts):
            recording = record(program, words, layout, steps, folder / str(index), device)
            stored = {name: getattr(recording, name) for name in _STORED}
            # The release that the runs have imported, which the metadata may not show.
            stored["core"] = megatron.core.__version__.partition("+")[0]
            write_text(recording.folder / _FILE, json.dumps(stored))
            print(index, file=complete, flush=True)
