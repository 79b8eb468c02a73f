"""Runs go on after the death of ranks: what they lose, what they say, and when they give up."""

import dataclasses
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_ext.checkpoint.files import folder_of, published, read_tracker
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.events import read_events
from megatron_ext.disk.host_folder import generation, host_folder
from megatron_ext.errors import ConfigError
from megatron_ext.extras.resilience.elastic import REQUESTED_NODES, elastic_sizes
from megatron_ext.extras.resilience.restarts import restart_notes
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.exit_codes import (
    EXIT_CODE_COMES_BACK,
)
from megatron_ext.train.main import main
from megatron_ext.train.run import Run
from tests.training_runs import (
    SAME_WEIGHTS,
    SMALL,
    Rows,
    config_of,
    mock_data,
    read_metrics,
    training_rows,
    without,
)

Strike = Callable[[Run], None]
FLAGS = [*without(SMALL, "--train-iters", "--eval-iters"), "--eval-iters", "0"]


class Struck(Callback):
    """Lets faults happen before steps, and writes what the weights are at the end."""

    def __init__(self, run: Run, strike: Strike) -> None:
        super().__init__(run)
        self._strike = strike

    def before_step(self) -> None:
        self._strike(self.run)

    def on_train_end(self) -> None:
        digest = hashlib.sha256()
        for chunk in self.run.chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().contiguous().view(-1).numpy().tobytes())
        save = Path(self.run.config.checkpoint.save or "")
        (save / f"weights_{self.run.context.rank}").write_text(digest.hexdigest())


def run_with(strike: Strike, save: Path, words: Sequence[str], ranks: int = 2) -> int:
    """Train with faults, and return the exit code."""
    task = dataclasses.replace(GPT, callbacks=(partial(Struck, strike=strike),))
    return main(task, [*FLAGS, *words, "--nproc-per-node", str(ranks), "--save", str(save)])


def weights(save: Path) -> list[str]:
    return [path.read_text() for path in sorted(save.glob("weights_*"))]


def rows_of(save: Path) -> Rows:
    keys = "iteration", "lm loss", "grad_norm", "learning_rate", "consumed_samples"
    return [
        {k: row[k] for k in keys} for row in training_rows(read_metrics(save / "metrics.jsonl"))
    ]


def no_fault(run: Run) -> None:
    pass


def here(run: Run) -> tuple[int, int, int]:
    """Return generation, rank and the steps done."""
    return generation(), run.context.rank, run.progress.iteration


def draws(process: psutil.Process) -> bool:
    """Tell whether a process draws a picture, for which no run waits without end, or has ended."""
    try:
        return "megatron_ext.extras.resilience.picture" in process.cmdline()
    except psutil.Error:
        return True


