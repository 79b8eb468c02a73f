"""The time of a step, and the search for the layouts that take least of it."""

from __future__ import annotations

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.planning.hardware import Efficiency
from megatron_ext.planning.search import candidates, search
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.network import GPT_COST
from megatron_ext.text.task import GPT
from tests.text.cost.layouts import llama, llama_network


def test_time_grows_with_the_bubble_and_stays_below_the_peak_rate() -> None:
    gpu = GPUS["H100"]
    one = estimate(llama_network("--use-distributed-optimizer"), gpu)
    deep = estimate(llama_network("--pipeline-model-parallel-size 8"), gpu)
    assert 0 < one.mfu < Efficiency().products * Efficiency().layers
    assert one.seconds > one.flops / (8 * gpu.bf16)
    assert deep.price.bubble_share > one.price.bubble_share == 0
    assert one.tokens_per_second == pytest.approx(128 * 8192 / one.seconds)
    slower = estimate(llama_network("--use-distributed-optimizer"), gpu, Efficiency(products=0.35))
    assert slower.seconds > 1.5 * one.seconds


def test_search_finds_layouts_that_fit_and_sorts_them() -> None:
    gpu = GPUS["A100-40GB"]
    config = llama("--num-layers 8 --hidden-size 8192 --num-attention-heads 64")
    found = search(config, GPT, 8, gpu, GPT_COST, count=5)
    times = [cost.seconds for _, cost in found.best]
    assert len(times) == 5 and times == sorted(times)
    assert all(cost.fits for _, cost in found.best)
    assert found.fitting < found.tried
    layouts = {str(candidate) for candidate in candidates(config, 8, gpu, GPT_COST)}
    assert {"dp", "tp8", "tp2pp2", "pp2vpp4", "cp8"} <= layouts


def test_search_without_any_layout_says_why() -> None:
    with pytest.raises(ConfigError, match="No layout of 7 ranks") as caught:
        search(llama("--global-batch-size 128"), GPT, 7, GPUS["H100"], GPT_COST)
    assert any("`--global-batch-size` (128)" in text for text in caught.value.messages)
