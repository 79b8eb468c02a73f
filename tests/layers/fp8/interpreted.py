"""The tests of the Triton kernels, which `test_kernels` runs in a process with an interpreter.

Triton's interpreter runs kernels on tensors of a CPU. Its own conversion to 8 bits rounds halves
away from zero and cuts off small numbers, and it can lose the carry into the exponent. Here torch
converts instead, which rounds to the nearest number and ties to even, as the instruction of a GPU.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from megatron_ext.layers import pointwise
from megatron_ext.layers.fp8 import activation, casting, kernels
from megatron_ext.layers.fp8.linear import AmaxHistories, KeptWeights, fp8_linear
from megatron_ext.layers.fp8.matrices import E4M3, E5M2, Layouts, Wanted, quantize, quantize_with
from megatron_ext.layers.fp8.scaling import DelayedScaling, Role
from megatron_ext.layers.transformer_config import ACTIVATIONS as BY_NAME
from megatron_ext.layers.weight_gradients import LinearCall
from tests.layers.fp8.test_linear import scaling_of

# Numpy, which interprets, warns of infinities that the kernels expect.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}
SHAPES = [(128, 64), (200, 176), (21, 48), (1, 16), (150, 80)]


@pytest.fixture(autouse=True)
def _torch_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    convert: Any = interpreter._convert_float

    def converted(data: Any, of: Any, to: Any, mode: Any) -> Any:
        if to not in FORMATS:
            return convert(data, of, to, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return numbers.to(FORMATS[to]).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 3, m)[:, None]
    return (torch.randn(m, k, generator=generator) * sizes).to(dtype)


def spoiled(kind: str) -> Tensor:
    x = matrix(40, 48)
    if kind == "zeros":
        return torch.zeros_like(x)
    x[3, 4], x[30, 40] = {"nan": (math.nan, 1), "inf": (math.inf, -math.inf), "-0": (-0.0, 0)}[kind]
    return x


def same(got: Layouts, want: Layouts) -> None:
    """Check that layouts agree to the bit, but for the kind of NaN."""
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert ours.is_contiguous()
            nan = theirs.float().isnan()
            assert torch.equal(ours.float().isnan(), nan)
            assert torch.equal(ours.view(torch.uint8)[~nan], theirs.view(torch.uint8)[~nan])


@pytest.mark.parametrize("wanted", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_with_a_given_scale(of: torch.dtype, dtype: torch.dtype, wanted: Wanted) -> None:
    """Numbers beyond the limit, and too small ones, are among them."""
    for m, k in SHAPES:
        x, scale = matrix(m, k, of), torch.tensor(37.3)
        noted, want_noted = torch.tensor(0.25), torch.tensor(0.25)
        want = quantize_with(x, scale, dtype, wanted, want_noted)
        same(kernels.cast(x, scale, dtype, wanted, noted), want)
        assert torch.equal(noted, want_noted)
        same(kernels.cast(x, scale, dtype, wanted), want)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wanted", ["rows", "columns", "both"])
def test_a_cast_by_the_largest_magnitude(wanted: Wanted, dtype: torch.dtype) -> None:
    for amax in (1.7, 1e-40, 0.0, math.inf, math.nan):
        x, largest = matrix(21, 80), torch.tensor(amax)
        got, want = (
            function(x, largest, dtype, *more)
            for function, more in (
                (kernels.cast_by_magnitude, (wanted,)),
                (quantize, (None, wanted)),
            )
        )
        for number in ("scale", "inverse"):
            ours, theirs = getattr(got, number), getattr(want, number)
            assert torch.equal(ours, theirs) or (ours.isnan() and theirs.isnan())
        same(got[2:], want[2:])


@pytest.mark.parametrize("kind", ["zeros", "nan", "inf", "-0"])
def test_special_numbers(kind: str) -> None:
    x, noted, want_noted = spoiled(kind), torch.tensor(0.0), torch.tensor(0.0)
    want = quantize_with(x, torch.tensor(3.0), E4M3, "both", want_noted)
    same(kernels.cast(x, torch.tensor(3.0), E4M3, "both", noted), want)
    assert torch.equal(noted, want_noted) or (noted.isnan() and want_noted.isnan())
    assert bool(noted.isfinite()) == (kind not in ("nan", "inf"))


def test_a_magnitude_that_is_nan_stays_so() -> None:
    noted = torch.tensor(torch.nan)
    kernels.cast(matrix(16, 16), torch.ones(()), E4M3, "rows", noted)
    assert noted.isnan()


def test_tensors_without_memory_get_layouts_of_the_right_shapes() -> None:
    """So that a step can be traced on a machine without a GPU."""
    with FakeTensorMode():
        x, scale = torch.empty(21, 48, device="cuda", dtype=torch.bfloat16), torch.ones(())
        rows, columns = kernels.cast(x, scale, E4M3, "both")
    assert rows.shape == (21, 48) and columns.shape == (48, 32)
    assert rows.dtype == columns.dtype == E4M3 and rows.is_cuda and columns.is_cuda


def test_a_matrix_that_is_not_contiguous() -> None:
    x = matrix(64, 48).t()
    want = quantize_with(x.contiguous(), torch.ones(()), E4M3, "both")
    same(kernels.cast(x, torch.ones(()), E4M3, "both"), want)


ACTIVATIONS = [(name, gated) for name in BY_NAME for gated in (True, False)]


def near(got: Layouts, exact: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Check that 8-bit numbers are those nearest to exact ones, but for ties that float32 decides.

    ``exact`` ``[m, k]`` is in float64. An error of float32 may move a number across the middle
    between two 8-bit numbers; such numbers are fewer than one in a hundred.
    """
    rows, columns = got
    assert rows is not None and columns is not None
    assert torch.equal(columns.float().t()[: rows.size(0)], rows.float())
    assert not columns.float()[:, rows.size(0) :].any()
    limit = torch.finfo(dtype).max
    want = (exact * scale).clamp(-limit, limit)
    apart = rows.float() != want.float().to(dtype).float()
    assert apart.float().mean() < 0.01
    step = 2.0**-3 if dtype == E4M3 else 2.0**-2
    assert ((rows.double() - want).abs() <= step * 0.51 * want.abs() + 2.0**-9).all()