@pytest.mark.slow
def test_a_run_with_four_faults_ends_as_one_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An older checkpoint of another run in the same folder is none to go on from."""
    words = ["--train-iters", "11", "--save-interval", "3"]
    assert run_with(no_fault, tmp_path / "whole", words) == 0

    save, shared = tmp_path / "struck", tmp_path / "shared"
    before = psutil.Process().children()  # of other tests in this process, such as a forkserver

    def strike(run: Run) -> None:
        shared.write_text(str(host_folder()))
        place = here(run)
        if place == (0, 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if place == (1, 0, 5):
            raise RuntimeError("out of luck")
        if place == (2, 1, 7):
            os.kill(os.getpid(), signal.SIGSEGV)
        if place == (3, 0, 9):
            os.kill(os.getpid(), signal.SIGSTOP)

    assert run_with(no_fault, save, ["--train-iters", "2", "--seed", "7"]) == 0
    capfd.readouterr()
    anew = ["--resume-mode", "disable", "--max-restarts", "4"]
    assert run_with(strike, save, [*words, *anew]) == 0
    assert rows_of(save) == rows_of(tmp_path / "whole")
    assert weights(save) == weights(tmp_path / "whole") and len(weights(save)) == 2
    events = [event for event in read_events(save) if event["kind"] in ("fault", "restart")]
    assert [event["kind"] for event in events] == ["fault", "restart"] * 4
    faults, restarts = events[::2], events[1::2]
    assert [(f["rank"], f["cause"], f["generation"]) for f in faults] == [
        (1, "SIGKILL", 0),
        (0, "exception", 1),
        (1, "SIGSEGV", 2),
        (0, "hang", 3),
    ]
    assert all(fault["seen_after"] <= 0.2 for fault in faults[:3])
    assert [(event["restored_from"], event["restored_iteration"]) for event in restarts] == [
        ("start", 0),
        ("checkpoint", 3),
        ("checkpoint", 6),
        ("checkpoint", 9),
    ]
    # The other rank may have begun the next step.
    for event, done in zip(restarts, (2, 5, 7, 9), strict=True):
        assert event["steps_lost"] - (done - event["restored_iteration"]) in (0, 1)
    for number, fault in enumerate(faults, start=1):
        told = (save / f"postmortem_{number}" / "report.txt").read_text()
        assert told.startswith(f"Rank {fault['rank']} stopped first"), told
    shown = capfd.readouterr()
    assert "restart 4 of 4" in shown.out and "out of luck" in shown.err
    assert shown.out.count("> loaded ") == 3  # the first restart begins at step 0 again
    assert shared.read_text() != "None" and not Path(shared.read_text()).exists()
    assert [x for x in psutil.Process().children() if x not in before and not draws(x)] == []


class EndedAtItsEnd(Struck):
    """Kills a rank after the last step for the first time, just before the last save."""

    def on_train_end(self) -> None:
        if here(self.run)[:2] == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_a_fault_has_ended_is_made_up_for(tmp_path: Path) -> None:
    """The state itself is in memory; that of step 2 is a checkpoint that was never published."""

    def strike(run: Run) -> None:
        if here(run) == (0, 0, 3):
            shutil.rmtree(folder_of(tmp_path, 2))
            os.kill(os.getpid(), signal.SIGKILL)

    task = dataclasses.replace(GPT, callbacks=(partial(EndedAtItsEnd, strike=strike),))
    words = "--train-iters 5 --save-interval 2 --max-restarts 3 --peer-checkpoint-interval 1"
    flags = [*FLAGS, *words.split(), "--nproc-per-node", "2", "--save", str(tmp_path)]
    assert main(task, flags) == 0
    restarts = [x["restored_from"] for x in read_events(tmp_path) if x["kind"] == "restart"]
    assert restarts == ["memory"]  # The second one has no step left.
    assert published(tmp_path) == [3, 4, 5]
    assert read_tracker(tmp_path) == 5


def test_a_time_limit_counts_from_the_start_of_the_launcher(tmp_path: Path) -> None:
    def strike(run: Run) -> None:
        if here(run) == (0, 1, 1):
            time.sleep(3.0)
            os.kill(os.getpid(), signal.SIGKILL)

    words = "--train-iters 500 --max-restarts 1 --exit-duration-in-mins 0.05".split()
    assert run_with(strike, tmp_path, words) == 0
    assert (read_tracker(tmp_path) or 500) <= 2


def test_a_fault_that_comes_back_and_the_last_restart_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def always(run: Run) -> None:
        if run.progress.iteration == 1 and run.context.rank == 0:
            raise RuntimeError("always here")

    words = ["--train-iters", "3"]
    assert run_with(always, tmp_path, [*words, "--max-restarts", "9"], 1) == EXIT_CODE_COMES_BACK
    shown = capfd.readouterr()
    assert shown.err.count("always here") == 2 * 3  # the traceback quotes its line
    assert "as before each of the last 2 restarts: it is not transient" in shown.out
    assert run_with(always, tmp_path, [*words, "--max-restarts", "1"], 1) == 1
    assert "as often as `--max-restarts` (1) allows" in capfd.readouterr().out

    def wrong(run: Run) -> None:
        raise ConfigError("`--flag` (1) must be 2; use 2.")

    assert run_with(wrong, tmp_path, [*words, "--max-restarts", "9"], 1) == 2
    assert "restart 1 of" not in capfd.readouterr().out


def test_replicas_leave_and_come_back_and_the_losses_stay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four replicas, two as an operator asks, four again; then one can not be started, so two."""
    words = ["--train-iters", "12", "--global-batch-size", "8", "--save-interval", "100"]
    assert run_with(no_fault, tmp_path / "whole", words, 4) == 0
    save = tmp_path / "elastic"

    def strike(run: Run) -> None:
        steps = run.progress.iteration
        wish = {(0, 2): "3", (1, 5): "4"}.get((generation(), steps))
        if wish and run.context.rank == 0:
            (save / REQUESTED_NODES).write_text(wish)
        if generation() < 2:
            time.sleep(0.3)  # the launcher looks twice a second
        elif run.context.layout.world_size == 4 and run.context.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    elastic = ["--max-restarts", "9", "--elastic-min-nodes", "2"]
    assert run_with(strike, save, [*words, *elastic], 4) == 0
    shown = capfd.readouterr().out
    assert "going on with 2 instead of 4 ranks" in shown
    assert "going on with 4 instead of 2 ranks" in shown
    assert "restart 3 of 9, with 2 ranks, for 2 have not helped" in shown
    rows, wanted = rows_of(save), rows_of(tmp_path / "whole")
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    for row, want in zip(rows, wanted, strict=True):
        assert row == pytest.approx(want, rel=1e-6)


