"""Long videos that a streaming run samples on its way, without any effect on its training."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST
from megatron_ext.video.streaming.step import StreamingRunner
from tests.checkpoint.tiny import whole_tensors
from tests.video.sampling.test_clips import read
from tests.video.streaming.runs import run

STEPS = 3
VIEWED = (
    "--sample-interval 1 --sample-texts disc square --sample-second-texts bar wheel "
    "--sample-latent-frames 12 --sample-switch-frame 5"
)


def _snapshot(run: Run) -> dict[str, Any]:
    """Return all that the next step depends on, and that belongs to this rank."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner) and run.ema is not None
    networks = (runner.generator.network, runner.critic.network, runner.teacher)
    bare = [unwrap_model([network])[0] for network in networks]
    return {
        "sequence": runner.sequence.state_dict(),
        "weights": [list(network.parameters()) for network in bare],
        "gradients": [clip.buffers[0].grad_data for clip in networks[:2]],
        "averages": [average for _, average in run.ema.gathered()],
        "modes": [[m.training for m in network.modules()] for network in bare],
        "random": [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()],
        "numpy": np.random.get_state(legacy=False)["state"]["key"],
        "grad": torch.is_grad_enabled(),
        "steps": runner.extra_state.steps,
        "progress": run.progress.to_dict(),
    }


def _record(run: Run, path: Path) -> None:
    """Write down what each step begins with, after whatever came between it and the last."""
    train, seen = run.runner.train, list[dict[str, Any]]()

    def recorded(*args: Any) -> Any:
        seen.append(copy.deepcopy(_snapshot(run)))
        torch.save(seen, path / f"rank_{run.context.rank}.pt")
        return train(*args)

    run.runner.train = recorded  # type: ignore[method-assign, assignment]


def _assert_same(a: Any, b: Any, where: str = "") -> None:
    """Check that two values of any nesting are equal bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert (a == b).all(), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            _assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            _assert_same(pair[0], pair[1], f"{where}.{i}")
    else:
        assert a == b, where


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (1, 1, ""),
        pytest.param(2, 1, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        (2, 2, "--use-distributed-optimizer"),
    ],
)
def test_visualisation_changes_nothing(tmp_path: Path, ranks: int, batch: int, layout: str) -> None:
    rows, weights, seen = [], [], []
    for name, words in (("without", ""), ("with", VIEWED)):
        folder = tmp_path / name
        folder.mkdir()
        words = f"--train-iters {STEPS} --save-interval {STEPS} {layout} {words}"
        rows.append(
            run(folder, words, ranks=ranks, batch=batch, prepare=partial(_record, path=folder))
        )
        weights.append(whole_tensors(folder / "save" / f"iter_{STEPS:07}", folder / "whole.pt"))
        seen.append([torch.load(folder / f"rank_{i}.pt", weights_only=False) for i in range(ranks)])
    for without, viewed in zip(*rows, strict=True):
        assert without.keys() == viewed.keys()
        kept = [k for k in without if "loss" in k or "norm" in k or "learning" in k]
        assert len(kept) > 4
        _assert_same({k: without[k] for k in kept}, {k: viewed[k] for k in kept})
    _assert_same(weights[0], weights[1])
    # After a step of the critic alone, the memo of the text is still in use.
    assert len(seen[0][0]) == STEPS and seen[0][0][2]["sequence"]["cache"]["memo"]["key_values"]
    _assert_same(seen[0], seen[1])
    root = tmp_path / "with" / "save" / "samples"
    assert sorted(x.name for x in root.iterdir()) == [f"iter_{i:07}" for i in range(1, STEPS + 1)]


def test_videos_are_files_with_their_switches(tmp_path: Path) -> None:
    words = VIEWED.replace("--sample-interval 1", "--sample-interval 2")
    codec = "--no-encode-first-frame --codec-spatial 2 --codec-channels 4"
    run(tmp_path, f"--train-iters 2 {words} --sample-fps 5 --no-sample-ema {codec}")
    folder = tmp_path / "save" / "samples" / "iter_0000002"
    names = {path.name for path in folder.iterdir()}
    assert names == {"sample_000.mp4", "sample_001.mp4", CONTACT_SHEET, LIST}
    for i in range(2):
        frames, fps = read(folder / f"sample_00{i}.mp4")
        assert frames.shape == (4 * 11 + 1, 8, 8, 3) and fps == 5
    rows = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    assert [row["text"] for row in rows] == ["disc", "square"]
    # Frame 5 lies in the block from frame 3 on, which is made under one caption.
    assert [row["switches"] for row in rows] == [
        [{"frame": 6, "text": "bar"}],
        [{"frame": 6, "text": "wheel"}],
    ]
    for row in rows:
        assert (row["num_frames"], row["latent_frames"], row["iteration"]) == (45, 12, 2)
        assert row["averaged_weights"] is False


def test_videos_that_are_not_finite_do_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def spoil(run: Run) -> None:
        """Make weights of the average give no finite number, whatever the training does."""
        assert run.ema is not None
        average = next(iter(run.ema._parts)).average
        update = run.ema.update

        def updated(step: int) -> None:
            update(step)
            average.fill_(torch.nan)

        run.ema.update = updated  # type: ignore[method-assign]

    rows = run(tmp_path, f"--train-iters 2 {VIEWED}", prepare=spoil)
    assert [row["iteration"] for row in rows][-1] == 2
    assert "the sampled videos are not finite and are not written" in capfd.readouterr().out
    assert not (tmp_path / "save" / "samples").exists() or not list(
        (tmp_path / "save" / "samples").iterdir()
    )
