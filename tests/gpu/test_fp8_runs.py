"""Runs in 8 bits on a GPU end where bf16 does, by every recipe of the torch layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.device.rates import has_fp8
from megatron_ext.models.fp8.scaling import RECIPES
from tests.gpu.runs import losses, train
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

STEPS = 200
SIZE = f"--num-layers 2 --ffn-hidden-size 192 --global-batch-size 2 --train-iters {STEPS}"
FLAGS = [*TINY, *mock_data(), *SIZE.split(), "--lr-decay-iters", str(STEPS), "--bf16"]
MORE = {"delayed": "--fp8-amax-history-len 16 --fp8-amax-compute-algo max"}


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without 8 bits."""
    if not has_fp8(torch.device("cuda", 0)):
        pytest.skip(f"{torch.cuda.get_device_name()} does not multiply 8-bit floats")
    return losses(
        train([*FLAGS, "--transformer-impl", "torch"], tmp_path_factory.mktemp("bf16"), on="cuda")
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_g2_200_steps_end_within_1_percent_of_bf16(
    recipe: str, in_bf16: list[float], tmp_path: Path
) -> None:
    """Means of the last ten steps, of a model that has learnt."""
    fp8 = f"--transformer-impl torch --fp8-format hybrid --fp8-recipe {recipe}"
    words = [*FLAGS, *fp8.split(), *MORE.get(recipe, "").split()]
    found = losses(train(words, tmp_path, on="cuda"))
    assert found != in_bf16
    assert _end(in_bf16) < 0.9 * in_bf16[0]
    assert _end(found) == pytest.approx(_end(in_bf16), rel=0.01)


def _end(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10
