"""Streaming long-tuning: its three networks exactly, its cache, and its largest pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.planning.state import Weight
from megatron_ext.train.main import main
from megatron_ext.video.streaming.cost import (
    NetworkMemory,
    StreamingMemory,
    not_estimated,
    streaming_memory,
)
from megatron_ext.video.task import VIDEO
from tests.planning.measure import KINDS, Measured, configuration, measure
from tests.video.streaming.runs import flags_of

PROGRAM = VIDEO
LAYOUTS = {
    "plain": "--latent-size 8 8",
    "adapters": "--lora-rank 4 --bf16 --use-distributed-optimizer --nproc-per-node 2",
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    "others": "--context-parallel-size 2 --critic-size mini --teacher-size mini --latent-size 8 8 "
    "--nproc-per-node 2",
    "recomputed": "--latent-size 16 16 --recompute-blocks 1",
    "own teacher": "--teacher-size mini --teacher-pipeline-model-parallel-size 2 "
    "--nproc-per-node 2",
}
QUICK = ("plain", "adapters")


def _state(held: NetworkMemory) -> dict[str, int]:
    return {kind: getattr(held.state, kind) for kind in KINDS}


def _names(weights: tuple[Weight, ...]) -> list[list[object]]:
    return [[weight.name, weight.numel] for weight in weights]


def _check_networks(planned: StreamingMemory, rank: Measured) -> None:
    generator, critic, teacher = planned.networks
    assert _names(generator.weights) == rank.weights[0]
    assert _names(critic.weights) == rank.networks["critic weights"]
    assert _state(critic) == rank.networks["critic"]
    # Keys and values of the frames; the plan counts those of the text too.
    assert rank.networks["cache"] < planned.cache < 2 * rank.networks["cache"]
    if rank.place["dp_cp"] == 0:
        assert _state(generator) == rank.state
    if _names(teacher.weights) == rank.networks["teacher weights"]:
        assert teacher.state.parameters == rank.networks["teacher"]
    else:
        assert rank.networks["teacher"] < teacher.state.parameters


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in LAYOUTS]
)
def test_networks_exactly_and_the_largest_pass_within_a_tenth(name: str, tmp_path: Path) -> None:
    replicas = 2 if name in ("adapters", "own teacher") else 1
    flags = flags_of(tmp_path / "prompts", f"--train-iters 1 {LAYOUTS[name]}", batch=replicas)
    ranks = measure(flags, tmp_path, PROGRAM)
    planned = streaming_memory(configuration(flags, PROGRAM))
    for rank in ranks:
        _check_networks(planned, rank)
        assert planned.largest.size == pytest.approx(rank.peak, rel=0.10)
    if name == "own teacher":
        last = ranks[-1].networks["teacher"], ranks[0].networks["teacher"]
        assert planned.networks[2].state.parameters == max(last)


def test_a_dry_run_says_what_it_cannot_estimate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags_of(tmp_path, "--train-iters 1"), "--dry-run", "--dry-run-gpu", "H100"]
    assert main(VIDEO, flags) == 0
    shown = capfd.readouterr().out
    for name in ("generator", "critic", "teacher"):
        assert name in shown
    assert "fits on H100" in shown
    said = not_estimated(configuration(flags, PROGRAM))
    assert len(said) == 3 and all(text in shown for text in said)
