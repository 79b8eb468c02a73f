"""tools/sample_video.py --streaming on adapters, whose frozen weights lie in other checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR, fork_ranks
from megatron_ext.video.streaming.tool import sample_streaming
from megatron_ext.video.streaming.video_files import LongVideoWriter
from megatron_ext.video.task import VIDEO
from tests.training_runs import train_on_ranks
from tests.video.streaming.runs import flags_of, run
from tests.video.streaming.tuned import ADAPTERS, FAST, STEPS, Tuned
from tools.lora import main

Sampled = Callable[..., Tensor]


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Return latents of a video of a checkpoint, ``[t, c, h, w]``; none with another exit code."""

    def launch(main: Callable[[], int | None], *, nproc_per_node: int, **_: object) -> int:
        return fork_ranks(main, nproc_per_node)

    append = LongVideoWriter.append

    def kept(self: LongVideoWriter, latents: Tensor) -> None:
        torch.save(latents[0], tmp_path / f"latents_{self.num_frames:03}.pt")
        append(self, latents)

    monkeypatch.setattr("megatron_ext.train.main.launch", launch)
    monkeypatch.setattr(LongVideoWriter, "append", kept)

    def call(checkpoint: Path, words: str = "", code: int = 0) -> Tensor:
        flags = "--sample-texts disc --sample-latent-frames 9 --no-sample-ema"
        folders = ["--load", str(checkpoint), "--sample-dir", str(tmp_path / "videos")]
        assert sample_streaming([*flags.split(), *folders, *words.split()]) == code
        paths = sorted(tmp_path.glob("latents_*.pt"))
        assert len(paths) == (0 if code else 3)
        latents = torch.cat([torch.load(path) for path in paths]) if paths else torch.empty(0)
        for path in paths:
            path.unlink()
        return latents

    return call


def merged(checkpoint: Path, folder: Path) -> Path:
    """Make the same generator without adapters, in a process of its own."""
    words = ["merge", "--load", str(checkpoint), "--save", str(folder)]
    assert fork_ranks(lambda: main(words), 1) == 0
    return folder


def check(found: Tensor, want: Tensor) -> None:
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.fixture
def moved(tuned: Tuned, tmp_path: Path) -> Iterator[Path]:
    """Move the weights under the adapters for a while."""
    folder = tmp_path / "moved"
    tuned.base.rename(folder)
    yield folder
    folder.rename(tuned.base)


def test_adapters_sample_as_merged_ones(tuned: Tuned, sampled: Sampled, tmp_path: Path) -> None:
    want = sampled(merged(tuned.saved, tmp_path / "merged"))
    found = sampled(tuned.saved)
    check(found, want)
    assert (found - sampled(tuned.base)).abs().max() > 0.01 * want.abs().max()
    check(sampled(tuned.saved, "--nproc-per-node 2 --tensor-model-parallel-size 2"), want)


def test_newer_weights_beside_those_under_the_adapters_are_let_alone(
    tuned: Tuned, sampled: Sampled, tmp_path: Path
) -> None:
    want = sampled(tuned.saved)
    newer, tracker = tuned.base / "iter_0000002", tuned.base / TRACKER
    before = tracker.read_text()
    shutil.copytree(tuned.checkpoint(), newer)
    tracker.write_text("2")
    try:
        assert torch.equal(sampled(tuned.saved), want)
        first = tuned.base / "iter_0000001"
        assert torch.equal(sampled(tuned.saved, f"--pretrained-checkpoint {first}"), want)
    finally:
        shutil.rmtree(newer)
        tracker.write_text(before)


def test_weights_that_were_moved_are_given(
    tuned: Tuned, moved: Path, sampled: Sampled, capfd: pytest.CaptureFixture[str]
) -> None:
    found = sampled(tuned.saved, f"--pretrained-checkpoint {moved}")
    capfd.readouterr()
    sampled(tuned.saved, code=EXIT_CODE_USER_ERROR)
    assert capfd.readouterr().err == (
        f"error: `--load` ({tuned.saved}) holds adapters of the weights in {tuned.base}/"
        "iter_0000001, which are not there; give `--pretrained-checkpoint` with where they are "
        "now.\n"
    )
    moved.rename(tuned.base)
    try:
        assert torch.equal(sampled(tuned.saved), found)
    finally:
        tuned.base.rename(moved)


def test_other_weights_are_refused(
    tuned: Tuned, sampled: Sampled, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = merged(tuned.saved, tmp_path / "merged")
    sampled(tuned.saved, f"--pretrained-checkpoint {other}", code=EXIT_CODE_USER_ERROR)
    assert (
        f"must be the weights under the adapters in {tuned.checkpoint()}, which were those of"
        in (capfd.readouterr().err)
    )
    sampled(tuned.base, f"--pretrained-checkpoint {other}", code=EXIT_CODE_USER_ERROR)
    assert f"`--pretrained-checkpoint` ({other}) has no effect: `--load` ({tuned.base}) holds" in (
        capfd.readouterr().err
    )


def test_random_weights_under_adapters_are_drawn_again(sampled: Sampled, tmp_path: Path) -> None:
    run(tmp_path, f"{ADAPTERS} {FAST} --train-iters 2")
    want = sampled(merged(tmp_path / "save", tmp_path / "merged"))
    check(sampled(tmp_path / "save"), want)


def test_averaged_weights_under_adapters_are_taken_again(
    sampled: Sampled, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, f"{FAST} --train-iters 4", save="base", start=1)
    words = f"--pretrained-checkpoint {tmp_path / 'base'} {ADAPTERS} {FAST}"
    run(tmp_path, f"{words} --pretrained-average --train-iters 2")
    want = sampled(merged(tmp_path / "save", tmp_path / "merged"))
    check(sampled(tmp_path / "save"), want)
    # A run that goes on must not take the others.
    flags = flags_of(tmp_path, f"{words} --load {tmp_path / 'save'} --train-iters {STEPS}")
    code, _ = train_on_ranks(flags, save=tmp_path / "again", task=VIDEO)
    assert code == EXIT_CODE_USER_ERROR
    assert "averaged); give these." in capfd.readouterr().err
