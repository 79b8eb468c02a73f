"""The averaged weights against closed forms, one rank against several, and weights in 16 bits."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.optim import ema as averaging
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.batch_size import Progress
from tests.checkpoint.tiny import Tiny, build
from tests.ranks import ranks, run_on_ranks

DECAY, STEPS = 0.9, 12


def _ema(tiny: Tiny, **options: Any) -> ShardedEMA:
    return ShardedEMA(tiny.model, tiny.optimizer, **{"decay": DECAY, **options})


def _names(tiny: Tiny) -> dict[Any, str]:
    return {
        parameter: f"{index} {name}"
        for index, chunk in enumerate(tiny.model)
        for name, parameter in chunk.named_parameters()
    }


def _averages(tiny: Tiny, ema: ShardedEMA) -> dict[str, Tensor]:
    names = _names(tiny)
    return {names[parameter]: average.clone() for parameter, average in ema.gathered()}


def _weights(tiny: Tiny) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for parameter, name in _names(tiny).items()}


def _closed_form(history: list[dict[str, Tensor]], decay: float = DECAY) -> dict[str, Tensor]:
    """Return decay^n w_0 + (1 - decay) sum_k decay^(n - k) w_k, in double precision."""
    n = len(history) - 1
    return {
        name: decay**n * first.double()
        + (1 - decay) * sum(decay ** (n - k) * history[k][name].double() for k in range(1, n + 1))
        for name, first in history[0].items()
    }


def _assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("distributed", [False, True])
@ranks(dp=2)
def test_the_average_is_the_closed_form(context: ParallelContext, distributed: bool) -> None:
    tiny = build(context, distributed=distributed)
    # Weights are averaged in batches of a limited size.
    with mock.patch.object(averaging, "_BATCH", 1000):
        ema, history = _ema(tiny), [_weights(tiny)]
    for step in range(1, STEPS + 1):
        tiny.step()
        ema.update(step)
        history.append(_weights(tiny))
    assert all(not torch.equal(first, history[-1][name]) for name, first in history[0].items())
    _assert_close(_averages(tiny, ema), _closed_form(history))


def test_an_average_warms_up_to_its_decay() -> None:
    """Take the decays of diffusers: after n updates the start has a share of 9! n! / (n + 9)!."""
    tiny = torch.nn.Linear(1, 1)
    ema, plain = ShardedEMA([tiny], None, decay=0.9999, warmup=True), ShardedEMA([tiny], None)
    assert [ema.decay_after(n) for n in (0, 1, 60)] == [1 / 10, 2 / 11, 61 / 70]
    assert ema.decay_after(10**6) == 0.9999 and plain.decay_after(0) == 0.0
    progress = Progress()
    for n in range(60):
        assert (progress.average_note is None) == (n == 0 or math.comb(n + 9, 9) > 1000)
        progress.count_average(ema.decay_after(n))
    assert math.isclose(progress.average_start or 0, 1 / math.comb(69, 9))
    slow = Progress(average_updates=60, average_start=0.9999**60)
    assert slow.average_note == (
        "99.4% of the averaged weights is still the weights that they started from, 60 update(s) "
        "before"
    )
    before = Progress.from_dict({"iteration": 500})
    assert (before.average_updates, before.average_note) == (500, None)


def test_the_device_says_whether_a_step_is_averaged() -> None:
    linear = torch.nn.Linear(1, 1)
    linear.bias.requires_grad_(False)
    ema = ShardedEMA([linear], None, decay=DECAY)
    assert [id(parameter) for parameter in ema.parameters] == [id(linear.weight)]
    start = float(linear.weight.detach())
    for step, applied in enumerate((False, True), start=1):
        torch.nn.init.constant_(linear.weight, start + step)
        ema.update(step, torch.tensor(applied))
        wanted = start + (1 - DECAY) * step * applied
        assert float(ema.parts[0].average) == pytest.approx(wanted)


@ranks()
def test_steps_before_the_first_averaged_one_leave_the_weights(context: ParallelContext) -> None:
    tiny = build(context)
    ema, history = _ema(tiny, start=3), []
    for step in range(1, 6):
        tiny.step()
        ema.update(step)
        if step >= 2:
            history.append(_weights(tiny))
        if step == 2:
            for name, average in _averages(tiny, ema).items():
                assert torch.equal(average, history[0][name])
    _assert_close(_averages(tiny, ema), _closed_form(history))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(dp=2)
def test_an_average_of_16_bit_weights_moves_from_the_first_step(
    context: ParallelContext, precision: str, distributed: bool
) -> None:
    decay = 0.9999
    tiny = build(context, precision=precision, distributed=distributed)
    tiny.scheduler.step(1)  # The first learning rate of its warm-up is 0.
    start = _weights(tiny)
    ema = _ema(tiny, decay=decay)
    mains = _ema(tiny, start=2)  # After its first step these are the optimizer's own weights.
    tiny.step()
    ema.update(1)
    mains.update(1)
    moved = _averages(tiny, ema)
    for name, main in _averages(tiny, mains).items():
        first = start[name]
        torch.testing.assert_close(main.to(first.dtype), _weights(tiny)[name], rtol=0, atol=0)
        wanted = first.double() + (1 - decay) * (main.double() - first.double())
        torch.testing.assert_close(moved[name].double(), wanted, rtol=1e-7, atol=1e-9)
        assert (moved[name] != first.float()).float().mean() > 0.95, name
        if precision == "bf16" and first.any():
            in_16_bits = decay * first + (1 - decay) * main.to(first.dtype)
            assert (in_16_bits == first).float().mean() > 0.95, name


def _save_averages(context: ParallelContext, folder: Path, precision: str) -> None:
    """Save weights that do not depend on the number of ranks, and the whole averages."""
    tiny = build(context, precision=precision)
    ema = _ema(tiny)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in _names(tiny):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / step)
        tiny.optimizer.reload_model_params()
        ema.update(step)
    averages = _averages(tiny, ema)
    if context.rank == 0:
        torch.save(averages, folder / f"{context.layout.world_size}.pt")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_and_four_ranks_hold_what_one_holds_bit_for_bit(precision: str, tmp_path: Path) -> None:
    for size in (1, 2, 4):
        arguments = {"folder": tmp_path, "precision": precision}
        run_on_ranks(_save_averages, Layout(world_size=size), arguments)
    one, two, four = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2, 4))
    assert one.keys() == two.keys() == four.keys()
    for name, average in one.items():
        bits = average.view(torch.int32)
        assert torch.equal(bits, two[name].view(torch.int32)), name
        assert torch.equal(bits, four[name].view(torch.int32)), name


@ranks(dp=4)
def test_each_rank_holds_a_quarter(context: ParallelContext) -> None:
    """Averages lie with the optimizer's shards, not with the model's weights."""
    tiny = build(context)
    held = torch.tensor(sum(part.average.numel() for part in _ema(tiny)._parts))
    total = held.clone()
    torch.distributed.all_reduce(total)
    assert int(total) == sum(parameter.numel() for parameter in _names(tiny))
    assert abs(int(held) - int(total) / 4) < 1000
    # What is gathered has the bits of the parts, also of zeros with a sign.
    ema = _ema(tiny)
    for part in ema.parts:
        part.average.fill_(-0.0)
    for _, average in ema.gathered():
        assert not average.any() and average.signbit().all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True])
@ranks(dp=2)
def test_swapping_in_and_back(context: ParallelContext, distributed: bool, precision: str) -> None:
    tiny = build(context, precision=precision, distributed=distributed)
    ema, mains = _ema(tiny), _ema(tiny, start=9)
    for step in (1, 2):
        tiny.step()
        ema.update(step)
        mains.update(step)
    weights, averages, main = _weights(tiny), _averages(tiny, ema), _averages(tiny, mains)
    with pytest.raises(KeyError), ema.swapped_in(tiny.model):
        for name, weight in _weights(tiny).items():
            assert torch.equal(weight, averages[name].to(weight.dtype)), name
        with pytest.raises(RuntimeError, match="put the others back first"):
            ema.update(3)
        with pytest.raises(RuntimeError, match="exchanged twice"), ema.swapped_in(tiny.model):
            pass
        raise KeyError
    for name, weight in _weights(tiny).items():
        assert torch.equal(weight, weights[name]), name
    # Chunks that are not given keep their weights; while hooks gather weights none may change.
    with ema.swapped_in([]):
        for name, weight in _weights(tiny).items():
            assert torch.equal(weight, weights[name]), name
    hooked: Any = SimpleNamespace(remove_forward_pre_hook_handles=["hook"])
    with pytest.raises(RuntimeError, match="nor while hooks gather"), ema.swapped_in([hooked]):
        pass
    ema.update(3)
    mains.update(3)
    for name, average in _averages(tiny, mains).items():
        assert torch.equal(average, main[name]), name
