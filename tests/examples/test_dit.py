"""Latents of a few rendered clips, for runs that train on them."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.video_memory import KINDS, measure, row
from examples.custom_model.dit import TASK
from megatron_ext.errors import ConfigError
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.video.data.cli import main
from tests.training_runs import train_on_ranks, train_steps

CLIPS = Path(__file__).resolve().parents[2] / "examples" / "video" / "make_clips.py"


def make_latents(folder: Path) -> Path:
    """Write a folder as tools/preprocess_video.py does: 48 clips of 4 x 3 x 4 x 4 latents."""
    subprocess.run([sys.executable, CLIPS, folder, "--per-caption", "1"], check=True, timeout=60)
    output = folder / "latents"
    flags = "--codec-channels 4 --codec-scale 0.0625 --text-length 8 --text-width 32"
    words = ["--input", folder / "clips.jsonl", "--output", output, "--pooled-width", 16]
    words += ["--buckets", '{"32px": {"9": [1.0, 2]}}', *flags.split()]
    assert main([str(word) for word in words]) == 0
    return output


STEPS = 4
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-warmup-iters 0 --log-interval 1 "
    "--use-distributed-optimizer --num-workers 0"
).split()
NO_REFERENCES = "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latents(tmp_path_factory.mktemp("clips"))


def run(latents: Path, save: Path, more: str = "", ranks: int = 1, **options: Any) -> list[Any]:
    flags = [*FLAGS, "--video-data-path", str(latents), "--train-iters", str(STEPS), *more.split()]
    return train_steps(flags, save, ranks, **{"task": TASK, **options})


@pytest.fixture(scope="module")
def of_one_rank(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    rows = run(latents, tmp_path_factory.mktemp("one"))
    assert len(rows) == STEPS
    assert rows[-1]["loss"] < rows[0]["loss"]
    return rows


def check_close(rows: list[Any], wanted: list[Any], tolerance: float, name: str = "loss") -> None:
    assert [x[name] for x in rows] == pytest.approx([x[name] for x in wanted], rel=tolerance)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        (PP2, 2),
        pytest.param("", 2, marks=pytest.mark.slow),
        (PP2, 4),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2),
    ],
)
def test_losses_are_those_of_one_rank(
    more: str, ranks: int, latents: Path, of_one_rank: list[Any], tmp_path: Path
) -> None:
    rows = run(latents, tmp_path, more, ranks)
    check_close(rows, of_one_rank, 1e-5)
    check_close(rows, of_one_rank, 1e-5, "grad_norm")


def test_a_stopped_run_goes_on(latents: Path, of_one_rank: list[Any], tmp_path: Path) -> None:
    half = STEPS // 2
    run(latents, tmp_path, f"{PP2} --save-interval {half} --exit-interval {half}", 2)
    rows = run(latents, tmp_path, f"--load {tmp_path}")
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    check_close(rows, of_one_rank, 1e-5)


def test_bf16_trains_every_weight(latents: Path, of_one_rank: list[Any], tmp_path: Path) -> None:
    class Watch(Callback):
        def on_train_start(self) -> None:
            self.named = dict(self.run.chunks[0].named_parameters())
            self.initial = {name: p.detach().clone() for name, p in self.named.items()}

        def on_train_end(self) -> None:
            still = [name for name, p in self.named.items() if p.equal(self.initial[name])]
            assert self.run.progress.iteration == STEPS and not still, still
            (tmp_path / "watched").touch()

    task = dataclasses.replace(TASK, callbacks=(Watch,))
    rows = run(latents, tmp_path, "--bf16", task=task)
    assert (tmp_path / "watched").exists()
    check_close(rows, of_one_rank, 2e-2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tensor-model-parallel-size 2", r"\(2\) must be 1 for this DiT"),
        ("--context-parallel-size 2", r"\(2\) must be 1 for this DiT"),
        ("--no-adaln-zero", "`--no-adaln-zero` is there for the models of pretrain_video.py"),
        ("--recompute-double-blocks 1", "`--recompute-double-blocks` is there for the models of"),
        ("--double-block-cost 2 --mlp-ratio 2", "`--mlp-ratio` is .*\n`--double-block-cost` is"),
        ("--bf16 --fp8-format hybrid", "`--fp8-format` is there for the models of pretrain_video"),
        (f"--video-model video-dit {NO_REFERENCES}", "`--video-model` is there for the models of"),
    ],
)
def test_refused_before_ranks(words: str, sentence: str, latents: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--video-data-path", str(latents), "--train-iters", "1", *words.split()]
    with pytest.raises(ConfigError, match=sentence):
        train_on_ranks(flags, ranks=2, save=tmp_path, task=TASK)


PADDING = 2e-3
"""Share of padding at the tiny size, whose parameters are small beside 64 elements."""


def test_bytes_of_a_rank_follow_the_formula(tmp_path: Path) -> None:
    latents = make_latents(tmp_path)
    one, two = (measure("tiny", "bf16", replicas, latents) for replicas in (1, 2))
    count = one["count"]
    expected = {1: (2, 4, 12, 4), 2: (2, 4, 6, 2)}
    for replicas, found in ((1, one), (2, two)):
        for kind, per_parameter in zip(KINDS, expected[replicas], strict=True):
            assert per_parameter * count <= found[kind]
            assert found[kind] == pytest.approx(per_parameter * count, rel=PADDING)
        # Nothing else of the size of a model is alive.
        assert found["others"] < 0.2 * count
    full = measure("tiny", "fp32", 1, latents)
    assert [round(full[kind] / count) for kind in KINDS] == [4, 4, 8, 4]
    assert "| +0.0" in row("fp32", 1, full)
