"""Adapters on an MMDiT's layers, which communicate in common, against plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.optimizer import TARGETS, LoraConfig
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.lora import attach_adapters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.joint_blocks import JointOptions
from tests.ranks import on_ranks, run_on_ranks
from tests.video.networks.harness import (
    SEED,
    Tensors,
    Truth,
    build,
    gathered_weights,
    layout_of,
    run_engine,
    truth,
)
from tests.video.networks.mmdit.problem import Problem

LORA = LoraConfig(lora_rank=4, lora_alpha=8.0, lora_target_modules=[*TARGETS, "modulation"])
RECOMPUTED = JointOptions(recompute_double_blocks=9, recompute_single_blocks=9)
SP: dict[str, Any] = {"sequence_parallel": True}
CASES: dict[str, tuple[dict[str, int], Problem]] = {
    "one, recomputed": ({}, Problem(options=RECOMPUTED)),
    "tp2": ({"tp": 2}, Problem()),
    "tp2sp cp2 pp2": ({"tp": 2, "cp": 2, "pp": 2}, Problem(**SP)),
    "tp2 dp2": ({"tp": 2, "dp": 2}, Problem()),
    "pp2 recomputed": ({"pp": 2}, Problem(options=RECOMPUTED)),
    "pp2 zb-h1": ({"pp": 2}, Problem(schedule="zb-h1")),
}


def adapted(problem: Problem, context: ParallelContext) -> tuple[Any, list[Any]]:
    """Build chunks whose layers have adapters, with matrices B that are not zero."""
    config, chunks = build(problem, context)
    attach_adapters(chunks, LORA, SEED)
    for chunk in chunks:
        for shard in shards_of(chunk):
            if shard.name.endswith("lora.b"):
                generator = torch.Generator().manual_seed(sum(shard.name.encode()))
                whole = 0.1 * torch.randn(shard.full_shape, generator=generator)
                shard.tensor.data.copy_(shard.cut(whole))
    return config, chunks


def write(context: ParallelContext, problem: Problem, path: Path) -> None:
    torch.save(gathered_weights(adapted(problem, context)[1]), path)


def gradients_of(weights: Tensors, found: Truth) -> Tensors:
    """Return the gradients of A and B by the chain rule, from those of the merged weights."""
    wanted: dict[str, Tensor] = {}
    for name, a in weights.items():
        if name.endswith(".lora.a"):
            layer = name.removesuffix(".lora.a")
            b = weights[f"{layer}.lora.b"].double()
            gradient = LORA.scale * found.gradients[f"{layer}.weight"]
            wanted[name] = b.T @ gradient
            wanted[f"{layer}.lora.b"] = gradient @ a.double().T
    return wanted


def check(context: ParallelContext, problem: Problem, loss: float, wanted: Tensors) -> None:
    config, chunks = adapted(problem, context)
    own = range(context.dp_rank, problem.num_microbatches, context.pgs.dp.size())
    given = [problem.microbatch(i) for i in own]
    assert abs(run_engine(problem, context, config, chunks, given) / loss - 1) <= 1e-6
    errors = {}
    for chunk in chunks:
        for shard in shards_of(chunk, lambda p: p.main_grad if p.requires_grad else None):
            want = shard.cut(wanted[shard.name])
            errors[shard.name] = float((shard.tensor - want).norm() / want.norm())
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.2e}"
    kinds = {name.rsplit(".", 3)[1] for name in errors}
    assert kinds == {*TARGETS, "modulation"}


@pytest.fixture(scope="module")
def truth_of_adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Tensors]:
    path = tmp_path_factory.mktemp("adapters") / "weights"
    on_ranks(write, {}, problem=Problem(), path=path)
    weights = torch.load(path)
    merged = {name: x for name, x in weights.items() if ".lora." not in name}
    for name, a in weights.items():
        if name.endswith(".lora.a"):
            layer = name.removesuffix(".lora.a")
            product = weights[f"{layer}.lora.b"].double() @ a.double()
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"].double() + LORA.scale * product
    found = truth(Problem(), merged)
    return found.loss, gradients_of(weights, found)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("tp2", "pp2 recomputed") else [])
        for name in CASES
    ],
)
def test_adapters_train_as_in_plain_torch(
    truth_of_adapters: tuple[float, Tensors], name: str
) -> None:
    sizes, problem = CASES[name]
    loss, wanted = truth_of_adapters
    given = {"problem": problem, "loss": loss, "wanted": wanted}
    run_on_ranks(check, layout_of(sizes, problem.schedule), given)
