"""Weights at the start, in a checkpoint of another layout, and with adapters."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_ext.config.lora import LoraConfig
from megatron_ext.layers.lora import attach_adapters, merge_adapters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.model import VideoDiT
from tests.ranks import ranks, run_on_ranks
from tests.video.model.wan.problem import (
    CAUSAL,
    Problem,
    build,
    frames_of,
    gathered_weights,
    largest,
    new_cache,
    one,
    stream,
)
from tests.video.model.wan.test_parity import layout_of


@ranks()
def test_initial_weights_are_drawn_as_in_wan(context: ParallelContext) -> None:
    """Each projection of a fused weight by its own widths, 64 and 64, or 64 and 128."""
    weights = gathered_weights([one(Problem(), context)])
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


def save(context: ParallelContext, path: Path) -> None:
    (chunk,) = build(Problem(), context)[1]
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(3)
    dist_checkpointing.save(chunk.sharded_state_dict(), str(path))


def load(context: ParallelContext, path: Path, truth: dict[str, torch.Tensor]) -> None:
    (chunk,) = build(Problem(), context)[1]
    chunk.load_state_dict(dist_checkpointing.load(chunk.sharded_state_dict(), str(path)))
    mine = gathered_weights([chunk])
    assert mine.keys() == truth.keys()
    for name, weight in truth.items():
        assert torch.equal(mine[name], 3 * weight), name


def write(context: ParallelContext, path: Path) -> None:
    torch.save(gathered_weights(build(Problem(), context)[1]), path)


def test_a_checkpoint_is_loaded_on_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_on_ranks(write, layout_of({}), {"path": tmp_path / "weights"})
    run_on_ranks(save, layout_of({"tp": 2}), {"path": folder})
    truth = torch.load(tmp_path / "weights")
    run_on_ranks(load, layout_of({"pp": 2}), {"path": folder, "truth": truth})


LORA = LoraConfig(
    lora_rank=4,
    lora_target_modules="linear_qkv linear_proj linear_q linear_kv linear_fc1 linear_fc2".split(),
)


def adapted(problem: Problem, context: ParallelContext) -> VideoDiT:
    chunk = one(problem, context)
    attach_adapters([chunk], LORA, seed=3)
    return chunk


@ranks(tp=2, cp=2)
def test_criterion_22_adapters_on_every_linear_layer_of_a_block(context: ParallelContext) -> None:
    """No effect at the start; a gradient in all of them, though blocks are recomputed; merged."""
    options = dataclasses.replace(CAUSAL, recompute_blocks=9)
    problem = Problem(options=options, sequence_parallel=True)
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
