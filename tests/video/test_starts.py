"""Runs that start from other weights: with references, of video DiTs, streaming, and on UMT5."""

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

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.train.main import preflight
from megatron_ext.train.run import Run
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.samples import velocity_of
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import FLOW, VIDEO
from tests.checkpoint.tiny import whole_tensors
from tests.examples.test_dit import make_latents
from tests.training_runs import train_on_ranks
from tests.video import clips
from tests.video.clips import POOLED, SHORT, TEXT, WIDTH, write_clips
from tests.video.data.making import UMT5_WIDTH, write_umt5
from tests.video.networks.harness import Tensors, check_weights
from tests.video.streaming.runs import FLAGS as STREAMING_FLAGS
from tests.video.streaming.runs import run as stream
from tests.video.streaming.runs import runner_of
from tests.video.wan_run import KINDS, train

FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 0 --log-interval 1 "
    "--use-distributed-optimizer --num-workers 0"
).split()
T2V = "--t2v-weight 1 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"
I2V = "--t2v-weight 1 --i2v-head-weight 5 --i2v-tail-weight 1 --i2v-loop-weight 1"


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latents(tmp_path_factory.mktemp("clips"))


def train_on_latents(latents: Path, save: Path, more: str, ranks: int = 1, **options: Any) -> int:
    flags = [*FLAGS, "--video-data-path", str(latents), *more.split()]
    options = {"task": FLOW, **options}
    return train_on_ranks(flags, ranks=ranks, save=save, **options)[0]


