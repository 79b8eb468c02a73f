"""When functions are compiled, how often, and what happens where they cannot be."""

import logging
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megatron_ext.layers import compiled as compilation
from megatron_ext.layers import pointwise
from megatron_ext.layers.compiled import (
    compile_alike,
    compile_nothing,
    compiled,
    compiled_on_cpu,
    compiles,
)
from megatron_ext.layers.fused_residual import FusedResidual

GPU: Any = SimpleNamespace(is_cuda=True, numel=lambda: 1)
"""Looks to `compiles` like a tensor of a GPU."""


def failing(_graph: torch.fx.GraphModule, _example: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compiler", compilation.Compiler())


def doubled() -> compilation.Compiled[Tensor]:
    @compiled
    def double(x: Tensor, factor: float = 2.0) -> Tensor:
        return factor * x

    return double


def test_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    x = torch.ones(3, 2, 4, requires_grad=True)
    assert torch.equal(doubled()(x), 2 * x)
    same, _ = FusedResidual(lambda y: (y.sin(),))(x)
    assert same is x


def test_lengths_are_compiled_twice_at_most_and_widths_apart() -> None:
    double, backend = doubled(), CompileCounter()
    with compiled_on_cpu(backend):
        for length in (3, 5, 7, 11, 13, 8):
            for batch in (2, 4, 3):
                x = torch.randn(length, batch, 4)
                assert torch.equal(double(x), 2 * x)
        assert backend.frame_count <= 3  # both axes first alike, then one after the other unlike
        before = backend.frame_count
        double(torch.randn(3, 2, 6))
        double(torch.randn(3, 2, 6, dtype=torch.float64))
        double(torch.randn(3, 2, 6, requires_grad=True))
        double(torch.randn(3, 2, 6), 3.0)
        assert backend.frame_count == before + 4
        double(torch.randn(9, 2, 4))
        assert backend.frame_count == before + 4


def test_parts_of_one_tensor_are_arguments_too() -> None:
    """Parts of one sample have strides that a new tensor would not have."""
    double, backend = doubled(), CompileCounter()
    whole = torch.randn(1, 12, requires_grad=True)
    with compiled_on_cpu(backend):
        results = [double(part) for part in whole.chunk(3, dim=-1)]
    sum(result.sum() * factor for factor, result in enumerate(results)).backward()
    assert torch.equal(torch.cat(results, dim=-1), 2 * whole)
    assert torch.equal(whole.grad, 2 * torch.arange(3.0).repeat_interleave(4)[None])
    assert backend.frame_count == 1


def test_a_length_among_the_arguments_is_no_signature() -> None:
    @compiled
    def head(x: Tensor, count: int) -> Tensor:
        return 2 * x[:count]

    backend = CompileCounter()
    with compiled_on_cpu(backend):
        for count in range(2, 9):
            x = torch.randn(10, 2, 4)
            assert torch.equal(head(x, count), 2 * x[:count])
    assert backend.frame_count <= 2


def test_a_graph_break_is_an_error() -> None:
    @compiled
    def value(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return 2 * x

    with compiled_on_cpu(), pytest.raises(torch._dynamo.exc.Unsupported):
        value(torch.ones(2))


def test_what_cannot_be_compiled_runs_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double, x = doubled(), torch.ones(3, 2, 4)
    with compiled_on_cpu(failing):  # Tensors without elements run as written.
        assert doubled()(torch.empty(0, 2, 4)).shape == (0, 2, 4)
    with caplog.at_level(logging.WARNING), compiled_on_cpu(failing, strict=False):
        assert torch.equal(double(x), 2 * x) and torch.equal(double(x), 2 * x)
    (record,) = caplog.records
    assert "`torch.compile` failed on `double`" in record.message
    assert "no such kernel" in record.message and "`--no-compile`" in record.message


def test_functions_within_functions_are_one_graph() -> None:
    double, backend = doubled(), CompileCounter()

    @compiled
    def twice(x: Tensor) -> Tensor:
        return double(double(x))

    with compiled_on_cpu(backend):
        assert torch.equal(twice(torch.ones(2)), torch.full((2,), 4.0))
    assert backend.frame_count == 1


@pytest.mark.parametrize(
    ("triton", "lack"), [(False, "Triton and a GPU of compute"), (True, "a C compiler")]
)
@pytest.mark.usefixtures("fresh")
def test_what_the_compiler_lacks_is_said_once_and_nothing_is_compiled(
    triton: bool, lack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "has_triton", lambda: triton)
    monkeypatch.setenv("CC", "/nowhere/cc")
    with caplog.at_level(logging.WARNING):
        assert not compiles(GPU) and not compiles(GPU)
    (record,) = caplog.records
    assert record.message.startswith(f"`torch.compile` needs {lack}")


@pytest.mark.parametrize("compiler", ["gcc", "clang", "cc", None])
@pytest.mark.usefixtures("fresh")
def test_one_c_compiler_is_enough(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.delenv("CC", raising=False)
    assert compiles(GPU) is (compiler is not None)


@pytest.mark.usefixtures("fresh")
def test_no_compile_switches_all_compilation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    monkeypatch.setenv("CC", "sh")
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    assert compiles(GPU)
    compile_nothing()
    assert not compiles(GPU) and stances == ["force_eager"]


def test_gradients_of_both_uses_are_added() -> None:
    def function(x: Tensor, weight: Tensor, power: float) -> tuple[Tensor, Tensor]:
        return (x * weight) ** power, x.cos()

    pair = FusedResidual(function)
    x = torch.rand(3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def loss(same: Tensor, *outputs: Tensor) -> Tensor:
        return same.sin().sum() + sum(y.sum() * (i + 2) for i, y in enumerate(outputs))

    want = torch.autograd.grad(loss(x, *function(x, weight, 3.0)), (x, weight))
    with compiled_on_cpu():
        got = torch.autograd.grad(loss(*pair(x, weight, 3.0)), (x, weight))
        (alone,) = torch.autograd.grad(loss(*pair(x, weight.detach(), 3.0)), x)
    for one, other in zip((*got, alone), (*want, want[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_too_many_kinds_of_arguments_run_as_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "MAX_VARIANTS", 2)
    double, backend = doubled(), CompileCounter()
    with caplog.at_level(logging.WARNING), compiled_on_cpu(backend):
        for width in (2, 3, 4, 5):
            assert torch.equal(double(torch.ones(2, 2, width)), torch.full((2, 2, width), 2.0))
    assert backend.frame_count == 2
    (record,) = caplog.records
    assert "`double` has been compiled for 2 kinds of arguments" in record.message


def odd(length: int, width: int = 4) -> Tensor:
    """Return ``[s, 1, h]`` with the strides of a transposed ``[1, s, h]``."""
    return torch.randn(1, length, width).transpose(0, 1).contiguous()


@pytest.mark.parametrize("batch", [1, 2])
def test_strides_of_axes_of_size_one_are_not_compiled_for(batch: int) -> None:
    backend = CompileCounter()

    @compiled
    def plus(x: Tensor, y: Tensor) -> Tensor:
        return x + 2 * y

    with compiled_on_cpu(backend):
        for length in (8, 12):
            x, y = torch.randn(length, batch, 4), torch.randn(length, batch, 4)
            for other in (y, odd(length) if batch == 1 else y, y.clone()):
                assert torch.equal(plus(x, other), x + 2 * other)
                assert torch.equal(plus(other, x), other + 2 * x)
    assert odd(8).stride() != torch.randn(8, 1, 4).stride()
    assert backend.frame_count <= 2  # for the first length, and for any


def operations(pair: FusedResidual, *args: Any) -> tuple[str, str]:
    """Return the names of the operations of the forward graph and of the backward graph."""
    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, _example: Any) -> Any:
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    with compiled_on_cpu(note):
        torch.stack([x.sum() for x in pair(*args)]).sum().backward()
    forward, backward = graphs
    return forward, backward


def test_a_norm_with_residual_keeps_its_statistics() -> None:
    x, weight = torch.randn(6, 2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    forward, backward = operations(
        pointwise.norm_with_residual, x, weight, None, ("RMSNorm", 1e-5, False)
    )
    assert "rsqrt" in forward and "rsqrt" not in backward
    # The sum over tokens must not wait for one over features, or it takes a kernel of its own.
    assert backward.count("mean") == 1


@pytest.mark.usefixtures("fresh")
def test_ranks_that_hold_the_same_tensors_compile_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def note(function: Any, **options: Any) -> Any:
        given.append(options.get("options"))
        return function

    monkeypatch.setattr(torch, "compile", note)
    compiled_here = compilation.Compiled(_relu)
    with compiled_on_cpu("inductor"):
        compiled_here(torch.ones(2, 3))
        compile_alike()
        compiled_here(torch.ones(2, 4))
    with compiled_on_cpu("eager"):
        compiled_here(torch.ones(2, 5))
    assert given == [None, {"deterministic": True}, None]


def _relu(x: Tensor) -> Tensor:
    return x.relu()
