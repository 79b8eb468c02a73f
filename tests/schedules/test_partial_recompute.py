"""Micro-batches of which few layers are recomputed, beside others that recompute all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.step_time import Clock, estimate
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.partial_recompute import recomputing_all
from megatron_ext.schedules.plan import recomputed_whole
from tests.text.cost.layouts import llama_network
from tests.training_runs import SAME_WEIGHTS, curve, mock_data

PARTLY = "--num-microbatches-with-partial-activation-checkpoints"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"


def test_the_first_micro_batches_of_each_window_recompute_few_layers() -> None:
    """A window is as long as the most micro-batches that a rank has in flight."""
    plan = build_plan("1f1b", pipeline_size=4, num_microbatches=9)
    whole = [sorted(i for i, _ in recomputed_whole(rank, 1)) for rank in plan.ranks]
    assert whole == [[1, 2, 3, 5, 6, 7], [1, 2, 4, 5, 7, 8], [1, 3, 5, 7], []]
    assert recomputed_whole(plan.ranks[0], 4) == frozenset()
    assert len(recomputed_whole(plan.ranks[3], 0)) == 9


def test_plans_lie_between_those_with_few_and_with_all_layers() -> None:
    words = f"--pipeline-model-parallel-size 4 --global-batch-size 64 {BLOCK} 1"
    gpu = gpu_named("H100")
    costs = [
        estimate(llama_network(f"{words} {more}"), gpu)
        for more in ("", f"{PARTLY} 3", f"{PARTLY} 1", f"{PARTLY} 0")
    ]
    full = estimate(llama_network(f"{words[:-1]} 8"), gpu)
    first = [Clock(cost.network, cost.rates).rank_durations()[0].passes for cost in (*costs, full)]
    again = first[3] - first[0]
    assert first[4] == pytest.approx(first[3])
    assert first[1:3] == pytest.approx([first[0] + again / 4, first[0] + again * 3 / 4], rel=0.02)
    # Of the four micro-batches that the first rank holds, three or one keep their activations.
    held = [cost.ranks[0].activations for cost in costs]
    kept = held[0] - held[3]
    assert held[3] == full.ranks[0].activations
    assert [x - held[3] for x in held[1:3]] == pytest.approx([kept * 3 / 4, kept / 4], rel=0.05)


def test_a_chunk_recomputes_all_layers_inside_the_block_alone() -> None:
    chunk: Any = torch.nn.Module()
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
    chunk.decoder = SimpleNamespace(layers=layers, config=SimpleNamespace(recompute_num_layers=1))
    with recomputing_all(chunk):
        assert chunk.decoder.config.recompute_num_layers == 4
    assert chunk.decoder.config.recompute_num_layers == 1


VPP = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", f"--mtp-num-layers 1 --num-layers 8 {VPP}"])
def test_no_loss_and_no_gradient_changes(words: str, tmp_path: Path) -> None:
    flags = [*SAME_WEIGHTS, *mock_data(), *f"--train-iters 2 --num-layers 4 {words}".split()]
    flags += "--pipeline-model-parallel-size 2 --hidden-dropout 0.1".split()
    plain = curve(flags, tmp_path / "plain", 2)
    partly = f"{BLOCK} 1 {PARTLY} 1".split()
    assert curve([*flags, *partly], tmp_path / "partly", 2) == plain
