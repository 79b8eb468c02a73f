"""Killed video runs go on with the clips, the noise, the rates and the averages that come next."""

import hashlib
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

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import without
from tests.video import clips as tiny

STEPS, SAVED, KILLED = 10, 4, 6
WORDS = (
    f"--train-iters {STEPS} --save-interval {SAVED} --global-batch-size 4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --ema-decay 0.8"
)
SAMPLES = {1: 8, 3: 4, 5: 2}
"""The clips of a step, by their latent frames: two micro-batches of the bucket's own size."""


def _record_and_die(run: Run, folder: Path) -> None:
    tiny.record_steps(run, folder)
    next_step = run.train_source.next_step

    def dying(num_microbatches: int, seq_length: int | None) -> Any:
        if run.progress.iteration + 1 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_step(num_microbatches, seq_length)

    run.train_source.next_step = dying  # type: ignore[method-assign]


@dataclass(frozen=True)
class Runs:
    """The data, an uninterrupted run, and one that was killed in the middle of an epoch."""

    data: Path
    whole: Path
    rows: tiny.Rows
    killed: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("resume")
    counts, sizes = {tiny.IMAGE: 13, tiny.SHORT: 12, tiny.LONG: 9}, {tiny.IMAGE: 4, tiny.LONG: 1}
    data = tiny.write_clips(root / "clips", counts, sizes)
    whole, killed = root / "whole", root / "kill"
    note = partial(tiny.record_steps, folder=whole / "steps")
    rows = tiny.steps(data, whole, WORDS, prepare=note)
    die = partial(_record_and_die, folder=killed / "steps")
    code, _ = tiny.attempt(data, killed, WORDS, prepare=die)
    assert code != 0
    assert (killed / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    return Runs(data, whole, rows, killed)


def _state(save: Path, step: int = STEPS) -> dict[str, Tensor]:
    return whole_tensors(save / f"iter_{step:07d}", save / "whole.pt")


def _assert_same_steps(found: Path, wanted: Path) -> None:
    """Check that clips, references, captions, times and noise are the same bit for bit."""
    found_steps, wanted_steps = tiny.recorded_steps(found), tiny.recorded_steps(wanted)
    assert sorted(found_steps) == sorted(wanted_steps) == list(range(1, STEPS + 1))
    for step, batches in wanted_steps.items():
        for batch, want in zip(found_steps[step], batches, strict=True):
            assert batch.keys() == want.keys() >= {"img", "cond", "txt", "timesteps", "velocity"}
            assert all(torch.equal(batch[name], tensor) for name, tensor in want.items()), step


def test_buckets_have_their_own_micro_batch_sizes(runs: Runs) -> None:
    seen, samples = [], 0
    for step, batches in sorted(tiny.recorded_steps(runs.whole / "steps").items()):
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
    save = tmp_path / "save"
    shutil.copytree(runs.killed, save)
    record = partial(tiny.record_steps, folder=save / "steps")
    rows = tiny.steps(runs.data, save, f"{WORDS} --load {save}", prepare=record)
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
    rows = tiny.steps(runs.data, save, f"{WORDS} {layout} --load {save}", ranks=4)
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
    rows = tiny.steps(clips, whole, words)
    resumed = tiny.steps(clips, again, f"{words} --load {whole} --ckpt-step 2")
    assert [row["iteration"] for row in resumed] == [3, 4]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in resumed] == [row[key] for row in rows[2:]], key
    found, wanted = _state(again, 4), _state(whole, 4)
    assert any("momentum" in name for name in wanted) and found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_a_constant_rate_goes_on_for_more_steps(clips: Path, tmp_path: Path) -> None:
    """Take the default warm-up, a tenth of the first run; a warm-up by flag is another schedule."""
    flags = without(tiny.FLAGS, "--lr-warmup-iters")
    save = tmp_path / "save"
    words = f"--load {save} --exit-interval 1"
    tiny.steps(clips, save, f"{words} --train-iters 10", flags=flags)
    rows = tiny.steps(clips, save, f"{words} --train-iters 60", flags=flags)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3, 1e-3], rel=1e-6)
    with pytest.raises(CheckpointError, match=r"because of `--lr-warmup-iters` \(9, before 6\); g"):
        tiny.attempt(clips, save, f"{words} --train-iters 80 --lr-warmup-iters 9", flags=flags)


def _weight(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    digest = hashlib.blake2b(f"{name} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator) / step


def _give_weights(run: Run) -> None:
    """Replace the weights by those of `_weight` before each update of the averages."""
    assert run.ema is not None and run.optimizer is not None
    optimizer, update = run.optimizer, run.ema.update

    @torch.no_grad()
    def updated(step: int, **options: Any) -> None:
        for chunk in run.chunks:
            for shard in shards_of(chunk.module):
                shard.tensor.copy_(shard.cut(_weight(shard.name, shard.full_shape, step)))
        optimizer.reload_model_params()
        update(step, **options)

    run.ema.update = updated  # type: ignore[method-assign]


def test_the_average_of_four_ranks_is_that_of_one_bit_for_bit(clips: Path, tmp_path: Path) -> None:
    """Compare the whole averages in the checkpoints, not the piece that rank 0 averages."""
    words, found = "--ema-decay 0.9 --no-save-optim", []
    layouts = {1: "", 4: "--tensor-model-parallel-size 2 --use-distributed-optimizer"}
    for ranks, layout in layouts.items():
        save = tmp_path / str(ranks)
        tiny.train(clips, save, f"{words} {layout}", ranks=ranks, prepare=_give_weights)
        found.append(_state(save, 3))
    one, four = found
    averages = {name: tensor for name, tensor in one.items() if name.startswith("ema.")}
    assert len(averages) > 50 and one.keys() == four.keys()
    for name, average in averages.items():
        weight = one[name.removeprefix("ema.")]
        assert average.dtype is torch.float32 and average.shape == weight.shape
        assert not torch.equal(average, weight)
        assert torch.equal(average.view(torch.int32), four[name].view(torch.int32)), name
