"""Transformer Engine's layers: bf16 beside the torch layers, and each recipe beside bf16."""

import math
from pathlib import Path

import pytest
import torch

from megatron_ext.config.rules.te_version import found_version
from megatron_ext.device.gpus import FIRST
from megatron_ext.layers.transformer_engine import recipe_error
from tests.gpu.runs import losses, needs_gpus, train
from tests.training_runs import TINY, mock_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(found_version() is None, reason="Transformer Engine is not installed"),
]

SIZE = (
    "--bf16 --hidden-size 256 --ffn-hidden-size 512 --num-layers 3 --train-iters 12 "
    "--no-use-cpu-initialization"
)
FLAGS = [*TINY, *mock_data(), *SIZE.split()]
TE = "--transformer-impl transformer_engine"
GATHER = "--fp8-param-gather --use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
NEAR = 0.01


def run(words: str, save: Path, *, ranks: int = 1) -> list[float]:
    return losses(train([*FLAGS, *words.split()], save, on="cuda", ranks=ranks))


def needs_recipe(recipe: str) -> None:
    """Skip the test on a GPU, or with a build of torch, that lacks the recipe."""
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    error = recipe_error(recipe, torch.cuda.get_device_capability(), cuda)
    if error is not None:
        pytest.skip(error)


def format_of(recipe: str) -> str:
    return "e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(TE, tmp_path_factory.mktemp("bf16"))


def test_bf16_follows_the_torch_layers(bf16: list[float], tmp_path: Path) -> None:
    torch_layers = run("--transformer-impl torch", tmp_path)
    assert bf16 == pytest.approx(torch_layers, rel=5e-3)
    assert all(map(math.isfinite, bf16)) and bf16[-1] < bf16[0]


@pytest.mark.parametrize("recipe", FIRST)
def test_each_recipe_stays_beside_bf16(recipe: str, bf16: list[float], tmp_path: Path) -> None:
    needs_recipe(recipe)
    found = run(f"{TE} --fp8-format {format_of(recipe)} --fp8-recipe {recipe}", tmp_path)
    assert found == pytest.approx(bf16, rel=NEAR)
    assert found != bf16 and found[-1] < found[0]


@pytest.mark.parametrize("recipe", FIRST)
def test_weights_in_8_bits_stay_beside_bf16(recipe: str, bf16: list[float], tmp_path: Path) -> None:
    needs_recipe(recipe)
    through = "--reuse-grad-buf-for-mxfp8-param-ag" if recipe == "mxfp8" else ""
    words = f"--fp8-format {format_of(recipe)} --fp8-recipe {recipe} {GATHER} {through}"
    found = run(f"{TE} {words}", tmp_path)
    assert found == pytest.approx(bf16, rel=NEAR)


def test_first_and_last_layers_in_bf16(bf16: list[float], tmp_path: Path) -> None:
    needs_recipe("tensorwise")
    words = "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
    found = run(f"{TE} {words}", tmp_path)
    assert found == pytest.approx(bf16, rel=NEAR)


def test_experts_in_8_bits(tmp_path: Path) -> None:
    needs_recipe("tensorwise")
    experts = (
        "--num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--moe-ffn-hidden-size 256"
    )
    plain = run(f"{TE} {experts}", tmp_path / "bf16")
    found = run(f"{TE} {experts} --fp8-format hybrid --fp8-recipe tensorwise", tmp_path / "fp8")
    assert found == pytest.approx(plain, rel=2 * NEAR)


def test_a_run_in_8_bits_resumes(tmp_path: Path) -> None:
    """The checkpoint holds the magnitudes of the delayed recipe."""
    needs_recipe("delayed")
    words = f"{TE} --fp8-format hybrid --fp8-amax-history-len 8 --fp8-amax-compute-algo max"
    whole = run(words, tmp_path / "whole")
    save = tmp_path / "parts"
    run(f"{words} --save-interval 6 --exit-interval 6", save)
    resumed = run(f"{words} --load {save}", save)
    assert resumed == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("overlap", ["", "--tp-comm-overlap"])
def test_tensor_parallel_layers(overlap: str, bf16: list[float], tmp_path: Path) -> None:
    needs_gpus(2)
    assert run(f"{TE} {TP2} {overlap}", tmp_path, ranks=2) == pytest.approx(bf16, rel=5e-3)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "p2p all_gather a2a"])
def test_context_parallel_attention(kind: str, bf16: list[float], tmp_path: Path) -> None:
    needs_gpus(2)
    words = f"{TE} --context-parallel-size 2 --cp-comm-type {kind}"
    assert run(words, tmp_path, ranks=2) == pytest.approx(bf16, rel=5e-3)
