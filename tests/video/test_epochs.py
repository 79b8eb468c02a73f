"""Video runs whose length is given in epochs, and how far in the data a run says that it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.video.data.setup import prepare_video
from megatron_ext.video.task import VIDEO
from tests.video.clips import FLAGS, IMAGE, LONG, SHORT, steps, train, write_clips

PER_EPOCH = 6
"""Steps of four clips: 9, 9 and 8 clips fill 2 of each bucket."""
WORDS = "--global-batch-size 4 --lr-decay-style cosine"
WITHOUT_ITERS = [x for x in FLAGS if x not in ("--train-iters", "3")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three buckets."""
    return write_clips(tmp_path_factory.mktemp("epochs") / "clips", {IMAGE: 9, SHORT: 9, LONG: 8})


def _flags(words: str) -> str:
    return f"{WORDS} {words}"


def test_epochs_are_so_many_steps_on_any_number_of_replicas(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.video.clips.FLAGS", WITHOUT_ITERS)
    wanted = steps(data, tmp_path / "steps", _flags(f"--train-iters {2 * PER_EPOCH}"))
    for ranks in (1, 2):
        rows = steps(data, tmp_path / str(ranks), _flags("--train-epochs 2"), ranks=ranks)
        assert [row["train/epoch"] for row in rows] == [
            step / PER_EPOCH for step in range(1, 2 * PER_EPOCH + 1)
        ]
        for row, want in zip(rows, wanted, strict=True):
            assert row["learning_rate"] == want["learning_rate"]
            assert math.isclose(row["loss"], want["loss"], rel_tol=1e-6)


def test_a_run_of_epochs_goes_on_in_its_epoch_bit_for_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.video.clips.FLAGS", WITHOUT_ITERS)
    words = _flags("--train-epochs 2 --save-interval 8")
    whole = steps(data, tmp_path / "whole", words)
    again = f"{words} --load {tmp_path / 'whole'} --ckpt-step 8"
    rows = steps(data, tmp_path / "again", again)
    assert rows[0]["train/epoch"] == 9 / PER_EPOCH
    for row, want in zip(rows, whole[8:], strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "train/epoch", "consumed_samples"):
            assert row[key] == want[key], key


def test_the_epoch_is_in_the_line(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(data, tmp_path, _flags("--train-iters 3"))
    assert "| epoch: 0.500 |" in capfd.readouterr().out


def _parsed(words: str, device: str = "cpu"):  # type: ignore[no-untyped-def]
    flags = ["--micro-batch-size", "2", "--video-data-path", "x", *words.split()]
    return parse_args(flags, VIDEO, world_size=1, device=device)


def test_the_usual_warm_up_is_shortened_and_said_in_short_runs() -> None:
    short, long = _parsed("--train-iters 60"), _parsed("--train-iters 1001")
    assert short.config.optimizer.lr_warmup_iters == 6
    assert "The usual warm-up of 1000 steps is shortened to 6, a tenth of" in short.notes[-1]
    assert long.config.optimizer.lr_warmup_iters == 1000
    assert not [note for note in long.notes if "warm-up" in note]
    given = _parsed("--train-iters 60 --lr-warmup-iters 6")
    assert given.config.optimizer.lr_warmup_iters == 6 and given.notes == long.notes
    fraction = _parsed("--train-iters 60 --lr-warmup-fraction 0.1")
    assert fraction.config.optimizer.lr_warmup_iters == 0 and fraction.notes == long.notes
    with pytest.raises(ConfigError, match=r"`--lr-warmup-iters` \(1000\) must be less than the"):
        _parsed("--train-iters 60 --lr-warmup-iters 1000")


def test_the_usual_warm_up_is_shortened_where_epochs_are_short(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepared(words: str):  # type: ignore[no-untyped-def]
        path = f"--video-data-path {data} --global-batch-size 4"
        return prepare_video(_parsed(f"{path} {words}").config)[0]

    config = prepared("--train-epochs 5")
    assert (config.training.train_iters, config.optimizer.lr_warmup_iters) == (5 * PER_EPOCH, 3)
    assert "shortened to 3" in capfd.readouterr().out
    assert prepared("--train-epochs 200").optimizer.lr_warmup_iters == 1000
    assert "shortened" not in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"`--lr-warmup-iters` \(30\) must be less than .*\(30\)"):
        prepared("--train-epochs 5 --lr-warmup-iters 30")


def test_defaults_of_open_sora() -> None:
    """16-bit weights on a GPU unless told otherwise, a report every 10 steps, a save every 1000."""
    config = _parsed("--train-iters 2000 --save x").config
    assert (config.logging.log_interval, config.checkpoint.save_interval) == (10, 1000)
    assert _parsed("--train-iters 2000").config.checkpoint.save_interval is None
    assert not config.precision.bf16
    for words, bf16 in {"": True, "--no-bf16": False, "--fp16": False, "--bf16": True}.items():
        precision = _parsed(f"--train-iters 2000 {words}", "cuda").config.precision
        assert precision.bf16 is bf16, words
        assert precision.accumulate_allreduce_grads_in_fp32 is bf16
