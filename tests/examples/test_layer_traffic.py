"""Counts of kernels and bytes: of operations whose traffic is known, and of whole layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from benchmarks import layer_traffic
from benchmarks.traffic import compiled_traffic, eager_traffic
from megatron_ext.layers.pointwise import activated
from megatron_ext.train.launch import fork_ranks

UNIT = 4 * 6 * 2 * 8
X = torch.randn(6, 2, 8)


def test_views_move_nothing_and_operations_their_tensors() -> None:
    def step() -> None:
        y = X.view(12, 8).t()
        (y + y).sum()

    counted = eager_traffic(step)
    assert [kernel.name for kernel in counted.kernels] == ["add", "sum"]
    assert counted.num_bytes("pointwise") == 2 * UNIT + UNIT + 4


def test_products_stand_apart() -> None:
    counted = eager_traffic(lambda: X.view(12, 8) @ X.view(12, 8).t())
    assert counted.count("products") == 1 and counted.count("pointwise") == 0


def test_a_norm_is_one_kernel_each_way_as_on_gpus() -> None:
    x, gain = X.clone().requires_grad_(), torch.ones(8, requires_grad=True)
    upstream = torch.randn_like(X)
    counted = eager_traffic(
        lambda: torch.autograd.grad(F.rms_norm(x, (8,), gain, 1e-5), (x, gain), upstream)
    )
    sizes = {kernel.name: kernel.num_bytes for kernel in counted.kernels}
    assert sizes == {"rms_norm": 2 * UNIT + 32, "rms_norm_backward": 3 * UNIT + 64}


def test_a_compiled_activation_moves_its_inputs_and_outputs_once() -> None:
    wide = torch.randn(6, 2, 16, requires_grad=True)
    upstream = torch.randn(6, 2, 8)

    def step() -> None:
        torch.autograd.grad(activated(wide, None, None, "silu", True), wide, upstream)

    counted = compiled_traffic(step)
    assert [kernel.num_bytes / UNIT for kernel in counted.kernels] == [3, 5]


@pytest.mark.slow
def test_compiled_layers_move_less_than_half(capfd: pytest.CaptureFixture[str]) -> None:
    words: Sequence[str] = ("--sequence", "64", "--hidden", "512")

    def main() -> int:
        layer_traffic.main(words)
        return 0

    assert fork_ranks(main, 1) == 0
    rows = [x for x in capfd.readouterr().out.splitlines() if re.match(r"\| \w.*\d \|$", x)]
    assert len(rows) == 6
    assert all(float(row.rsplit("|", 2)[1]) < 0.5 for row in rows)
