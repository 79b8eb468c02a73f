"""The average of the generator's weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming.runs import after_each_step, run, runner_of, weights

STEPS, DECAY = 7, 0.8


def _record(run: Run, path: Path) -> None:
    """Write down the generator's weights after each step."""
    runner, seen = runner_of(run), list[dict[str, Tensor]]()

    def record(_: Any) -> None:
        seen.append(weights(runner.generator.network))
        torch.save(seen, path)

    after_each_step(run, record)


def stored(folder: Path) -> dict[str, Tensor]:
    """Return what the checkpoint of the last step holds."""
    return whole_tensors(folder / f"iter_{STEPS:07d}", folder / "whole.pt")


def averages(folder: Path) -> dict[str, Tensor]:
    """Return the averaged weights after the last step, by the names of the weights."""
    found = stored(folder)
    return {k.removeprefix("ema."): x for k, x in found.items() if k.startswith("ema.")}


def test_the_average_follows_the_updates_of_the_generator(tmp_path: Path) -> None:
    """Average updates at steps 1, 3, 5 and 7 counted from 1, beginning with the weights of 3."""
    record = partial(_record, path=tmp_path / "seen.pt")
    run(tmp_path, f"--train-iters {STEPS}", start=4, prepare=record)
    after = torch.load(tmp_path / "seen.pt")
    found = averages(tmp_path / "save")
    assert found.keys() == after[-1].keys()
    for name, average in found.items():
        want = after[2][name].double()
        for step in (4, 6):
            want = DECAY * want + (1 - DECAY) * after[step][name].double()
        torch.testing.assert_close(average.double(), want, rtol=1e-6, atol=1e-8, msg=name)
        if after[2][name].ne(after[6][name]).any():
            assert not torch.equal(average, after[6][name]), name


def test_every_other_update_counts_steps_of_the_generator(tmp_path: Path) -> None:
    """Train it at steps 1, 3, 5 and 7, of which 3 and 7 are averaged."""
    record = partial(_record, path=tmp_path / "seen.pt")
    run(tmp_path, f"--train-iters {STEPS} --ema-update-every 2", start=2, prepare=record)
    after = torch.load(tmp_path / "seen.pt")
    for name, average in averages(tmp_path / "save").items():
        want = after[0][name].double()
        for step in (2, 6):
            want = DECAY * want + (1 - DECAY) * after[step][name].double()
        torch.testing.assert_close(average.double(), want, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.slow
def test_a_start_that_has_not_come_leaves_the_weights(tmp_path: Path) -> None:
    record = partial(_record, path=tmp_path / "seen.pt")
    run(tmp_path, f"--train-iters {STEPS}", start=200, prepare=record)
    last = torch.load(tmp_path / "seen.pt")[-1]
    assert all(torch.equal(x, last[name]) for name, x in averages(tmp_path / "save").items())


@pytest.mark.slow
def test_sharded_averages_are_the_whole_ones_bit_for_bit(tmp_path: Path) -> None:
    for name in ("", "no-"):
        words = f"--train-iters {STEPS} --{name}use-distributed-optimizer"
        run(tmp_path, words, ranks=2, batch=2, start=4, save=f"{name}sharded")
    found, wanted = stored(tmp_path / "sharded"), stored(tmp_path / "no-sharded")
    names = [name for name in wanted if "optimizer" not in name]
    assert any(name.startswith("ema.") for name in names)
    assert any(name.startswith("critic.") for name in names)
    for name in names:
        assert torch.equal(found[name], wanted[name]), name
