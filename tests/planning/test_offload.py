"""Plans of what lies on the host."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.planning import host_memory
from megatron_ext.planning.hardware import PCIE
from megatron_ext.planning.memory import memory
from megatron_ext.planning.offload import HOST_MEMORY, offload_sheet, update_seconds
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.task import GPT
from tests.text.cost import layouts
from tests.text.cost.layouts import llama_network

SHARED = "--use-distributed-optimizer"


def _estimate(words: str) -> Any:
    return estimate(llama_network(f"{SHARED} {words}"), GPUS["H100"])


def test_what_moves_leaves_the_gpu_and_is_on_the_host() -> None:
    (whole, *_) = memory(llama_network(SHARED))
    (half, *_) = memory(
        llama_network(f"{SHARED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    )
    (none, *_) = memory(llama_network(f"{SHARED} --optimizer-cpu-offload"))
    assert whole.host == whole.state.hosted == 0
    assert half.state.optimizer <= whole.state.optimizer / 2 < half.state.host
    assert (none.state.optimizer, none.state.updated) == (0, 0)
    assert none.state.host_optimizer == whole.state.optimizer
    assert half.state.hosted + half.state.updated == whole.state.updated
    (moved, *_) = memory(llama_network(f"{SHARED} --cpu-offloading-num-layers 2"))
    assert moved.activations < whole.activations
    assert moved.moved > 0


def test_layers_move_for_micro_batches_that_recompute_some_or_all_of_them() -> None:
    block = "--pipeline-model-parallel-size 4 --recompute-granularity full"
    block += " --recompute-method block --recompute-num-layers 2 --cpu-offloading-num-layers 4"
    some, most = (
        memory(llama_network(f"{SHARED} {block} {more}"))[0]
        for more in ("", "--num-microbatches-with-partial-activation-checkpoints 1")
    )
    assert 0 < most.moved < some.moved


def test_copies_and_updates_of_the_host_take_time() -> None:
    whole = _estimate("")
    apart = _estimate("--optimizer-cpu-offload")
    beside = _estimate("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d")
    assert whole.seconds < beside.seconds < apart.seconds
    rank = apart.ranks[0]
    elements = rank.state.hosted
    copies = elements * (4 + 2) / PCIE
    work = (2 * rank.state.host_optimizer + elements * (4 + 4 + 2 * 2)) / HOST_MEMORY
    assert update_seconds(apart.network, rank.state) == pytest.approx(copies + work)
    sheet = offload_sheet(apart.network, apart.ranks, GPUS["H100"])
    assert [row[0] for row in sheet.rows][-2:] == ["copies", "host memory"]


def test_a_host_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "this_host", lambda: SimpleNamespace(memory=10**9))
    config = replace(layouts.llama(f"{SHARED} --optimizer-cpu-offload"), device="cuda")
    with pytest.raises(ConfigError, match=r"The flags of offload move [\d.,]+ GB to this machine"):
        host_memory.check_host_memory(config, GPT.loaded().cost)