@pytest.fixture(scope="module")
def of_text(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps of text-to-video, after which no output is zero."""
    folder = tmp_path_factory.mktemp("t2v")
    assert train_on_latents(latents, folder, f"{T2V} --train-iters 2") == 0
    return folder


def predicted(run: Run) -> Tensor:
    made = torch.Generator().manual_seed(1)
    sizes = ((2, 12, 16), (2, 8, 32), (2, 16), (2, 4, 3, 4, 4))
    x, text, pooled, latents = (torch.randn(size, generator=made) for size in sizes)
    given = References(latents, torch.tensor([[True, False, False], [True, False, True]]))
    return velocity_of(run).of_shape((3, 4, 4))(x, torch.tensor([0.2, 0.7]), text, pooled, given)


def test_a_checkpoint_without_references_gives_the_same_output_with_any(
    latents: Path, of_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(name: str) -> Any:
        return lambda run: torch.save(predicted(run), tmp_path / name)

    again = f"--pretrained-checkpoint {of_text} --train-iters 1"
    assert train_on_latents(latents, tmp_path / "t", f"{T2V} {again}", prepare=write("t2v")) == 0
    assert train_on_latents(latents, tmp_path / "i", f"{I2V} {again}", prepare=write("i2v")) == 0
    before, after = (torch.load(tmp_path / name) for name in ("t2v", "i2v"))
    assert before.abs().max() > 0
    assert torch.equal(before, after)
    shown = capfd.readouterr().out
    assert "holds no `embedding.cond_in.weight`, so it starts at zero." in shown


def test_the_new_branch_is_trained_and_resumed_but_never_added_to_a_run_that_goes_on(
    latents: Path, of_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = f"{I2V} --pretrained-checkpoint {of_text} --resume-mode auto --train-iters 3"
    pp2 = "--pipeline-model-parallel-size 2 --exit-interval 2"
    assert train_on_latents(latents, tmp_path, f"{flags} {pp2}", 2) == 0

    def check(run: Run) -> None:
        named = dict(run.chunks[0].named_parameters())
        assert run.progress.iteration == 2
        assert named["module.embedding.cond_in.weight"].abs().min() > 0

    assert train_on_latents(latents, tmp_path, flags, prepare=check) == 0
    resumed = f"{I2V} --load {of_text} --train-iters 3 --override-opt-param-scheduler"
    assert train_on_latents(latents, tmp_path, resumed) == 2
    shown = capfd.readouterr().err
    assert "holds no `embedding.cond_in.weight`, which the model needs; give `--finetune`" in shown


def test_adapters_do_not_leave_a_new_branch_at_zero(
    latents: Path, of_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let adapters start from weights for text alone, with two stages, of which one lacks it."""
    words = f"--pretrained-checkpoint {of_text} --lora-rank 2 --train-iters 1"
    pp2 = "--pipeline-model-parallel-size 2"
    assert train_on_latents(latents, tmp_path / "i", f"{I2V} {words} {pp2}", 2) == 2
    said = "holds no `embedding.cond_in.weight`, and a run with `--lora-rank` trains adapters alone"
    assert said in capfd.readouterr().err
    assert train_on_latents(latents, tmp_path / "t", f"{T2V} {words} {pp2}", 2) == 0


ENCODER = {"text_encoder": "hashed", "length": TEXT, "width": WIDTH, "pooled_width": POOLED}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clips whose manifest names an encoder that samples can use."""
    folder = tmp_path_factory.mktemp("dit") / "clips"
    return write_clips(folder, {SHORT: 9}, text_encoder=ENCODER, fps=8)


@pytest.fixture(scope="module")
def trained(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    for kind in ("video-dit", "independent"):
        train(encoded, folder / kind, f"{KINDS[kind]} --train-iters 2 --ema-decay 0.7")
    return {kind: folder / kind for kind in ("video-dit", "independent")}


def compare(run: Run, twin: Tensors, causal: Tensors, prefix: str) -> None:
    runner = runner_of(run)
    twins = [(network, twin) for network in (runner.teacher, runner.critic.network)]
    for network, want in (*twins, (runner.generator.network, causal)):
        stored = {k.removeprefix(prefix): x for k, x in want.items() if k.startswith(prefix)}
        check_weights(unwrap_model([network]), stored)


@pytest.mark.parametrize("prefix", ["", "ema."])
def test_streaming_starts_from_flows(trained: dict[str, Path], prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    twin, causal = (whole_tensors(x / "iter_0000002", path) for x in trained.values())
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


def test_dropped_averages(encoded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    train(encoded, bare, f"{KINDS['video-dit']} --ema-decay 0")
    words = f"{KINDS['video-dit']} --ema-decay 0 --pretrained-checkpoint {bare}"
    train(encoded, tmp_path / "next", f"{words} --pretrained-average")
    said = f"{bare / 'iter_0000001'} holds no averaged weights, so its weights are taken."
    assert said in capfd.readouterr().out


@pytest.mark.slow
def test_clips_are_sampled_from_the_checkpoint(trained: dict[str, Path], tmp_path: Path) -> None:
    """Take model, window and data from the checkpoint; the layout is another."""
    words = "--nproc-per-node 2 --context-parallel-size 2 --sample-steps 2 --sample-texts one two"
    folders = ["--load", trained["independent"], "--sample-dir", tmp_path / "clips"]
    tool = Path(__file__).resolve().parents[2] / "tools" / "sample_video.py"
    command = [sys.executable, tool, *words.split(), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = map(json.loads, (tmp_path / "clips" / "samples.jsonl").read_text().splitlines())
    found = [(row["text"], row["averaged_weights"]) for row in rows]
    assert found == [("one", True), ("two", True)]
    said = (
        "> 1.8% of the averaged weights is still the weights that they started from, 2 update(s) "
    )
    assert said in done.stdout
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == 2


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umt5(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, umt5: Path) -> Path:
    encoder = build_text_encoder(TextEncoderConfig("umt5", str(umt5), text_length=TEXT))
    folder = tmp_path_factory.mktemp("umt5") / "clips"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "POOLED", 0)
        patch.setattr(clips, "WIDTH", UMT5_WIDTH)
        return write_clips(folder, {SHORT: 9}, text_encoder=encoder.identity, fps=8)


def test_a_video_dit_trains_and_samples_on_umt5(
    data: Path, umt5: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"{KINDS['video-dit']} --sample-interval 1 --sample-texts left --sample-steps 2 "
        f"--sample-dir {tmp_path / 'samples'} --text-encoder umt5 --t5-path {umt5} "
        f"--text-length {TEXT}"
    )
    rows = train(data, tmp_path / "save", words)
    assert rows[-1]["iteration"] == 1
    assert list((tmp_path / "samples").rglob("*.mp4"))
    assert (
        "> 10.0% of the averaged weights is still the weights that they started from, 1 update(s) "
        "before; `--no-sample-ema` samples with the last weights\n"
    ) in capfd.readouterr().out
    (written,) = (tmp_path / "samples").rglob("samples.jsonl")
    assert json.loads(written.read_text())["share_of_start"] == 0.1


def test_streaming_is_given_embeddings_of_umt5(umt5: Path, tmp_path: Path) -> None:
    words = " ".join(STREAMING_FLAGS).replace("--text-width 32", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.video.streaming.runs.FLAGS", words.split())

        def check(run: Run) -> None:
            encoder = build_text_encoder(TextEncoderConfig("umt5", str(umt5), text_length=8))
            assert run.config.section(StreamingConfig).text_features == UMT5_WIDTH
            negative = runner_of(run).scores.negative_text
            torch.testing.assert_close(negative, encoder.encode(["circle"])[0])

        flags = f"--train-iters 1 --text-encoder umt5 --t5-path {umt5} --negative-prompt circle"
        (row,) = stream(tmp_path, flags, prepare=check)
    assert row["iteration"] == 1


def test_the_mmdit_refuses_data_that_it_cannot_take(data: Path, umt5: Path) -> None:
    def configured(*words: str) -> Any:
        flags = [*clips.FLAGS, "--video-data-path", str(data), *words]
        return parse_args(flags, VIDEO, world_size=1, device="cpu").config

    with pytest.raises(ConfigError, match=r"\(\S+/clips\) holds captions without pooled vectors,"):
        preflight(configured(), FLOW.preflight)
    online = ["--online-encoding", "--video-buckets", '{"64px": {"9": [1, 1]}}']
    with pytest.raises(DataError, match=r"takes clips, but \S+/clips holds encoded ones; leave"):
        preflight(configured(*online), FLOW.preflight)
    refused = r"`--text-encoder` \(umt5\) gives no pooled vectors, which an MMDiT needs"
    with pytest.raises(ConfigError, match=refused):
        configured(*online, "--text-encoder", "umt5", "--t5-path", str(umt5))
