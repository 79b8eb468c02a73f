"""Weights that depend on no layout, at the start and in a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.ranks import run_on_ranks
from tests.video.model.mmdit.problem import Problem, build, gathered_weights
from tests.video.model.mmdit.test_parity import layout_of

FIRST = {"tp": 2, "pp": 2}
LAYOUTS = [{}, FIRST, {"tp": 4}, {"pp": 4}, {"cp": 2}, {"tp": 2, "pp": 2, "vpp": 2}]


def write(context: ParallelContext, path: Path, options: MMDiTOptions) -> None:
    weights = gathered_weights(build(Problem(options=options), context)[1])
    if context.rank == 0:
        torch.save(weights, path)


def weights_on(
    sizes: dict[str, int], folder: Path, options: MMDiTOptions | None = None
) -> dict[str, torch.Tensor]:
    path = folder / "weights"
    arguments = {"path": path, "options": options or MMDiTOptions()}
    run_on_ranks(write, layout_of(sizes), arguments)
    return torch.load(path)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_on({}, tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("sizes", LAYOUTS[1:], ids=str)
def test_initial_weights_are_those_of_one_rank(
    sizes: dict[str, int], single: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    mine = weights_on(sizes, tmp_path)
    assert mine.keys() == single.keys()
    for name, weight in single.items():
        assert torch.equal(mine[name], weight), name


def test_initial_weights_are_drawn_as_torch_draws_them(single: dict[str, torch.Tensor]) -> None:
    """Uniform within 1 / sqrt(fan_in), weights and biases; both pieces of W2 have one fan-in."""
    fan_ins = {
        "double_blocks.0.img.linear_qkv.weight": 64,
        "double_blocks.1.txt.linear_fc2.bias": 256,
        "single_blocks.0.linear_proj.weight": 320,
        "single_blocks.1.linear_fc2.weight": 320,
        "single_blocks.1.modulation.weight": 64,
        "embedding.txt_in.weight": 32,
    }
    for name, fan_in in fan_ins.items():
        bound = 1 / math.sqrt(fan_in)
        largest = float(single[name].abs().max())
        assert 0.9 * bound < largest <= bound, name
    assert not torch.equal(
        single["double_blocks.0.img.linear_qkv.weight"],
        single["double_blocks.0.txt.linear_qkv.weight"],
    )
    assert torch.equal(single["single_blocks.0.norm.k_layernorm.weight"], torch.ones(16))
    assert not single["embedding.cond_in.weight"].any()


def test_adaln_zero_starts_modulations_and_the_last_layer_at_zero(tmp_path: Path) -> None:
    weights = weights_on({"tp": 2}, tmp_path, MMDiTOptions(adaln_zero=True))
    zero = {name for name, weight in weights.items() if not weight.any()}
    wanted = {name for name in weights if "modulation" in name or "final_layer.linear" in name}
    assert zero == wanted | {"embedding.cond_in.weight", "embedding.cond_in.bias"}


def save(context: ParallelContext, path: Path) -> None:
    _, (chunk,) = build(Problem(), context)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(3)
    dist_checkpointing.save(chunk.sharded_state_dict(), str(path))


def load(context: ParallelContext, path: Path, truth: dict[str, torch.Tensor]) -> None:
    _, chunks = build(Problem(), context)
    for chunk in chunks:
        loaded = dist_checkpointing.load(chunk.sharded_state_dict(), str(path))
        chunk.load_state_dict(loaded)
    mine = gathered_weights(chunks)
    assert mine.keys() == truth.keys()
    for name, weight in truth.items():
        assert torch.equal(mine[name], 3 * weight), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    run_on_ranks(save, layout_of(FIRST), {"path": path})
    return path


@pytest.mark.parametrize("sizes", [{}, {"tp": 4}, {"pp": 4}], ids=str)
def test_a_checkpoint_is_loaded_on_another_layout(
    sizes: dict[str, int], checkpoint: Path, single: dict[str, torch.Tensor]
) -> None:
    run_on_ranks(load, layout_of(sizes), {"path": checkpoint, "truth": single})
