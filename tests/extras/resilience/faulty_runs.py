"""Runs that are killed at a step and started again, and their final state as whole tensors."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.files import folder_of, published
from megatron_ext.checkpoint.unpickling import common_state_of
from megatron_ext.disk.host_folder import FOLDER_VARIABLE, GENERATION_VARIABLE
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import train_on_ranks, training_rows

Prepare = Callable[[Run], None]


@contextmanager
def host_folder_in_memory() -> Iterator[Path]:
    """Make a folder in memory, name it as the host folder, and remove it at the end."""
    folder = Path("/dev/shm") / f"megatron_ext_test_{os.getpid()}"
    folder.mkdir()
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.environ.pop(FOLDER_VARIABLE)
        os.environ.pop(GENERATION_VARIABLE, None)


def killed_in_step(step: int, rank: int = 0) -> Prepare:
    """Return what lets a rank kill itself after its gradients of a step."""

    def prepare(run: Run) -> None:
        train = run.runner.train

        def dying(*arguments: Any) -> Any:
            result = train(*arguments)
            if run.progress.iteration == step - 1 and run.context.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        run.runner.train = dying  # type: ignore[method-assign]

    return prepare


def start(
    flags: str | Sequence[str],
    save: Path,
    ranks: int,
    *,
    generation: int = 0,
    prepare: Prepare | None = None,
    **options: Any,
) -> tuple[int, list[dict[str, Any]]]:
    """Run one generation; return its exit code and the rows of all its steps so far."""
    os.environ[GENERATION_VARIABLE] = str(generation)
    code, rows = train_on_ranks(flags, ranks=ranks, save=save, prepare=prepare, **options)
    return code, training_rows(rows)


def noting(path: Path) -> Prepare:
    """Return what writes to a file where a run goes on, and from what."""

    def prepare(run: Run) -> None:
        if run.context.rank == 0:
            path.write_text(f"{run.restored_from} {run.progress.iteration}")

    return prepare


def same_end(first: Path, second: Path, scratch: Path) -> int:
    """Check that the newest checkpoints of two runs are equal; return the number of tensors."""
    found = []
    for root in (first, second):
        folder = folder_of(root, published(root)[-1])
        tensors = whole_tensors(folder, scratch / f"{root.name}.pt")
        found.append((folder.name, tensors, common_state_of(folder)))
    (name, before, common), (other, after, common_after) = found
    assert name == other and before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    _same(common, common_after, "common")
    return len(before)


def _same(first: Any, second: Any, where: str) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first.keys() - {"args"}:
            _same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            _same(a, b, f"{where}.{number}")
    elif torch.is_tensor(first):
        assert torch.equal(first, second), where
    else:
        assert first == second, where
