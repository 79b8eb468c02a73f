"""A streaming run that goes on in the middle of a sequence does so bit for bit."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.files import read_tracker
from megatron_ext.errors import CheckpointError
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming.runs import CLIPS, Rows, attempt, losses_of, run, runner_of

STEPS, SAVED = 6, 3
"""Clips of the first steps: generator and critic, critic, both again: the next is the second of
another sequence."""
DP2 = (2, 2, "--use-distributed-optimizer")
TP2 = (2, 1, "--tensor-model-parallel-size 2")
CP2 = (2, 1, "--context-parallel-size 2")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return weights of both networks, averages and moments after the last step, whole."""
    return whole_tensors(folder / f"iter_{STEPS:07d}", folder / "whole.pt")


def in_the_middle(run: Run) -> None:
    """Check that the loaded sequence has some of its clips, and the cache some of its frames."""
    runner = runner_of(run)
    state = runner.sequence.state
    assert runner.extra_state.steps == SAVED
    assert state is not None and 0 < state.chunk < CLIPS
    assert runner.sequence.generator.cache.state_dict()["end"] == state.current_length


def cut_back(save: Path, again: Path) -> Path:
    """Make a folder with the checkpoint in the middle of a run, and no later one."""
    saved = f"iter_{SAVED:07d}"
    shutil.copytree(save / saved, again / saved)
    (again / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return again


def check_same_run(rows: Rows, whole: Rows, found: Path, wanted: Path) -> None:
    """Compare the last three steps, and all that they leave behind."""
    assert [row["iteration"] for row in rows] == list(range(SAVED + 1, STEPS + 1))
    for row, want in zip(rows, whole[SAVED:], strict=True):
        for name, value in losses_of(want).items():
            assert row[name] == value, (row["iteration"], name)
        for name in ("learning_rate", "consumed_samples"):
            assert row[name] == want[name]
    stored, expected = tensors(found), tensors(wanted)
    assert stored.keys() == expected.keys()
    for prefix in ("ema.", "critic.blocks", "critic.optimizer", "optimizer.", "blocks."):
        assert any(name.startswith(prefix) for name in expected), prefix
    assert not any("teacher" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (1, 1, ""),
        DP2,
        pytest.param(*TP2, marks=pytest.mark.slow),
        pytest.param(*CP2, marks=pytest.mark.slow),
        pytest.param(2, 1, f"{CP2[2]} --cp-comm-type a2a", marks=pytest.mark.slow),
        pytest.param(1, 1, "--bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, ranks: int, batch: int, layout: str) -> None:
    words = f"--train-iters {STEPS} --save-interval {SAVED} {layout}"
    whole = run(tmp_path, words, ranks=ranks, batch=batch)
    again = cut_back(tmp_path / "save", tmp_path / "again")
    words += f" --load {again}"
    rows = run(tmp_path, words, ranks=ranks, batch=batch, save="again", prepare=in_the_middle)
    check_same_run(rows, whole, again, tmp_path / "save")


def _linger(run: Run) -> None:
    """Wait after the step that follows the checkpoint, for the kill."""
    runner = runner_of(run)
    train = runner.train

    def slow(*args: Any) -> Any:
        if runner.extra_state.steps > SAVED:
            time.sleep(60)
        return train(*args)

    runner.train = slow  # type: ignore[method-assign]


def _launch(folder: Path, words: str) -> int:
    """Launch two ranks from a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt(folder, words, ranks=2, batch=2, prepare=_linger)
        finally:
            os._exit(1)
    return pid


@pytest.mark.slow
def test_a_killed_launcher_leaves_a_run_that_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    """Kill it between two checkpoints, in the middle of a sequence; the ranks die with it."""
    words = f"--train-iters {STEPS} --save-interval {SAVED} --use-distributed-optimizer"
    whole = run(tmp_path / "whole", words, ranks=2, batch=2)
    save = tmp_path / "killed" / "save"
    launcher = _launch(tmp_path / "killed", words)
    end = time.monotonic() + 60
    while len(read_metrics(save / "metrics.jsonl")) <= SAVED and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert len(read_metrics(save / "metrics.jsonl")) == SAVED + 1
    assert read_tracker(save) == SAVED
    rows = run(
        tmp_path / "killed", f"{words} --load {save}", ranks=2, batch=2, prepare=in_the_middle
    )
    check_same_run(rows[SAVED:], whole, save, tmp_path / "whole" / "save")


def _kept(run: Run, path: Path) -> None:
    """Write down where the sequence stands, and which clip comes next."""
    sequence = runner_of(run).sequence
    cache = dict(sequence.generator.cache.state_dict())
    content: dict[str, Any] = {"state": sequence.state, "slots": dict(cache["slots"])}
    next_clip = sequence.next_clip

    def noted(*, trains_generator: bool) -> Any:
        clip = next_clip(trains_generator=trains_generator)
        if run.context.rank == 0 and "next" not in content:
            content["next"] = (clip.sequence, clip.number, clip.samples.start)
            torch.save(content, path)
        return clip

    sequence.next_clip = noted  # type: ignore[method-assign]


def resumed(folder: Path, words: str, ranks: int, batch: int = 2, micro: int = 2) -> Rows:
    """Resume a run of two videos on one rank, with other flags."""
    again = cut_back(folder / "save", folder / "again")
    return run(
        folder,
        f"--train-iters {STEPS} {words} --load {again}",
        ranks=ranks,
        batch=batch,
        micro=micro,
        save="again",
        prepare=partial(_kept, path=folder / "kept.pt"),
    )


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    folder = tmp_path_factory.mktemp("one")
    words = f"--train-iters {STEPS} --save-interval {SAVED}"
    return folder, run(folder, words, micro=2, batch=2)


def copied(one_rank: tuple[Path, Rows], folder: Path) -> Path:
    shutil.copytree(one_rank[0] / "save", folder / "save")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 2",
        pytest.param("--context-parallel-size 2 --cp-comm-type a2a", marks=pytest.mark.slow),
    ],
)
def test_another_layout_makes_the_cache_anew(
    one_rank: tuple[Path, Rows], tmp_path: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let frames, prompts and numbers go on; keys and values differ by what weights have moved."""
    rows = resumed(copied(one_rank, tmp_path), words, ranks=2)
    assert "so that the cache of past frames is made anew" in capfd.readouterr().out
    kept = torch.load(tmp_path / "kept.pt", weights_only=False)
    assert kept["state"].sequence == 1 and 0 < kept["state"].chunk < CLIPS
    assert kept["next"] == (1, kept["state"].chunk, 2)
    # The sinks, and the frames that the next block sees.
    assert set(range(3)) <= kept["slots"].keys() and len(kept["slots"]) > 3
    for row, want in zip(rows, one_rank[1][SAVED:], strict=True):
        assert math.isclose(row["critic loss"], want["critic loss"], rel_tol=0.05)
        assert row["learning_rate"] == want["learning_rate"]


def test_another_number_of_replicas_begins_the_sequences_that_come_next(
    one_rank: tuple[Path, Rows], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = resumed(copied(one_rank, tmp_path), "", ranks=2, micro=1)
    note = "The number of data-parallel replicas has changed, so that new video sequences begin."
    assert note in capfd.readouterr().out
    kept = torch.load(tmp_path / "kept.pt", weights_only=False)
    # Two sequences of two videos were begun before.
    assert kept["state"] is None and kept["next"] == (2, 0, 4)
    assert [row["iteration"] for row in rows] == list(range(SAVED + 1, STEPS + 1))


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--micro-batch-size 1", "`--micro-batch-size` was 2 and is 1, so that new video sequence"),
        pytest.param(
            "--sink-frames 0",
            "`--sink-frames` was 3 and is 0, so that the cache of past frames is",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_flags_say_what_begins_anew(
    one_rank: tuple[Path, Rows],
    tmp_path: Path,
    words: str,
    note: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, value = words.split()
    micro = int(value) if name == "--micro-batch-size" else 2
    rows = resumed(copied(one_rank, tmp_path), "" if micro == 1 else words, ranks=1, micro=micro)
    assert note in capfd.readouterr().out
    assert len(rows) == STEPS - SAVED


def test_state_of_one_layout_is_refused_in_another_before_any_rank_starts(tmp_path: Path) -> None:
    words = "--use-distributed-optimizer --no-dist-ckpt-optim-fully-reshardable --train-iters 2"
    run(tmp_path, f"{words} {CP2[2]}", ranks=2)
    words += f" --train-iters 3 --load {tmp_path / 'save'} {TP2[2]} --sequence-parallel"
    with pytest.raises(CheckpointError, match="use those, or give `--no-load-optim`"):
        attempt(tmp_path, words, ranks=2, save="other")
