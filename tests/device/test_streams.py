"""Copies to a device, the end of CUDA graphs, and measured rates, on a CPU as far as it goes."""

import time
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.device import rates
from megatron_ext.device.rates import copy_rate, has_fp8, matrix_rate, seconds_of
from megatron_ext.device.streams import destroy_graphs, other_threads_go_on, to_device
from megatron_ext.errors import DeviceNotSupported
from megatron_ext.parallel.context import ParallelContext
from tests.graph_stand_in import Capture, CpuGraph, graphs_on_a_cpu
from tests.ranks import ranks


def test_on_the_host_nothing_is_copied() -> None:
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x


@pytest.mark.gpu
def test_a_copy_arrives_and_nobody_waits() -> None:
    host = torch.arange(1 << 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = to_device(host, torch.device("cuda"))
        again = to_device(there, there.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again is there
    assert torch.equal(there.cpu(), host)


def test_all_graphs_are_destroyed_whoever_holds_them() -> None:
    with graphs_on_a_cpu():
        holders = [[CpuGraph()], {"graph": CpuGraph()}]
        destroy_graphs()
        assert not any(graph.is_reset for graph in CpuGraph.made)  # nothing was captured
        with Capture(CpuGraph.made[0]):
            pass
        destroy_graphs()
        assert all(graph.is_reset for graph in CpuGraph.made)
        assert len(holders) == len(CpuGraph.made) == 2


@ranks()
def test_groups_take_graphs_down_first(context: ParallelContext) -> None:
    with graphs_on_a_cpu():
        graph = CpuGraph()
        with Capture(graph):
            pass
        state: list[bool] = []
        with (
            mock.patch(
                "megatron.core.parallel_state.destroy_model_parallel",
                side_effect=lambda: state.append(graph.is_reset),
            ),
            mock.patch("torch.distributed.destroy_process_group"),
        ):
            context.destroy()
        assert state == [True]


def test_other_threads_go_on_only_while_graphs_are_captured() -> None:
    original = torch.cuda.graph
    with pytest.raises(ValueError, match="a layer fails"), other_threads_go_on():
        made: Any = torch.cuda.graph
        assert made.func is original
        assert made.keywords == {"capture_error_mode": "thread_local"}
        raise ValueError("a layer fails")
    assert torch.cuda.graph is original


CPU = torch.device("cpu")


def test_time_is_the_median_after_the_warm_up() -> None:
    pauses = iter([0.3, 0.0, 0.5, 0.0])
    calls = []

    def work() -> None:
        calls.append(1)
        time.sleep(next(pauses))

    found = seconds_of(work, CPU, repeats=3, warm_ups=1)
    assert len(calls) == 4
    assert found < 0.2


def test_rates_count_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def took_a_second(work: object, device: torch.device) -> float:
        assert callable(work)
        work()
        return 1.0

    monkeypatch.setattr(rates, "seconds_of", took_a_second)
    assert matrix_rate(CPU, torch.float32, 16) == 2 * 16**3
    assert matrix_rate(CPU, torch.bfloat16, 16) == 2 * 16**3
    assert copy_rate(CPU, 1000) == 2000
    assert rates.rates(CPU, 16, 1000) == {"bf16": 2 * 16**3, "fp8": None, "copy": 2000}
    assert not has_fp8(CPU)
    with pytest.raises(DeviceNotSupported, match="compute capability 8.9 or newer"):
        matrix_rate(CPU, torch.float8_e4m3fn, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert rates.main(["--index", "0"]) == 1
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "torch can use no GPU here\n")
