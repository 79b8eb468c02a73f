"""The branch of the references starts on weights of text-to-video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.task import FLOW
from tests.examples.latents import make_latents
from tests.training_runs import train_on_ranks

FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 0 --log-interval 1 "
    "--use-distributed-optimizer --num-workers 0"
).split()
T2V = "--t2v-weight 1 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"
I2V = "--t2v-weight 1 --i2v-head-weight 5 --i2v-tail-weight 1 --i2v-loop-weight 1"


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latents(tmp_path_factory.mktemp("clips"))


def run(latents: Path, save: Path, more: str, ranks: int = 1, **options: Any) -> int:
    flags = [*FLAGS, "--video-data-path", str(latents), *more.split()]
    options = {"task": FLOW, **options}
    return train_on_ranks(flags, ranks=ranks, save=save, **options)[0]


@pytest.fixture(scope="module")
def trained(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps of text-to-video, after which no output is zero."""
    folder = tmp_path_factory.mktemp("t2v")
    assert run(latents, folder, f"{T2V} --train-iters 2") == 0
    return folder


def velocity_of(run: Run) -> Tensor:
    """Return what a run's model predicts for made-up inputs, conditions included."""
    made = torch.Generator().manual_seed(1)
    sizes = run.config.section(MMDiTConfig).sizes(run.config.model)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    given: dict[str, Any] = {
        "img": draw(2, 12, sizes.token_width),
        "txt": draw(2, 8, sizes.text_width),
        "y_vec": draw(2, sizes.pooled_width),
        "timesteps": torch.tensor([0.2, 0.7]),
        "img_ids": torch.cartesian_prod(*map(torch.arange, (3, 2, 2))).expand(2, -1, -1),
        "txt_ids": torch.zeros(2, 8, 3, dtype=torch.int64),
    }
    if sizes.cond_embed:
        given["cond"] = draw(2, 12, sizes.cond_width)
    with torch.no_grad():
        return run.chunks[0](**given)  # type: ignore[no-any-return]


def test_a_checkpoint_without_references_gives_the_same_output_with_any(
    latents: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(name: str) -> Any:
        return lambda run: torch.save(velocity_of(run), tmp_path / name)

    again = f"--pretrained-checkpoint {trained} --train-iters 1"
    assert run(latents, tmp_path / "t", f"{T2V} {again}", prepare=write("t2v")) == 0
    assert run(latents, tmp_path / "i", f"{I2V} {again}", prepare=write("i2v")) == 0
    before, after = (torch.load(tmp_path / name) for name in ("t2v", "i2v"))
    assert before.abs().max() > 0
    assert torch.equal(before, after)
    shown = capfd.readouterr().out
    assert "holds no `embedding.cond_in.weight`, so it starts at zero." in shown


def test_the_new_branch_is_trained_and_resumed_in_another_layout(
    latents: Path, trained: Path, tmp_path: Path
) -> None:
    flags = f"{I2V} --pretrained-checkpoint {trained} --resume-mode auto --train-iters 3"
    pp2 = "--pipeline-model-parallel-size 2 --exit-interval 2"
    assert run(latents, tmp_path, f"{flags} {pp2}", 2) == 0

    def check(run: Run) -> None:
        named = dict(run.chunks[0].named_parameters())
        assert run.progress.iteration == 2
        assert named["module.embedding.cond_in.weight"].abs().min() > 0

    assert run(latents, tmp_path, flags, prepare=check) == 0


def test_a_run_that_goes_on_cannot_change_its_model(
    latents: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(latents, tmp_path, f"{I2V} --load {trained} --train-iters 3") == 2
    shown = capfd.readouterr().err
    assert "holds no `embedding.cond_in.weight`, which the model needs; give `--finetune`" in shown
