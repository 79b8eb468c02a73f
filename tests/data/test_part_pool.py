"""Parts that are worked on in processes of either kind, and workers that fail or die."""

import os
import signal
import time
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
    if part.startswith("pair"):
        for kind, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_IGN)):
            assert signal.getsignal(kind) == handler
        end = time.monotonic() + 60
        while len(list(folder.glob("pair*.tries"))) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        if part == "pair, deadly" and len(tries.read_text().split()) == 1:
            os._exit(9)
        if part == "pair, slow" and len(tries.read_text().split()) == 1:
            time.sleep(60)  # until the pool is ended because of the other worker
    if part.startswith("bad"):
        raise DataError("This part is bad.")
    if part.startswith("late"):
        advance(2, 1)  # as far as a worker has come that dies at the end of its part
    if part.startswith(("deadly", "late")) and len(tries.read_text().split()) < 3 + part.count("!"):
        os._exit(9)
    if not part.startswith("late"):
        advance(2, 1)
    (folder / part).write_text("done")


class Shown(Progress):
    """A progress that keeps what it has shown."""

    def __init__(self, total: int) -> None:
        super().__init__(total, 0, "clips")
        self.last = (0, 0)

    def show(self, done: int, items: int) -> None:
        self.last = done, items


def run(
    folder: Path, parts: list[str], method: str = "fork", *, workers: int = 2
) -> tuple[list[str], list[int]]:
    def unfinished(numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not (folder / parts[number]).exists()]

    pool = PartPool(
        workers=workers,
        start=partial(start, folder),
        name_of=lambda number: f"part {parts[number]}",
        part_of=lambda number: parts[number],
        place=str(folder),
        unfinished=unfinished,
        method=method,  # type: ignore[arg-type]
    )
    said: list[str] = []
    done: list[int] = []
    progress = Shown(2 * len(parts))
    try:
        pool.run(range(len(parts)), progress, said.append, done.append)
    finally:
        progress.close()
    # An amount of 2 and one item in each part, however often its worker has died.
    assert progress.last == (2 * len(parts), len(parts))
    return said, done


def test_spawned_processes_get_parts_and_number_themselves(tmp_path: Path) -> None:
    said, done = run(tmp_path, ["a", "b", "c"], "spawn")
    assert not said and sorted(done) == [0, 1, 2]
    assert {path.read_text() for path in tmp_path.glob("?")} == {"done"}
    workers = {path.read_text() for path in tmp_path.glob("?.tries")}
    assert workers <= {"0\n", "1\n"} and "0\n" in workers


def test_workers_have_numbers_and_the_usual_signals_and_the_one_that_died_is_named(
    tmp_path: Path,
) -> None:
    """Two parts that wait for each other, so that each has a worker."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        said, done = run(tmp_path, ["pair 1", "pair 2"])
        assert not said and sorted(done) == [0, 1]
        numbers = sorted(path.read_text() for path in tmp_path.glob("pair*.tries"))
        assert numbers == ["0\n", "1\n"]
        own = tmp_path / "own"
        own.mkdir()
        said, done = run(own, ["pair, slow", "pair, deadly"])
        assert sorted(done) == [0, 1]
        assert [line.partition(" ended")[2] for line in said] == [
            " (9) in part pair, deadly; it is encoded again, alone (attempt 2)."
        ]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_errors_and_deaths_of_workers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^This part is bad\.$"):
        run(tmp_path, ["a", "bad", "c"])
    said, done = run(tmp_path, ["deadly", "d"])
    assert sorted(done) == [0, 1] and len(said) == 2
    assert said[0].endswith("ended (9) in part deadly; it is encoded again, alone (attempt 2).")
    # A worker has done other parts before, which are reported once.
    own = tmp_path / "own"
    own.mkdir()
    said, done = run(own, ["a", "b", "late", "c"], workers=1)
    assert sorted(done) == [0, 1, 2, 3] and all("in part late" in line for line in said)
    assert [len((own / f"{name}.tries").read_text().split()) for name in ("late", "c")] == [
        3,
        1,
    ]
    with pytest.raises(MachineFault, match=r"ended \(9\) in part deadly!; if memory ran out use"):
        run(tmp_path, ["deadly!"])