@pytest.mark.parametrize(("name", "gated"), ACTIVATIONS)
def test_an_activation_and_its_gradient(name: str, gated: bool) -> None:
    """The truth is float64: the activation by torch, its gradient by autograd."""
    for m, f in ((70, 80), (21, 48)):
        generator = torch.Generator().manual_seed(f)
        wide = (2 * torch.randn(m, 2 * f if gated else f, generator=generator)).bfloat16()
        outer = torch.randn(m, f, generator=generator).bfloat16()
        exact = wide.double().requires_grad_()
        result = pointwise.activated.eager(exact, None, None, name, gated)
        result.backward(outer.double())
        scale, noted = torch.tensor(11.0), torch.zeros(2)
        got = kernels.activated(wide, name, gated, scale, E4M3, "both", noted[0])
        result = result.detach()
        near(got, result, scale, E4M3)
        assert noted[0] == pytest.approx(float(result.abs().max()), rel=1e-5)
        got = kernels.gradient_before(outer, wide, name, gated, scale, E5M2, "both", noted[1])
        near(got, exact.grad, scale, E5M2)
        assert noted[1] == pytest.approx(float(exact.grad.abs().max()), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "gated"), ACTIVATIONS)
def test_an_activation_of_what_is_not_finite_is_seen(name: str, gated: bool, bad: float) -> None:
    wide = torch.ones(16, 32)
    wide[2, 3] = bad
    noted = torch.zeros(())
    rows, _ = kernels.activated(wide, name, gated, torch.ones(()), E4M3, "both", noted)
    assert rows.float().isnan().nonzero().tolist() == [[2, 3]] and not noted.isfinite()


S, B, H, F = 20, 2, 32, 48


