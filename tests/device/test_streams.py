"""Copies to a device, which on a CPU are the tensor itself, and the end of CUDA graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_ext.device.streams import destroy_graphs, to_device
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
