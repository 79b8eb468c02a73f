"""Killed video runs go on with the clips, the noise, the rates and the averages that come next."""

from __future__ import annotations

import math
import os
import shutil
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.task import FLOW
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import train_on_ranks
from tests.video.clips import (
    FLAGS,
    IMAGE,
    LONG,
    SHORT,
    Rows,
    record_steps,
    recorded_steps,
    steps,
    write_clips,
)

STEPS, SAVED, KILLED = 10, 4, 6
WORDS = (
    f"--train-iters {STEPS} --save-interval {SAVED} --global-batch-size 4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --ema-decay 0.8"
)
SAMPLES = {1: 8, 3: 4, 5: 2}
"""Clips of a step, by their latent frames: two micro-batches of the bucket's own size."""


def _record_and_die(run: Run, folder: Path) -> None:
    record_steps(run, folder)
    next_step = run.train_source.next_step

    def dying(num_microbatches: int) -> Any:
        if run.progress.iteration + 1 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_step(num_microbatches)

    run.train_source.next_step = dying  # type: ignore[method-assign]


@dataclass(frozen=True)
class Runs:
    """The data, an uninterrupted run, and one that was killed in the middle of an epoch."""

    data: Path
    whole: Path
    rows: Rows
    killed: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("resume")
    counts, sizes = {IMAGE: 13, SHORT: 12, LONG: 9}, {IMAGE: 4, LONG: 1}
    data, whole, killed = write_clips(root / "clips", counts, sizes), root / "whole", root / "kill"
    rows = steps(data, whole, WORDS, prepare=partial(record_steps, folder=whole / "steps"))
    code, _ = train_on_ranks(
        [*FLAGS, "--video-data-path", str(data), *WORDS.split()],
        save=killed,
        task=FLOW,
        prepare=partial(_record_and_die, folder=killed / "steps"),
    )
    assert code != 0
    assert (killed / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    return Runs(data, whole, rows, killed)


def _state(save: Path) -> dict[str, Tensor]:
    """Weights, averages and moments after the last step, whole."""
    return whole_tensors(save / f"iter_{STEPS:07d}", save / "whole.pt")


def _assert_same_steps(found: Path, wanted: Path) -> None:
    """The same clips, references, captions, times and noise, bit for bit."""
    found_steps, wanted_steps = recorded_steps(found), recorded_steps(wanted)
    assert sorted(found_steps) == sorted(wanted_steps) == list(range(1, STEPS + 1))
    for step, batches in wanted_steps.items():
        for batch, want in zip(found_steps[step], batches, strict=True):
            assert batch.keys() == want.keys() >= {"img", "cond", "txt", "timesteps", "velocity"}
            assert all(torch.equal(batch[name], tensor) for name, tensor in want.items()), step


def test_buckets_have_their_own_micro_batch_sizes(runs: Runs) -> None:
    """One bucket for each step, and each one's own number of clips in the log."""
    seen, samples = [], 0
    for step, batches in sorted(recorded_steps(runs.whole / "steps").items()):
        (frames,) = {int(batch["img_ids"][..., 0].max()) + 1 for batch in batches}
        seen.append(frames)
        assert [len(batch["img"]) for batch in batches] == [SAMPLES[frames] // 2] * 2
        samples += SAMPLES[frames]
        row = runs.rows[step - 1]
        assert row["consumed_samples"] == row["train/samples"] == samples
        assert row["global_batch_size"] == SAMPLES[frames]
        if step > 2:
            measured = row["train/throughput"] * row["seconds_per_iteration"]
            assert math.isclose(measured, SAMPLES[frames], rel_tol=1e-9)
    # 13 // 8 steps of images, 12 // 4 of short and 9 // 2 of long clips, and a part of an epoch.
    assert sorted(seen[:8]) == [1, 3, 3, 3, 5, 5, 5, 5]
    assert len(set(seen[SAVED:8])) > 1


def test_a_killed_run_goes_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    """In the middle of an epoch of three buckets: exactly the sequence that remains."""
    save = tmp_path / "save"
    shutil.copytree(runs.killed, save)
    record = partial(record_steps, folder=save / "steps")
    rows = steps(runs.data, save, f"{WORDS} --load {save}", prepare=record)
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in rows[1:]] == [row[key] for row in runs.rows[1:]], key
    assert len({row["learning_rate"] for row in rows}) > STEPS // 2
    _assert_same_steps(save / "steps", runs.whole / "steps")
    found, wanted = _state(save), _state(runs.whole)
    assert found.keys() == wanted.keys() and any(name.startswith("ema.") for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_one_rank_goes_on_as_tp2_pp2(runs: Runs, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(runs.killed, save)
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    rows = steps(runs.data, save, f"{WORDS} {layout} --load {save}", ranks=4)
    for row, want in zip(rows[SAVED:], runs.rows[SAVED:], strict=True):
        assert row["learning_rate"] == want["learning_rate"]
        for key in ("loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=1e-5), (row["iteration"], key)
    found, wanted = _state(save), _state(runs.whole)
    averages = [name for name in wanted if name.startswith("ema.")]
    assert averages and set(averages) <= found.keys()
    for name in averages:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_sgd_goes_on_bit_for_bit(clips: Path, tmp_path: Path) -> None:
    words = "--optimizer sgd --train-iters 4 --save-interval 2"
    whole, again = tmp_path / "whole", tmp_path / "again"
    rows = steps(clips, whole, words)
    resumed = steps(clips, again, f"{words} --load {whole} --ckpt-step 2")
    assert [row["iteration"] for row in resumed] == [3, 4]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in resumed] == [row[key] for row in rows[2:]], key
    found, wanted = (
        whole_tensors(save / "iter_0000004", save / "whole.pt") for save in (again, whole)
    )
    assert any("momentum" in name for name in wanted) and found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