def test_numbers_of_replicas_that_change_the_batch_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sizes(words: str, ranks: int) -> tuple[int, ...]:
        def configure(size: int) -> RunConfig:
            return config_of([*SAME_WEIGHTS, *mock_data(), *words.split()], ranks=size)

        return elastic_sizes(configure(ranks), configure)

    words = "--train-iters 2 --save x --elastic-min-nodes"
    pairs = "--tensor-model-parallel-size 2"
    assert sizes(f"{words} 1", 4) == (4, 2, 1)  # 16 samples, 2 at a time
    assert sizes(f"{words} 2 {pairs}", 8) == (8, 4)
    assert sizes(f"{words} 4", 4) == (4,)
    with pytest.raises(ConfigError, match=r"go on with 3 nodes \(3 ranks\), but: .*16"):
        sizes(f"{words} 3", 4)
    with pytest.raises(ConfigError, match=r"`--elastic-min-nodes` \(5\) must be at most"):
        sizes(f"{words} 5", 4)
    with pytest.raises(ConfigError, match="would have 12 samples instead of 16"):
        sizes(f"{words} 3 --decrease-batch-size-if-needed", 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert sizes(f"{words} 1", 4) == (4, 2)
    with pytest.raises(ConfigError, match=r"3 nodes \(6 ranks\)"):
        sizes(f"{words} 1", 8)
    errors = list(FaultToleranceConfig(elastic_min_nodes=2).errors(None, whole=True, kept=None))
    assert errors == [
        "`--elastic-min-nodes` (2) needs `--save`, from which another number of nodes goes on; "
        "give a folder."
    ]


def test_under_torchrun_its_own_flag_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of([*FLAGS, "--train-iters", "2", "--max-restarts", "3"])
    assert restart_notes(config) == []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    (note,) = restart_notes(config)
    assert note.endswith("has no effect under torchrun, which starts ranks again itself; give "
                         "`--max-restarts 3` to torchrun.")  # fmt: skip


def test_snapshots_that_nobody_will_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = [*FLAGS, "--train-iters", "2", "--peer-checkpoint-interval", "1"]
    memory = "--non-persistent-save-interval 3 --non-persistent-ckpt-type in_memory".split()
    assert [note.split(" keeps")[0] for note in restart_notes(config_of([*peer, *memory]))] == [
        "`--peer-checkpoint-interval` (1)",
        "`--non-persistent-save-interval` (3)",
    ]
    # A folder on a disk is there for later runs as well.
    local = (
        memory[:2] + "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir x".split()
    )
    assert len(restart_notes(config_of([*peer, *local]))) == 1
    assert restart_notes(config_of([*peer, "--max-restarts", "1"])) == []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    (note,) = restart_notes(config_of(peer))
    assert note.endswith("give `--max-restarts` to torchrun, or leave it out.")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert restart_notes(config_of(peer)) == []
