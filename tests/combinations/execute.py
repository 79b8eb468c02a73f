"""Runs one program in a process of its own, forked after one import of torch and megatron.

The process leads a group, works in a folder of its own, and keeps its temporary files there, so
that what it leaves behind is seen: processes, and files.
"""

import argparse
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from megatron_ext.disk import host_folder as host
from megatron_ext.extras.resilience.postmortem import Drawings
from megatron_ext.train.reporting import loss_plot
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.reporting.start import STARTED

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
"""The folder in memory in which a run makes its host folder."""
BUSY = 60.0
"""Seconds of computing after which a process of a tiny run counts as hanging, however late its wall
clock is on a busy machine."""
PATIENCE = 2.0
"""Seconds that processes of a program that has ended are given to end."""


@dataclass
class Ended:
    """How a program ended; its code is None where it was stopped after its time.

    `left` are sentences about processes and files that it left behind.
    """

    code: int | None
    seconds: float
    out: str
    err: str
    left: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def started(self) -> bool:
        return STARTED in self.out


def load() -> None:
    """Import what every run needs, once; draw a picture, which loads fonts."""
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401 - all four, for their side effects

    from megatron_ext.text.task import TEXT
    from megatron_ext.train.main import pretrain
    from megatron_ext.video.task import VIDEO

    pretrain.load()
    for task in (*TEXT.tasks, *VIDEO.tasks):
        task.loaded()
    torch.set_num_threads(1)
    row = {"kind": "train", "iteration": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-5}
    with tempfile.TemporaryDirectory() as folder:
        loss_plot.plot_metrics([row], Path(folder) / "loss.png")


@contextmanager
def work_directory(data: Path) -> Any:
    """Make a work directory for one case beside the inputs, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="case_", dir=data))
    try:
        (folder / "examples").symlink_to(ROOT / "examples")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def side_by_side(
    work: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]], jobs: int
) -> Iterator[Any]:
    """Yield the results of functions as they come, so many at a time, in forked processes."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running: set[Future[Any]] = set()
        for function, arguments in work:
            running.add(pool.submit(function, *arguments))
            if len(running) == jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in as_completed(running):
            yield future.result()


def judge_all(
    draw: Callable[[random.Random], Any],
    judge: Callable[[Any, Path, float], tuple[str, str]],
    arguments: argparse.Namespace,
    data: Path,
) -> int:
    """Draw cases, judge each, and print the failures; return the exit code.

    ``judge`` gives the kind of a case, "equal", "refused" or that of a failure, and a text.
    """
    dice, counts = random.Random(arguments.seed), dict[str, int]()
    cases = [draw(dice) for _ in range(arguments.cases or 100)]
    work = ((judge, (case, data, arguments.limit)) for case in cases)
    for number, (kind, text) in enumerate(side_by_side(work, arguments.jobs)):
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in ("equal", "refused"):
            print(f"FAILED: {kind}\n{text}\n", flush=True)
        elif arguments.verbose:
            print(f"{number}: {kind} {text}", flush=True)
    print(f"\n{counts}")
    return int(bool(counts.keys() - {"equal", "refused"}))


def execute(
    main: Callable[[], int],
    folder: Path,
    *,
    name: str,
    limit: float,
    pictures: bool = False,
    stdin: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``main`` in a process of its own.

    Its files in the work directory begin with its name. After ``limit`` seconds it counts as
    hanging. ``pictures`` draws ``loss.png`` and post-mortems, which takes longer than a short run.
    """
    temporary = folder / f"{name}.tmp"
    temporary.mkdir()
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    begin = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment or {})
        _child(main, folder, temporary, (stdin or Path(os.devnull), out, err), pictures)
    code = _wait(pid, begin + limit)
    seconds = time.monotonic() - begin
    if code is None:
        _stacks(pid)
    left = _end_group(pid, ended=code is not None)
    if code is not None:
        names = (x.name for x in temporary.iterdir())
        # Empty folders of torch's loaders stay where a run ends before its data.
        files = sorted(name for name in names if not name.startswith("torch_"))
        left += [f"{x} is left in the temporary folder" for x in files]
    for shared in SHARED.glob(f"{_host_prefix(pid)}*"):
        if code is not None:
            left.append(f"{shared} is left behind")
        shutil.rmtree(shared, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    metrics = folder / name / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    texts = (path.read_text(errors="replace") for path in (out, err))
    return Ended(code, seconds, *texts, left, rows)


def _child(
    main: Callable[[], int], folder: Path, temporary: Path, streams: Sequence[Path], pictures: bool
) -> None:
    """Run the program in this process; never return."""
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(streams[0], os.O_RDONLY), 0)
        for number in (1, 2):
            target = os.open(streams[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = _stream(1), _stream(2)
        # Shows where a run hangs, and is inherited by its ranks.
        faulthandler.register(signal.SIGXCPU, all_threads=True, file=2)
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        host._PREFIX = _host_prefix(os.getpid())
        if not pictures:
            loss_plot.LossPlot.close = lambda self: None  # type: ignore[method-assign]
            Drawings.start = lambda self, folder: None  # type: ignore[method-assign]
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _host_prefix(pid: int) -> str:
    """Return how the names of the host folders begin that a program makes, by its process."""
    return f"megatron_ext_{os.getuid()}_{pid}_of_case_"


def _stream(number: int) -> IO[str]:
    return os.fdopen(number, "w", buffering=1, closefd=False, encoding="utf-8")


def _wait(pid: int, end: float) -> int | None:
    """Return the exit code, or None if the process is not done in time."""
    pause, look = 0.005, time.monotonic() + 10
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > look:
            if any(seconds > BUSY for _, _, seconds in _members(pid)):
                return None
            look += 2
        time.sleep(pause)
        pause = min(pause * 1.2, 0.05)
    return None


def _stacks(pid: int) -> None:
    """Have the processes of the group print where they are, one after the other."""
    for member in sorted(number for number, _, _ in _members(pid)):
        try:
            os.kill(member, signal.SIGXCPU)
        except ProcessLookupError:
            continue
        time.sleep(0.2)


def _end_group(pid: int, *, ended: bool) -> list[str]:
    """End what is left of the group; say so if the program had ended by itself."""
    end = time.monotonic() + PATIENCE
    while ended and _lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    left = _lives(pid)
    if left:
        _signal(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    return ["processes are left behind"] if left and ended else []


def _lives(group: int) -> bool:
    return _signal(group, 0) and any(state != "Z" for _, state, _ in _members(group))


def _members(group: int) -> Iterator[tuple[int, str, float]]:
    """Yield number, state and seconds of computing of each process of a group."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[2]) == group:
            ticks = int(words[11]) + int(words[12])
            yield int(entry.parent.name), words[0], ticks / os.sysconf("SC_CLK_TCK")


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
