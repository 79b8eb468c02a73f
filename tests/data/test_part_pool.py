"""Parts that are worked on in processes of either kind, and workers that fail or die."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from megatron_ext.data.part_pool import Advance, PartPool, Work
from megatron_ext.data.progress import Progress
from megatron_ext.errors import DataError, MachineFault


def start(folder: Path, worker: int) -> Work:
    return partial(work, folder, worker)


def work(folder: Path, worker: int, part: str, advance: Advance) -> None:
    """Write a file, after what the name of the part says."""
    tries = folder / f"{part}.tries"
    with tries.open("a") as out:
        out.write(f"{worker}\n")
    if part.startswith("bad"):
        raise DataError("This part is bad.")
    if part.startswith("deadly") and len(tries.read_text().split()) < 3 + part.count("!"):
        os._exit(9)
    advance(2, 1)
    (folder / part).write_text("done")


def run(folder: Path, parts: list[str], method: str = "fork") -> tuple[list[str], list[int]]:
    def unfinished(numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not (folder / parts[number]).exists()]

    pool = PartPool(
        workers=2,
        start=partial(start, folder),
        name_of=lambda number: f"part {parts[number]}",
        part_of=lambda number: parts[number],
        place=str(folder),
        unfinished=unfinished,
        method=method,  # type: ignore[arg-type]
    )
    said: list[str] = []
    done: list[int] = []
    progress = Progress(2 * len(parts), 0, "clips")
    try:
        pool.run(range(len(parts)), progress, said.append, done.append)
    finally:
        progress.close()
    return said, done


def test_spawned_processes_get_parts_and_number_themselves(tmp_path: Path) -> None:
    said, done = run(tmp_path, ["a", "b", "c"], "spawn")
    assert not said and sorted(done) == [0, 1, 2]
    assert {path.read_text() for path in tmp_path.glob("?")} == {"done"}
    workers = {path.read_text() for path in tmp_path.glob("?.tries")}
    assert workers <= {"0\n", "1\n"} and "0\n" in workers


def test_errors_and_deaths_of_workers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^This part is bad\.$"):
        run(tmp_path, ["a", "bad", "c"])
    said, done = run(tmp_path, ["deadly", "d"])
    assert sorted(done) == [0, 1] and len(said) == 2
    assert said[0].endswith("ended (9) in part deadly; it is encoded again, alone (attempt 2).")
    with pytest.raises(MachineFault, match=r"ended \(9\) in part deadly!; if memory ran out use"):
        run(tmp_path, ["deadly!"])
