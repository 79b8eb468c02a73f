"""A streaming run that goes on in the middle of a sequence does so bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.training.setup import Run
from megatron_ext.training.streaming.step import StreamingRunner
from tests.checkpoint.tiny import whole_tensors
from tests.training.streaming.tiny import CHUNKS, run

STEPS, SAVED = 6, 3
KEYS = ("loss", "grad_norm", "learning_rate", "consumed_samples")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Weights of both networks, averages and moments after the last step, whole."""
    return whole_tensors(folder / f"iter_{STEPS:07d}", folder / "whole.pt")


def in_the_middle(run: Run) -> None:
    """The loaded sequence has some of its chunks, and the cache some of its frames."""
    assert isinstance(run.runner, StreamingRunner)
    state = run.runner.sequence.state
    assert run.runner.companion.steps == SAVED
    assert state is not None and 0 < state.chunk < CHUNKS
    assert run.runner.sequence.generator.cache.state_dict()["end"] == state.current_length


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (1, 1, ""),
        (2, 2, "--use-distributed-optimizer"),
        (2, 1, "--tensor-model-parallel-size 2"),
        (2, 1, "--context-parallel-size 2"),
    ],
)
def test_criterion_26_a_run_goes_on_bit_for_bit(
    tmp_path: Path, ranks: int, batch: int, layout: str
) -> None:
    words = f"--train-iters {STEPS} --save-interval {SAVED} {layout}"
    whole = run(tmp_path, words, ranks=ranks, batch=batch)
    again = tmp_path / "again"
    again.mkdir()
    saved = f"iter_{SAVED:07d}"
    shutil.copytree(tmp_path / "save" / saved, again / saved)
    (again / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    words += f" --load {again}"
    rows = run(tmp_path, words, ranks=ranks, batch=batch, save="again", prepare=in_the_middle)
    assert [row["iteration"] for row in rows] == list(range(SAVED + 1, STEPS + 1))
    for row, want in zip(rows, whole[SAVED:], strict=True):
        losses = {k: v for k, v in want.items() if k in KEYS or "loss" in k or "norm" in k}
        assert losses == {k: row[k] for k in losses}
    found, wanted = tensors(again), tensors(tmp_path / "save")
    assert found.keys() == wanted.keys()
    for prefix in ("ema.", "critic.blocks", "critic.optimizer", "optimizer.", "blocks."):
        assert any(name.startswith(prefix) for name in wanted), prefix
    assert not any("teacher" in name for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
