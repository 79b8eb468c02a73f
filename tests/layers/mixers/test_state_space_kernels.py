"""Mamba-2 by the kernels of mamba_ssm: a stand-in of them goes token by token.

The kernels themselves need a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.mixers import state_space_kernels
from megatron_ext.layers.mixers.state_space import StateSpace
from megatron_ext.layers.mixers.state_space_kernels import KernelStateSpace, state_space
from tests.layers.mixers.test_state_space import Shape, documents_of, drawn, recurrent


def combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:
    """Compute as mamba_ssm: states are ``[batch, n, p, k]``, and those before have index 0."""
    assert return_final_states and chunk_size == 256
    assert all(each.dtype == torch.float32 for each in (dt, A, D)) and x.dtype == B.dtype == C.dtype
    before = torch.zeros(*x.shape[:1], *x.shape[2:], B.size(3))
    if initial_states is not None:
        before = initial_states
    if seq_idx is None:
        seq_idx = torch.zeros(x.shape[:2], dtype=torch.int32)
    assert seq_idx.dtype == torch.int32
    state = torch.where((seq_idx[:, 0] == 0)[:, None, None, None], before, 0 * before)
    y, state = recurrent(x, dt, A, B, C, D, state.transpose(2, 3), seq_idx)
    return y, state.transpose(2, 3)


@pytest.mark.parametrize("ends", [None, (), (7, 20)])
def test_kernels_get_and_give_what_the_chunks_do(
    ends: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_space_kernels, "kernel", lambda: combined)
    shape = Shape(2, 30, 4, 2, 16, 8, 16, ends)
    inputs: dict[str, Any] = drawn(shape)
    inputs["dt"] *= 0.1
    initial = inputs.pop("initial_state")
    segments = documents_of(shape)
    if ends == (7, 20):
        segments = None if segments is None else segments + 1  # a document begins at once
    pair: list[Any] = [kind(**inputs, segments=segments) for kind in (StateSpace, KernelStateSpace)]
    for want, got in zip(pair[0].summary(), pair[1].summary(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for state in (None, initial):
        for want, got in zip(pair[0].outputs(state), pair[1].outputs(state), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_cpu_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space_kernels, "kernel", lambda: combined)
    inputs: dict[str, Any] = drawn(Shape(1, 5, 2, 1, 16, 8, 16))
    inputs.pop("initial_state")
    assert isinstance(state_space(**inputs), StateSpace)
