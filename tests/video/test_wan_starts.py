"""Starting from flow matching with video DiTs: streaming runs, and sampled clips."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from megatron_ext.video.streaming.step import StreamingRunner
from tests.checkpoint.tiny import whole_tensors
from tests.video.clips import POOLED, SHORT, TEXT, WIDTH, write_clips
from tests.video.streaming.runs import run as stream
from tests.video.wan_run import KINDS, train

ROOT = Path(__file__).resolve().parents[2]
ENCODER = {"text_encoder": "hashed", "length": TEXT, "width": WIDTH, "pooled_width": POOLED}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dit") / "clips"
    return write_clips(folder, {SHORT: 9}, text_encoder=ENCODER, fps=8)


@pytest.fixture(scope="module")
def trained(short: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two steps, whose averages lag behind the weights."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in ("video-dit", "independent"):
        train(short, folder / kind, f"{KINDS[kind]} --train-iters 2 --ema-decay 0.7")
    return {kind: folder / kind for kind in ("video-dit", "independent")}


def weights_of(network: Any) -> dict[str, Tensor]:
    (bare,) = unwrap_model([network])
    return {shard.name: shard.tensor for shard in shards_of(bare)}


def compare(run: Run, twin: dict[str, Tensor], causal: dict[str, Tensor], prefix: str) -> None:
    """Each network has the weights of its checkpoint, bit for bit."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    for network, want in (
        (runner.teacher, twin),
        (runner.critic.network, twin),
        (runner.generator.network, causal),
    ):
        found = weights_of(network)
        assert len(found) > 30
        for name, tensor in found.items():
            assert torch.equal(tensor, want[prefix + name]), name


@pytest.mark.parametrize("prefix", ["", "ema."])
def test_a_streaming_run_starts_from_flow_matching(
    trained: dict[str, Path], prefix: str, tmp_path: Path
) -> None:
    """Also from the averaged weights; the teacher keeps them through the steps."""
    twin, causal = (
        whole_tensors(folder / "iter_0000002", tmp_path / f"{kind}.pt")
        for kind, folder in trained.items()
    )
    assert any(not torch.equal(twin[f"ema.{k}"], v) for k, v in twin.items() if f"ema.{k}" in twin)
    words = (
        f"--train-iters 1 --text-width {WIDTH} --teacher-checkpoint {trained['video-dit']} "
        f"--critic-checkpoint {trained['video-dit']} "
        f"--pretrained-checkpoint {trained['independent']}"
    )
    words += " --pretrained-average" * bool(prefix)
    check = partial(compare, twin=twin, causal=causal, prefix=prefix)
    (row,) = stream(tmp_path, words, prepare=check)
    assert row["iteration"] == 1


def compare_with_run(run: Run, saved: dict[str, Tensor]) -> None:
    """Generator and critic have the weights of those of the run before, and not each other's."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    generator, critic = (weights_of(x.network) for x in (runner.generator, runner.critic))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in generator.items())
    assert all(torch.equal(tensor, saved[f"critic.{name}"]) for name, tensor in critic.items())
    assert any(not torch.equal(tensor, generator[name]) for name, tensor in critic.items())


def test_the_critic_of_a_streaming_run_is_started_from_that_of_another(tmp_path: Path) -> None:
    """The first checkpoint holds the generator under the names of a run's model."""
    stream(tmp_path, "--train-iters 2", save="first")
    saved = whole_tensors(tmp_path / "first" / "iter_0000002", tmp_path / "whole.pt")
    words = f"--pretrained-checkpoint {tmp_path}/first --critic-checkpoint {tmp_path}/first"
    check = partial(compare_with_run, saved=saved)
    stream(tmp_path, f"--train-iters 1 {words}", save="second", prepare=check)


def test_averages_that_are_not_kept_are_noted(
    short: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    train(short, bare, f"{KINDS['video-dit']} --ema-decay 0")
    words = f"{KINDS['video-dit']} --ema-decay 0 --pretrained-checkpoint {bare}"
    train(short, tmp_path / "next", f"{words} --pretrained-average")
    folder = bare / "iter_0000001"
    assert (
        f"{folder} holds no averaged weights, so its weights are taken." in capfd.readouterr().out
    )


@pytest.mark.slow
def test_clips_are_sampled_from_the_checkpoint(trained: dict[str, Path], tmp_path: Path) -> None:
    """The checkpoint names the model, the window and the data; the layout is another."""
    words = "--nproc-per-node 2 --context-parallel-size 2 --sample-steps 2 --sample-texts one two"
    folders = ["--load", trained["independent"], "--sample-dir", tmp_path / "clips"]
    command = [sys.executable, ROOT / "tools" / "sample_video.py", *words.split(), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = map(json.loads, (tmp_path / "clips" / "samples.jsonl").read_text().splitlines())
    assert [(row["text"], row["averaged_weights"]) for row in rows] == [
        ("one", True),
        ("two", True),
    ]
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == 2
