"""Weights at the start, which depend on no layout, in checkpoints, and with adapters."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.layers.lora import attach_adapters, merge_adapters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.joint_blocks import JointOptions
from tests.ranks import ranks, run_on_ranks
from tests.video.networks.harness import (
    Problem,
    Tensors,
    build,
    gathered_weights,
    largest,
    layout_of,
    one,
    write_weights,
)
from tests.video.networks.mmdit.problem import Problem as MMDiTProblem
from tests.video.networks.wan.problem import CAUSAL, frames_of, new_cache, stream
from tests.video.networks.wan.problem import Problem as WanProblem

FIRST = {"tp": 2, "pp": 2}
MMDIT, WAN = MMDiTProblem(), WanProblem()


def weights_on(problem: Problem, sizes: dict[str, int], folder: Path) -> Tensors:
    path = folder / "weights"
    run_on_ranks(write_weights, layout_of(sizes), {"problem": problem, "path": path})
    return torch.load(path)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Tensors]:
    return {p: weights_on(p, {}, tmp_path_factory.mktemp("single")) for p in (MMDIT, WAN)}


LAYOUTS: list[tuple[Problem, dict[str, int]]] = [
    *((MMDIT, x) for x in (FIRST, {"tp": 4}, {"pp": 4}, {"cp": 2}, {**FIRST, "vpp": 2})),
    *((WAN, x) for x in (FIRST, {"tp": 4}, {"cp": 2})),
]


@pytest.mark.parametrize(("problem", "sizes"), LAYOUTS)
def test_initial_weights_are_those_of_one_rank(
    problem: Problem, sizes: dict[str, int], single: dict[Problem, Tensors], tmp_path: Path
) -> None:
    mine = weights_on(problem, sizes, tmp_path)
    assert mine.keys() == single[problem].keys()
    for name, weight in single[problem].items():
        assert torch.equal(mine[name], weight), name


def test_weights_are_drawn_as_torch_and_wan_draw_them(single: dict[Problem, Tensors]) -> None:
    """Draw within 1 / sqrt(fan_in), weights and biases; both pieces of W2 have one fan-in."""
    weights = single[MMDIT]
    fan_ins = {
        "double_blocks.0.img.linear_qkv.weight": 64, "double_blocks.1.txt.linear_fc2.bias": 256,
        "single_blocks.0.linear_proj.weight": 320, "single_blocks.1.linear_fc2.weight": 320,
        "single_blocks.1.modulation.weight": 64, "embedding.txt_in.weight": 32,
    }  # fmt: skip
    for name, fan_in in fan_ins.items():
        bound = 1 / math.sqrt(fan_in)
        assert 0.9 * bound < float(weights[name].abs().max()) <= bound, name
    img, txt = (weights[f"double_blocks.0.{s}.linear_qkv.weight"] for s in ("img", "txt"))
    assert not torch.equal(img, txt)
    assert torch.equal(weights["single_blocks.0.norm.k_layernorm.weight"], torch.ones(16))
    assert not weights["embedding.cond_in.weight"].any()
    weights = single[WAN]
    bounds = {
        "blocks.0.self_attention.linear_qkv.weight": math.sqrt(6 / 128),
        "blocks.1.cross_attention.linear_kv.weight": math.sqrt(6 / 128),
        "blocks.1.linear_fc2.weight": math.sqrt(6 / 192),
    }
    for name, bound in bounds.items():
        assert 0.95 * bound < float(weights[name].abs().max()) <= bound, name
    table = weights["blocks.0.modulation.weight"]
    assert table.shape == (6, 64)
    assert float(table.std()) == pytest.approx(1 / 8, rel=0.2)
    assert not torch.equal(table, weights["blocks.1.modulation.weight"])


def test_adaln_zero_starts_modulations_and_the_last_layer_at_zero(tmp_path: Path) -> None:
    problem = MMDiTProblem(options=JointOptions(adaln_zero=True))
    weights = weights_on(problem, {"tp": 2}, tmp_path)
    zero = {name for name, weight in weights.items() if not weight.any()}
    wanted = {name for name in weights if "modulation" in name or "final_layer.linear" in name}
    assert zero == wanted | {"embedding.cond_in.weight", "embedding.cond_in.bias"}


def save(context: ParallelContext, problem: Problem, path: Path) -> None:
    chunk = one(problem, context)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(3)
    dist_checkpointing.save(chunk.sharded_state_dict(), str(path))


def load(context: ParallelContext, problem: Problem, path: Path, truth: Tensors) -> None:
    _, chunks = build(problem, context)
    for chunk in chunks:
        chunk.load_state_dict(dist_checkpointing.load(chunk.sharded_state_dict(), str(path)))
    mine = gathered_weights(chunks)
    assert mine.keys() == truth.keys()
    for name, weight in truth.items():
        assert torch.equal(mine[name], 3 * weight), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Path]:
    paths: dict[Problem, Path] = {p: tmp_path_factory.mktemp("checkpoint") for p in (MMDIT, WAN)}
    for problem, path in paths.items():
        run_on_ranks(save, layout_of(FIRST), {"problem": problem, "path": path})
    return paths


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [(MMDIT, {}), (MMDIT, {"tp": 4}), (MMDIT, {"pp": 4}), (WAN, {"pp": 2}), (WAN, {"tp": 2})],
)
def test_a_checkpoint_is_loaded_on_another_layout(
    problem: Problem,
    sizes: dict[str, int],
    checkpoints: dict[Problem, Path],
    single: dict[Problem, Tensors],
) -> None:
    given = {"problem": problem, "path": checkpoints[problem], "truth": single[problem]}
    run_on_ranks(load, layout_of(sizes), given)


LORA = LoraConfig(
    lora_rank=4,
    lora_target_modules="linear_qkv linear_proj linear_q linear_kv linear_fc1 linear_fc2".split(),
)


def adapted(problem: Problem, context: ParallelContext) -> Any:
    chunk = one(problem, context)
    attach_adapters([chunk], LORA, seed=3)
    return chunk


@ranks(tp=2, cp=2)
def test_adapters_on_every_linear_layer_of_a_block_of_wan(context: ParallelContext) -> None:
    options = dataclasses.replace(CAUSAL, recompute_blocks=9)
    problem = WanProblem(options=options, sequence_parallel=True)
    inputs = problem.inputs()
    base, chunk = one(problem, context), adapted(problem, context)
    want = stream(base, new_cache(base, problem), inputs, 3)
    cache = new_cache(chunk, problem, chunk_frames=9)
    assert largest(stream(chunk, cache, inputs, 3), want) < 1e-6
    chunk(**frames_of(inputs, 6, 3), cache=cache, update_cache=False).square().sum().backward()
    trained = {name for name, p in chunk.named_parameters() if p.grad is not None}
    # Seven layers in each of two blocks; A has no gradient but zero while B is zero.
    assert len(trained) == 2 * 7 * 2 and all(".lora." in name for name in trained)
    for name, parameter in chunk.named_parameters():
        if name.endswith("lora.b"):
            assert parameter.grad is not None and parameter.grad.norm() > 0, name
            torch.nn.init.constant_(parameter, 0.01)
    with_adapters = stream(chunk, new_cache(chunk, problem), inputs, 3)
    assert merge_adapters([chunk]) == 14
    assert largest(with_adapters, want) > 1e-3
    assert largest(stream(chunk, new_cache(chunk, problem), inputs, 3), with_adapters) < 1e-5