class Layer(torch.nn.Module):
    """A linear layer in 8 bits with what `joined` reads of a parallel one."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.lora: Any = None
        self.bias: Any = None
        generator = torch.Generator().manual_seed(n)
        self.weight: Any = torch.nn.Parameter(0.2 * torch.randn(n, k, generator=generator))
        self.fp8 = scaling_of("delayed")

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, None, LinearCall(self.weight, scaling=self.fp8))


class Mlp(torch.nn.Module):
    def __init__(self, name: str, gated: bool) -> None:
        super().__init__()
        self.first, self.second = Layer(2 * F if gated else F, H), Layer(H, F)
        self.name, self.gated = name, gated
        self.joins: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        with activation.joined(self.first, self.second, wide, self.name, self.gated) as joins:
            self.joins.append(joins)
            narrow = wide
            if not joins:
                narrow = pointwise.activated(wide, None, None, self.name, self.gated)
            return self.second(narrow)  # type: ignore[no-any-return]


def step(mlp: Mlp, seed: int) -> list[Tensor]:
    """Run a step of two micro-batches; return outputs and gradients."""
    generator = torch.Generator().manual_seed(seed)
    mlp.zero_grad()
    found = []
    with KeptWeights([mlp]).kept():
        for _ in range(2):
            x = torch.randn(S, B, H, generator=generator, requires_grad=True)
            output = mlp(x)
            output.backward(torch.randn(S, B, H, generator=generator))
            found += [output.detach(), x.grad]
    found += [parameter.grad.clone() for parameter in mlp.parameters()]
    histories = AmaxHistories([mlp])
    histories.advance()
    for scaling in histories.scalings:
        found += [scaling.amax_history.clone(), scaling.scale.clone()]
        scaling.has_history = True
    return found


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def use() -> None:
        for module in (casting, activation):
            monkeypatch.setattr(module, "kernels_for", lambda x: kernels if x.numel() else None)

    return use


@pytest.mark.parametrize(("name", "gated"), [("silu", True), ("gelu", False)])
def test_an_mlp_learns_the_same_with_kernels(
    name: str, gated: bool, on_kernels: Callable[[], None]
) -> None:
    """Three steps, of which the first has no scales yet and joins nothing."""
    plain = Mlp(name, gated)
    want = [step(plain, seed) for seed in range(3)]
    on_kernels()
    fast = Mlp(name, gated)
    got = [step(fast, seed) for seed in range(3)]
    assert plain.joins == [False] * 6 and fast.joins == [False] * 2 + [True] * 4
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(got[1] + got[2], want[1] + want[2], strict=True):
        # An activation differs by errors of float32, which change few of the 8-bit numbers.
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-3


def test_a_frozen_first_layer_gets_no_transposed_gradient(on_kernels: Callable[[], None]) -> None:
    on_kernels()
    mlp = Mlp("silu", True)
    step(mlp, 0)
    mlp.first.weight.requires_grad_(False)
    x = torch.randn(S, B, H, requires_grad=True)
    output = mlp(x)
    assert mlp.joins[-1]
    wanted: list[Wanted] = []
    make = kernels.gradient_before

    def noting(*args: Any) -> Layouts:
        wanted.append(args[6])
        return make(*args)

    kernels.gradient_before = noting
    try:
        output.sum().backward()
    finally:
        kernels.gradient_before = make
    assert wanted == ["rows"] and x.grad is not None and bool(x.grad.isfinite().all())


def test_a_second_use_of_the_first_layers_output_is_refused(
    on_kernels: Callable[[], None],
) -> None:
    on_kernels()
    mlp = Mlp("silu", True)
    step(mlp, 0)
    x = torch.randn(S, B, H, requires_grad=True)
    wide = mlp.first(x)
    with activation.joined(mlp.first, mlp.second, wide, "silu", True) as joins:
        output = mlp.second(wide)
    assert joins
    with pytest.raises(RuntimeError, match="has another use than the activation"):
        (output.sum() + wide.sum()).backward()


def test_a_layer_launches_one_kernel_for_each_tensor(on_kernels: Callable[[], None]) -> None:
    """Beside them and the products a step with known scales computes nothing."""
    on_kernels()
    layer = Layer(F, H)
    assert isinstance(layer.fp8, DelayedScaling)
    layer.fp8.has_history = True
    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
        ):
            called.append(str(function))
            return function(*args, **kwargs or {})

    x = torch.randn(S, B, H, requires_grad=True)
    with KeptWeights([layer]).kept(), Calls():
        pair = layer.fp8.pair(x.detach().flatten(0, 1), Role.INPUT, columns=True)
    views = ("aten.select", "aten.view", "aten.detach", "aten.empty", "aten.new_empty")
    assert [x for x in called if not x.startswith(views)] == ["megatron_ext.to_8_bits.default"]
    assert pair.columns is not None and pair.columns.inverse is not None
