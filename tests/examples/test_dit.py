"""The DiT of examples/custom_model: the same run in any layout, and nothing in it is idle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from examples.custom_model.dit import TASK
from megatron_ext.errors import ConfigError
from megatron_ext.train.callbacks.callback import Callback
from tests.examples.latents import make_latents
from tests.training_runs import train_on_ranks, training_rows

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
    options = {"task": TASK, **options}
    code, rows = train_on_ranks(flags, ranks=ranks, save=save, **options)
    assert code == 0
    return training_rows(rows)


@pytest.fixture(scope="module")
def of_one_rank(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    rows = run(latents, tmp_path_factory.mktemp("one"))
    assert len(rows) == STEPS
    assert rows[-1]["loss"] < rows[0]["loss"]
    return rows


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        (PP2, 2),
        pytest.param("", 2, marks=pytest.mark.slow),
        (PP2, 4),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2),
    ],
    ids=["PP2", "DP2", "PP2xDP2", "PP2xVPP2"],
)
def test_losses_are_those_of_one_rank(
    more: str, ranks: int, latents: Path, of_one_rank: list[Any], tmp_path: Path
) -> None:
    rows = run(latents, tmp_path, more, ranks)
    for name in ("loss", "grad_norm"):
        expected = [row[name] for row in of_one_rank]
        assert [row[name] for row in rows] == pytest.approx(expected, rel=1e-5)


def test_a_stopped_run_goes_on(latents: Path, of_one_rank: list[Any], tmp_path: Path) -> None:
    """Saved on two stages, read on one."""
    half = STEPS // 2
    run(latents, tmp_path, f"{PP2} --save-interval {half} --exit-interval {half}", 2)
    rows = run(latents, tmp_path, f"--load {tmp_path}")
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx(
        [row["loss"] for row in of_one_rank], rel=1e-5
    )


def test_every_weight_is_trained_in_bf16(
    latents: Path, of_one_rank: list[Any], tmp_path: Path
) -> None:
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
    assert [row["loss"] for row in rows] == pytest.approx(
        [row["loss"] for row in of_one_rank], rel=2e-2
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tensor-model-parallel-size 2", r"\(2\) must be 1 for this DiT"),
        ("--context-parallel-size 2", r"\(2\) must be 1 for this DiT"),
        ("--no-adaln-zero", "`--no-adaln-zero` is there for the models of pretrain_video.py"),
        ("--recompute-double-blocks 1", "`--recompute-double-blocks` is there for the models of"),
        ("--double-block-cost 2 --mlp-ratio 2", "`--mlp-ratio` is .*\n`--double-block-cost` is"),
        ("--bf16 --fp8-format hybrid", "`--fp8-format` is there for the models of pretrain_video"),
        (
            f"--video-model video-dit {NO_REFERENCES}",
            "`--video-model` is there for the models of pretrain_video.py",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_ranks_start(
    words: str, sentence: str, latents: Path, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--video-data-path", str(latents), "--train-iters", "1", *words.split()]
    with pytest.raises(ConfigError, match=sentence):
        train_on_ranks(flags, ranks=2, save=tmp_path, task=TASK)
