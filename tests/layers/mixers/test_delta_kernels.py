"""Calls of flash-linear-attention's kernels, answered by a stand-in that goes token by token.

The kernels themselves need a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.mixers import delta_kernels
from megatron_ext.layers.mixers.delta_kernels import KernelDeltaRule, delta_rule
from megatron_ext.layers.mixers.delta_rule import DeltaRule
from tests.layers import plain
from tests.layers.mixers.delta_plain import drawn, recurrence


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute as flash-linear-attention: sequences of unequal length lie in one row."""
    assert output_final_state and q.dtype == k.dtype == v.dtype
    rows = (q, k, v, g, beta)
    if cu_seqlens is None:
        return recurrence(*rows, state=initial_state)
    assert len(q) == 1 and cu_seqlens.dtype == torch.int64
    bounds = cu_seqlens.tolist()
    assert len(initial_state) == len(bounds) - 1 and bounds[-1] == q.size(1)
    parts = [
        recurrence(*(x[:, first:last] for x in rows), state=initial_state[index, None])
        for index, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("ends", [None, [[], [4]], [[0, 7, 20], [29]]])
def test_kernels_get_and_give_what_the_chunks_do(
    ends: list[list[int]] | None, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_kernels, "kernel", lambda by_channel: chunk)
    *inputs, state = drawn(2, 30, 2, 4, 16, 24, by_channel=by_channel)
    segments = None if ends is None else plain.document_indices(30, ends)
    pair: list[Any] = [kind(*inputs, segments=segments) for kind in (DeltaRule, KernelDeltaRule)]
    for before in (None, state):
        for want, got in zip(pair[0].outputs(before), pair[1].outputs(before), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_cpu_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "kernel", lambda by_channel: chunk)
    inputs = [x.bfloat16() for x in drawn(1, 5, 2, 4, 16, 16, by_channel=False)[:5]]
    assert type(delta_rule(*inputs)) is DeltaRule


@pytest.mark.parametrize("by_channel", [False, True])
def test_kernels_that_do_not_import_are_none(by_channel: bool) -> None:
    delta_kernels.kernel.cache_clear()
    assert delta_kernels.kernel(by_channel) is None
