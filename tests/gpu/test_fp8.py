"""A GPU's 8-bit products: the loss curve beside bf16's, the CPU's arithmetic, and their memory."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.rates import has_fp8
from megatron_ext.layers.fp8.casting import Function, cast_by_magnitude, cast_with
from megatron_ext.layers.fp8.linear import KeptWeights, fp8_linear
from megatron_ext.layers.fp8.matrices import (
    E4M3,
    E5M2,
    Layouts,
    Quantized,
    Wanted,
    arguments,
    product,
    quantize,
    quantize_with,
)
from megatron_ext.layers.fp8.scaling import RECIPES, Parts
from megatron_ext.layers.weight_gradients import LinearCall
from tests.gpu.runs import losses, one_gpu, train
from tests.layers.fp8.test_matrices import FUNCTIONS, matrix
from tests.layers.fp8.test_product import VIOLATIONS, matrices, operands, quantized
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

STEPS = 200
LAST = 10
SIZE = (
    "--bf16 --hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 "
    "--ffn-hidden-size 2816 --seq-length 512 --max-position-embeddings 512 "
    "--global-batch-size 4 --lr 3e-4"
)
RECIPE_FLAGS = {
    "delayed": "--fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "tensorwise": "--fp8-recipe tensorwise",
    "rowwise": "--fp8-recipe rowwise",
}


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if not has_fp8(torch.device("cuda", 0)):
        pytest.skip("this GPU has no 8-bit products")


def curve(
    save: Path,
    *more: str,
    on: Literal["cuda", "cpu"] = "cuda",
    steps: int = STEPS,
    size: str = SIZE,
) -> list[float]:
    """Return losses of a run in bf16, with 8-bit products where ``more`` asks for them."""
    words = " ".join([size, f"--train-iters {steps} --lr-decay-iters {max(12, steps)}", *more])
    return losses(train([*TINY, *mock_data(), *words.split()], save, on=on))


def check_curve(fp8: list[float], bf16: list[float]) -> None:
    """Check that means of the last steps are within 1%, and that the model has learnt."""
    assert len(fp8) == len(bf16) and all(map(math.isfinite, fp8))
    got, want = (sum(run[-LAST:]) / len(run[-LAST:]) for run in (fp8, bf16))
    print(f"fp8 {got:.5f}, bf16 {want:.5f}, began at {bf16[0]:.5f}")
    assert want < bf16[0]
    assert fp8 != bf16
    assert got == pytest.approx(want, rel=0.01)


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return curve(tmp_path_factory.mktemp("bf16"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_200_steps_end_near_bf16(recipe: str, in_bf16: list[float], tmp_path: Path) -> None:
    check_curve(curve(tmp_path, "--fp8-format hybrid", RECIPE_FLAGS[recipe]), in_bf16)


def layer(recipe: str, device: str, tokens: int = 40) -> list[torch.Tensor]:
    """Return output and both gradients of one layer; its tokens do not divide by 16."""
    generator = torch.Generator().manual_seed(1)
    x, weight, gradient = (
        torch.randn(sides, generator=generator).bfloat16().to(device).requires_grad_()
        for sides in ((tokens, 256), (512, 256), (tokens, 512))
    )
    with one_gpu() as context:
        scaling = RECIPES[recipe](
            Fp8Config(fp8_format="hybrid", fp8_recipe=recipe),
            Parts(context.pgs, cuts_input=False, varies=tokens % 16 > 0),
        ).to(device)
        with KeptWeights([scaling]).kept():
            call = LinearCall(weight, scaling=scaling)
            output = fp8_linear(x, weight, None, call)
            output.backward(gradient.detach())
    return [result.detach().float().cpu() for result in (output, x.grad, weight.grad)]


@pytest.mark.parametrize("tokens", [64, 40])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_gives_the_numbers_of_a_cpu(recipe: str, tokens: int) -> None:
    """But for the order of sums, bf16, and casts that an ulp of a scale moves by one number."""
    for got, want in zip(layer(recipe, "cuda", tokens), layer(recipe, "cpu", tokens), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.01


def test_the_input_that_waits_takes_half_of_its_bytes() -> None:
    tokens, width = 8192, 4096
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with one_gpu() as context:
        parts = Parts(context.pgs, cuts_input=False)
        scaling = RECIPES["tensorwise"](
            Fp8Config(fp8_format="hybrid", fp8_recipe="tensorwise"), parts
        ).cuda()
        call = LinearCall(weight, scaling=scaling)
        fp8_linear(x, weight, None, call)  # compiles
        before = torch.cuda.memory_allocated()
        output = fp8_linear(x, weight, None, call)
        kept = torch.cuda.memory_allocated() - before - output.numel() * output.element_size()
    assert tokens * width <= kept < 1.1 * tokens * width


def there(q: Quantized) -> Quantized:
    return Quantized(q.values.cuda(), q.scale.cuda())


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_gives_a_cpus_numbers(dtype: torch.dtype, by_rows: bool, fast: bool) -> None:
    a, b = matrices(8)
    qa, qb = quantized(a, dtype, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
    got = product(there(qa), there(qb), torch.bfloat16, fast=fast).cpu().float()
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    tolerance = 2.0**-8 + (2.0**-11 if fast else 0)
    assert ((got - product(qa, qb, torch.float32)).abs() <= tolerance * size).all()


def test_one_scale_may_give_float32() -> None:
    a, b = matrices(9)
    qa, qb = quantized(a, E5M2, by_rows=False), quantized(b, E4M3, by_rows=False)
    got = product(there(qa), there(qb), torch.float32).cpu()
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    # Tensor cores keep fewer bits of a sum than float32 has.
    assert ((got - product(qa, qb, torch.float32)).abs() <= 2.0**-11 * size).all()
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_the_gpu_refuses_what_we_refuse(rule: str) -> None:
    """So that no rule of `check_layout` is idle on the GPUs of today, but for newer layouts."""
    if torch.cuda.get_device_capability() >= (10, 0) and "lies" in rule:
        pytest.skip("newer GPUs multiply matrices in any layout")
    given: dict[str, Any] = operands()
    for name, change in VIOLATIONS[rule].items():
        given[name] = change(given[name])
    if rule == "the second is in e4m3":
        given["a"] = given["a"].float().to(E5M2)  # Of two in e5m2 it is the GPU that says no.
    moved = {name: x.cuda() if torch.is_tensor(x) else x for name, x in given.items()}
    with pytest.raises((RuntimeError, ValueError)):
        torch._scaled_mm(moved.pop("a"), moved.pop("b"), **moved)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_pass_gives_the_numbers_of_a_cpu(name: str) -> None:
    function, more = FUNCTIONS[name]
    moved = [value.cuda() if torch.is_tensor(value) else value for value in more]
    for x in (matrix(256, 128), matrix(21, 32)):
        got = Function(function)(x.cuda(), *moved)
        want = function(x, *more)
        # A GPU's division may round differently, which moves a number to the next one at most.
        assert torch.allclose(got.scale.cpu(), want.scale, rtol=1e-6)
        assert apart(got[2:], want[2:]) < 1e-3


def apart(got: Layouts, want: Layouts) -> float:
    """Return the share of numbers that differ; NaN counts as equal to NaN."""
    differ = []
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.stride() == theirs.stride()
            a, b = ours.cpu().float(), theirs.float()
            differ.append((a != b) & ~(a.isnan() & b.isnan()))
    return float(torch.cat([x.flatten() for x in differ]).float().mean())


@pytest.mark.parametrize("wanted", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_the_kernels_give_the_numbers_of_a_cpu(
    of: torch.dtype, dtype: torch.dtype, wanted: Wanted
) -> None:
    for m, k in ((256, 128), (21, 48), (1000, 336)):
        x, scale, noted = matrix(m, k, of), torch.tensor(1.7), torch.tensor(0.0)
        x[0, 3], x[m // 2, 5] = torch.nan, torch.inf
        there_noted = noted.cuda()
        got = cast_with(x.cuda(), scale.cuda(), dtype, wanted, there_noted)
        assert apart(got, quantize_with(x, scale, dtype, wanted, noted)) == 0
        assert there_noted.isnan() and noted.isnan()
        x = matrix(m, k, of)
        by = cast_by_magnitude(x.cuda(), scale.cuda(), dtype, wanted, varies=False)
        want = quantize(x, scale, dtype, None, wanted)
        assert torch.equal(by.scale.cpu(), want.scale) and apart(by[2:], want[2:]) == 0


def test_a_cast_is_one_kernel() -> None:
    x, scale = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16), torch.ones(2).cuda()
    cast_with(x, scale[0], E4M3, "both", scale[1])
    with torch.profiler.profile() as profile:
        cast_with(x, scale[0], E4M3, "both", scale[1])
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(events) == 1, [event.name for event in events]


def test_arguments_of_a_product_copy_nothing() -> None:
    a, b = matrices(10)
    qa, qb = there(quantized(a, E4M3, by_rows=True)), there(quantized(b, E4M3, by_rows=True))
    given = arguments(qa, qb, torch.bfloat16)
    assert given["a"].data_ptr() == qa.values.data_ptr()
    assert given["b"].data_ptr() == qb.values.data_ptr()
