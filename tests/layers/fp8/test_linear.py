"""A parallel linear layer in 8 bits: float64, every layout, and put-off weight gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.precision import Fp8Config
from megatron_ext.layers.fp8 import linear
from megatron_ext.layers.fp8.linear import KeptWeights, fp8_linear
from megatron_ext.layers.fp8.matrices import Quantized, arguments, product
from megatron_ext.layers.fp8.scaling import RECIPES, Parts, Role, Scaling
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.layers.weight_gradients import DeferredWeightGradients, LinearCall
from tests.layers import plain
from tests.layers.fp8.test_product import error_of_product, torch_takes
from tests.ranks import ParallelContext, on_ranks

S, B, IN, OUT = 16, 2, 32, 64


class Whole(Parts):
    """The parts of a layer on one rank, which needs no groups."""

    def __init__(self) -> None:
        self.varies = False

    def of_tensor(self, role: Role) -> None:
        return None

    of_rows = of_columns = of_tensor

    def of_step(self) -> tuple[()]:
        return ()


def scaling_of(recipe: str, parts: Parts | None = None, **flags: Any) -> Scaling:
    config = Fp8Config(fp8_format="hybrid", fp8_recipe=recipe, **flags)
    return RECIPES[recipe](config, parts or Whole())


def tensors(dtype: torch.dtype = torch.float32, s: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """Return input ``[s, b, in]``, weight ``[out, in]`` and gradient of the output."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(s, B, IN, generator=generator) * torch.logspace(-2, 1, s)[:, None, None]
    weight = 0.1 * torch.randn(OUT, IN, generator=generator)
    gradient = 1e-6 * torch.randn(s, B, OUT, generator=generator)
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def whole_layer(scaling: Scaling, dtype: torch.dtype = torch.float32, s: int = S) -> list[Tensor]:
    x, weight, gradient = tensors(dtype, s)
    x.requires_grad_()
    weight.requires_grad_()
    output = fp8_linear(x, weight, None, LinearCall(weight, scaling=scaling))
    output.backward(gradient)
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("s", [S, 5, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products_within_the_error_of_the_formats(recipe: str, s: int) -> None:
    """An expert's numbers of tokens are among them, which no product could sum over as they are."""
    scaling = scaling_of(recipe)
    got = whole_layer(scaling, s=s)
    x, weight, gradient = tensors(s=s)
    flat, outer = x.flatten(0, 1), gradient.flatten(0, 1)

    def columns(matrix: Tensor, role: Role) -> Quantized:
        return scaling.columns(matrix, role, scaling.rows(matrix, role).scale)

    forward = flat, weight, scaling.rows(flat, Role.INPUT), scaling.rows(weight, Role.WEIGHT)
    of_input = (outer, weight.t(), scaling.rows(outer, Role.GRADIENT), columns(weight, Role.WEIGHT))
    of_weight = (outer.t(), flat.t(), columns(outer, Role.GRADIENT), columns(flat, Role.INPUT))
    for result, (a, b, qa, qb) in zip(got, (forward, of_input, of_weight), strict=True):
        want = a.double() @ b.double().t()
        error = (result.reshape(want.shape).double() - want).abs()
        assert (error <= error_of_product(a, b, qa, qb)).all()
        assert error.any()


def test_gradients_are_in_e5m2_only_in_hybrid() -> None:
    assert scaling_of("tensorwise").formats[Role.GRADIENT] == torch.float8_e5m2
    plain_format = Fp8Config(fp8_format="e4m3", fp8_recipe="tensorwise")
    assert Scaling(plain_format, Whole()).formats[Role.GRADIENT] == torch.float8_e4m3fn


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_in_the_dtype_of_the_run(recipe: str) -> None:
    x, _, gradient = tensors()
    want = gradient.flatten(0, 1).t() @ x.flatten(0, 1)
    assert torch.equal(whole_layer(scaling_of(recipe, fp8_wgrad=False))[2], want)
    assert not torch.equal(whole_layer(scaling_of(recipe))[2], want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_put_off_weight_gradients_are_the_same(recipe: str) -> None:
    want = whole_layer(scaling_of(recipe))
    x, weight, gradient = tensors()
    x.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    queue = DeferredWeightGradients()
    call = LinearCall(parameter, queue, scaling=scaling_of(recipe))
    output = fp8_linear(x, parameter, None, call)
    with queue.collect((0, 0)):
        output.backward(gradient)
    assert parameter.grad is None
    queue.compute((0, 0))
    for got, expected in zip([output, x.grad, parameter.grad], want, strict=True):
        assert torch.equal(got, expected)


def test_bias_is_added_and_has_its_gradient() -> None:
    x, weight, gradient = tensors()
    bias = torch.arange(float(OUT), requires_grad=True)
    call = LinearCall(weight, scaling=scaling_of("tensorwise"))
    output = fp8_linear(x, weight, bias, call)
    output.backward(gradient)
    without = fp8_linear(x, weight, None, call)
    assert torch.equal(output, without + bias)
    assert torch.equal(bias.grad, gradient.flatten(0, 1).sum(0))


def test_the_backward_pass_waits_for_8_bits_and_with_a_frozen_weight_for_no_input() -> None:
    saved: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    x, weight, gradient = tensors(torch.bfloat16)
    call = LinearCall(weight, scaling=scaling_of("tensorwise"))
    with keep:
        output = fp8_linear(x.requires_grad_(), weight, None, call)
    assert [t.shape for t in saved] == [weight.shape, torch.Size([])]
    output.backward(gradient)
    assert torch.equal(x.grad, whole_layer(scaling_of("tensorwise"), torch.bfloat16)[1])
    saved.clear()
    with keep:
        fp8_linear(x.detach(), weight.requires_grad_(), None, call)
    sizes = {tuple(t.shape): t.dtype for t in saved if t is not weight and t.dim() == 2}
    assert sizes[(S * B, IN)] == torch.float8_e4m3fn


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_change_nothing(recipe: str) -> None:
    weight = torch.nn.Parameter(tensors()[1])
    scaling = scaling_of(recipe)
    x = torch.zeros(0, IN, requires_grad=True)
    output = fp8_linear(x, weight, None, LinearCall(weight, scaling=scaling))
    assert output.shape == (0, OUT)
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, IN)
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("puts_off", [False, True])
def test_weight_gradients_go_to_the_main_gradient_unrounded(recipe: str, puts_off: bool) -> None:
    """The gradients of a step are summed in float32 there."""
    x, weight, gradient = tensors(torch.bfloat16)
    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad = torch.ones(OUT, IN)
    parameter.grad_added_to_main_grad = False
    exact = whole_layer(scaling_of(recipe), torch.bfloat16)[2]
    queue = DeferredWeightGradients() if puts_off else None
    x.requires_grad_()
    call = LinearCall(parameter, queue, True, scaling=scaling_of(recipe))
    for _ in range(2):
        fp8_linear(x, parameter, None, call).backward(2.0**20 * gradient)
    added = (parameter.main_grad - 1) / 2
    assert torch.allclose(added, 2.0**20 * exact.float(), rtol=2.0**-8, atol=0)
    assert not torch.equal(added, added.bfloat16().float())
    assert parameter.grad_added_to_main_grad != puts_off
    assert puts_off or parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("puts_off", [False, True])
def test_the_first_product_of_a_step_overwrites_the_old_gradient(
    recipe: str, puts_off: bool, wgrad: bool
) -> None:
    """The sums equal those in a buffer of zeros; NaN stands for the gradient of the step before."""
    x, weight, gradient = tensors(torch.bfloat16)
    found = []
    for overwrite in (False, True):
        parameter: Any = torch.nn.Parameter(weight.clone())
        parameter.main_grad = torch.full((OUT, IN), torch.nan if overwrite else 0.0)
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
        queue = DeferredWeightGradients() if puts_off else None
        call = LinearCall(parameter, queue, True, scaling=scaling_of(recipe, fp8_wgrad=wgrad))
        for _ in range(2):
            own = x.clone().requires_grad_()
            fp8_linear(own, parameter, None, call).backward(gradient)
            assert not parameter.overwrite_main_grad
            found.append(parameter.main_grad.clone())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert found[0].any()


@pytest.mark.parametrize("s", [S, 5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_takes_the_products(recipe: str, s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    products = []

    def checked(a: Quantized, b: Quantized, dtype: torch.dtype, **more: Any) -> Tensor:
        given = arguments(a, b, dtype)
        assert torch_takes(given)
        products.append((given["out_dtype"], more.get("fast", False)))
        return product(a, b, dtype, **more)

    monkeypatch.setattr(linear, "product", checked)
    x, weight, gradient = tensors(torch.bfloat16, s)
    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros(OUT, IN)
    call = LinearCall(parameter, None, True, scaling=scaling_of(recipe))
    fp8_linear(x.requires_grad_(), parameter, None, call).backward(gradient)
    of_weight = torch.bfloat16 if recipe == "rowwise" else torch.float32
    assert products == [(torch.bfloat16, True), (torch.bfloat16, False), (of_weight, False)]


def layer_of(
    kind: type, context: ParallelContext, recipe: str, *, sequence_parallel: bool
) -> ColumnParallelLinear | RowParallelLinear:
    transformer_config = TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=4,
        tensor_model_parallel_size=context.pgs.tp.size(),
        context_parallel_size=context.pgs.cp.size(),
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
    )
    is_row = kind is RowParallelLinear
    more = {"input_is_parallel": True, "skip_bias_add": True} if is_row else {}
    layer = kind(
        IN,
        OUT,
        config=transformer_config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        tp_group=context.pgs.tp,
        **more,
    )
    parts = Parts(context.pgs, cuts_input=is_row, cuts_sequence=sequence_parallel and not is_row)
    layer.fp8 = scaling_of(recipe, parts)
    weight = tensors()[1]
    tp = context.pgs.tp
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(tp.size(), dim=1 if is_row else 0)[tp.rank()])
    return layer  # type: ignore[no-any-return]


def near(got: Tensor, want: Tensor) -> None:
    """Check that tensors are equal but for the order of sums in float32."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()


def check_layer(context: ParallelContext, kind: type, sequence_parallel: bool) -> None:
    tp, cp = context.pgs.tp, context.pgs.cp
    is_row = kind is RowParallelLinear

    def part(t: Tensor, *, of_features: bool) -> Tensor:
        t = plain.zigzag(t, cp.rank(), cp.size()) if cp.size() > 1 else t
        if not of_features and not sequence_parallel:
            return t
        return t.chunk(tp.size(), dim=-1 if of_features else 0)[tp.rank()]

    entering, leaving = partial(part, of_features=is_row), partial(part, of_features=not is_row)
    for recipe in RECIPES:
        output, of_input, of_weight = whole_layer(scaling_of(recipe))
        x, _, gradient = tensors()
        layer = layer_of(kind, context, recipe, sequence_parallel=sequence_parallel)
        own = entering(x).clone().requires_grad_()
        got, _ = layer(own)
        near(got, leaving(output))
        got.backward(leaving(gradient))
        near(own.grad, entering(of_input))
        whole = layer.weight.grad.clone()
        torch.distributed.all_reduce(whole, group=cp)
        near(whole, of_weight.chunk(tp.size(), dim=1 if is_row else 0)[tp.rank()])


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False), ({"tp": 2, "cp": 2}, True)],
)
def test_layouts_compute_what_one_rank_computes(
    layout: dict[str, int], sequence_parallel: bool, kind: type
) -> None:
    on_ranks(check_layer, layout, kind=kind, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_casts_a_weight_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = whole_layer(scaling_of(recipe))
    x, weight, gradient = tensors()
    parameter = torch.nn.Parameter(weight)
    scaling = scaling_of(recipe)
    call = LinearCall(parameter, scaling=scaling)
    casts: list[Role] = []
    pair = scaling.pair

    def counted(x: Tensor, role: Role, *, columns: bool) -> Any:
        casts.append(role)
        return pair(x, role, columns=columns)

    monkeypatch.setattr(scaling, "pair", counted)
    monkeypatch.setattr(scaling, "columns", None if recipe != "rowwise" else scaling.columns)
    weights = KeptWeights([torch.nn.ModuleDict({"layer": scaling})])
    with weights.kept():
        for _ in range(3):
            entered = x.clone().requires_grad_()
            parameter.grad = None
            output = fp8_linear(entered, parameter, None, call)
            output.backward(gradient)
            for got, expected in zip([output, entered.grad, parameter.grad], want, strict=True):
                assert torch.equal(got, expected)
    assert casts.count(Role.WEIGHT) == 1 and casts.count(Role.INPUT) == 3
    assert scaling.kept_weight is None
    with torch.no_grad():
        parameter.mul_(2)
        assert torch.equal(fp8_linear(x, parameter, None, call), 2 * want[0])


def test_weights_are_let_go_after_an_error() -> None:
    scaling = scaling_of("tensorwise")
    with pytest.raises(RuntimeError), KeptWeights([scaling]).kept():
        scaling.weight(tensors()[1])
        assert scaling.kept_weight is not None
        raise RuntimeError
    assert scaling.kept_weight is None and not scaling.keeps_weight
