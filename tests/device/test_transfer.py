"""Copies to a device; on a CPU they are the tensor itself."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.device.streams import sent


def test_on_the_host_nothing_is_copied() -> None:
    x = torch.arange(3)
    assert sent(x, torch.device("cpu")) is x


@pytest.mark.gpu
def test_a_copy_arrives_and_nobody_waits() -> None:
    host = torch.arange(1 << 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = sent(host, torch.device("cuda"))
        again = sent(there, there.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again is there
    assert torch.equal(there.cpu(), host)
