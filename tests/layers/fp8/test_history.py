"""Delayed scales against a hand computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.config.precision import Fp8Config
from megatron_ext.layers.fp8.linear import AmaxHistories
from megatron_ext.layers.fp8.scaling import DelayedScaling, Parts, Role
from tests.ranks import ParallelContext, ranks


def scaling(context: ParallelContext, **flags: object) -> DelayedScaling:
    values: dict[str, object] = {"fp8_format": "hybrid", "fp8_amax_history_len": 3, **flags}
    parts = Parts(context.pgs, cuts_input=False, cuts_sequence=False)
    return DelayedScaling(Fp8Config(**values), parts)  # type: ignore[arg-type]


def of_size(amax: float) -> Tensor:
    return torch.tensor([[0.5, -1.0], [0.25, 0.0]]) * amax


def step(histories: AmaxHistories, layer: DelayedScaling, *sizes: float) -> list[float]:
    """Run a step whose micro-batches have some sizes; return the scale that each of them had."""
    found = [float(layer.rows(of_size(size), Role.INPUT).scale) for size in sizes]
    histories.advance()
    return found


@ranks()
def test_the_most_recent_step_sets_the_scale(context: ParallelContext) -> None:
    layer = scaling(context)
    histories = AmaxHistories([layer])
    assert step(histories, layer, 2.0, 8.0) == [224.0, 56.0]  # of the tensors themselves
    assert step(histories, layer, 16.0, 1.0) == [56.0, 56.0]
    assert step(histories, layer, 4.0) == [28.0]
    assert layer.amax_history[:, Role.INPUT].tolist() == [4.0, 16.0, 8.0]
    assert step(histories, layer, 1.0) == [112.0]
    assert layer.amax_history[:, Role.INPUT].tolist() == [1.0, 4.0, 16.0]


@ranks()
def test_max_over_the_window_with_a_margin(context: ParallelContext) -> None:
    layer = scaling(context, fp8_amax_compute_algo="max", fp8_margin=1)
    histories = AmaxHistories([layer])
    for size in (8.0, 2.0, 2.0):
        step(histories, layer, size)
    assert float(layer.scale[Role.INPUT]) == 448 / 8 / 2
    step(histories, layer, 2.0)  # 8 has left the window
    assert float(layer.scale[Role.INPUT]) == 448 / 2 / 2


@ranks()
def test_each_format_has_its_limit(context: ParallelContext) -> None:
    for name, limit in (("hybrid", 57344.0), ("e4m3", 448.0)):
        layer = scaling(context, fp8_format=name)
        layer.rows(of_size(2.0), Role.GRADIENT)
        AmaxHistories([layer]).advance()
        assert float(layer.scale[Role.GRADIENT]) == limit / 2


@ranks()
def test_values_beyond_a_delayed_scale_are_cut_off(context: ParallelContext) -> None:
    layer = scaling(context)
    step(AmaxHistories([layer]), layer, 1.0)
    given = layer.rows(of_size(4.0), Role.INPUT).dequantized()
    assert given.tolist() == [[1.0, -1.0], [1.0, 0.0]]


@ranks()
def test_zeros_and_what_is_not_finite_leave_the_scale(context: ParallelContext) -> None:
    layer = scaling(context)
    histories = AmaxHistories([layer])
    step(histories, layer, 8.0)
    for size in (0.0, torch.inf, torch.nan):
        quantized = layer.rows(of_size(size), Role.INPUT)
        assert size == 0.0 or quantized.dequantized().isnan().all()
        histories.advance()
        assert layer.amax_history[:, Role.INPUT].tolist() == [8.0, 0.0, 0.0]
        assert float(layer.scale[Role.INPUT]) == 56.0


@pytest.mark.parametrize("first", [0.0, torch.inf])
@ranks()
def test_a_tensor_without_a_history_has_its_own_scale(
    context: ParallelContext, first: float
) -> None:
    """Gates of zeros, or a skipped first step, must not lose the gradients of the next."""
    layer = scaling(context)
    histories = AmaxHistories([layer])
    for size, want in ((first, None), (2.0**-30, 57344 * 2.0**30), (2.0**-20, 57344 * 2.0**30)):
        layer.rows(of_size(1.0), Role.INPUT)
        layer.rows(of_size(1.0), Role.WEIGHT)
        found = layer.rows(of_size(size), Role.GRADIENT)
        assert want is None or float(found.scale) == want
        assert not layer.has_history
        histories.advance()
    assert layer.has_history


@ranks()
def test_evaluation_leaves_no_trace(context: ParallelContext) -> None:
    layer = scaling(context)
    layer.eval()
    layer.rows(of_size(8.0), Role.INPUT)
    assert not layer.amax.any()


@ranks(tp=2, dp=2, timeout=60)
def test_the_largest_of_all_ranks_counts(context: ParallelContext) -> None:
    layer = scaling(context)
    histories = AmaxHistories([layer])
    step(histories, layer, float(context.rank + 1))
    assert float(layer.amax_history[0, Role.INPUT]) == 4.0


@ranks()
def test_state_stays_in_float32_and_survives(context: ParallelContext) -> None:
    layer, other = scaling(context), scaling(context)
    step(AmaxHistories([layer]), layer, 1.0 + 2.0**-20)
    want = layer.scale.clone()
    layer.bfloat16()
    assert layer.amax_history.dtype == layer.scale.dtype == torch.float32
    assert torch.equal(layer.scale, want)
    assert list(layer.state_dict()) == ["amax_history"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.scale, want)
    assert getattr(layer.amax_history, "new_branch", False)


@pytest.mark.parametrize("length", [1, 4])
@ranks()
def test_a_history_forgets_after_its_length(context: ParallelContext, length: int) -> None:
    layer = scaling(context, fp8_amax_history_len=length, fp8_amax_compute_algo="max")
    histories = AmaxHistories([layer])
    for size in (64.0, 4.0, 2.0, 1.0):
        step(histories, layer, size)
    assert float(layer.scale[Role.INPUT]) == 448 / (64.0 if length == 4 else 1.0)
