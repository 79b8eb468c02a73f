"""Every compiled function of the layers with arguments that reach all of its branches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_ext.config.run import transformer_fields
from megatron_ext.errors import ConfigError
from megatron_ext.layers import norms, pointwise
from megatron_ext.layers.compiled import Compiled, compiled_on_cpu
from megatron_ext.layers.norms import Norm, NormSpec
from megatron_ext.layers.pointwise import table_of
from megatron_ext.layers.transformer_config import ACTIVATIONS, build_transformer_config
from tests.training_runs import config_of

S, B, H, N, D = 12, 2, 64, 4, 16
RMS: NormSpec = ("RMSNorm", 1e-5, False)
LAYER: NormSpec = ("LayerNorm", 1e-5, False)


@dataclass(frozen=True)
class Size:
    """A tensor to be drawn; ``kind`` says from what: normal, in [0, 1), or positive."""

    shape: tuple[int, ...]
    kind: str = "normal"
    trains: bool = True


def t(*shape: int, kind: str = "normal", trains: bool = True) -> Size:
    return Size(shape, kind, trains)


@dataclass(frozen=True)
class Case:
    """A function and its arguments, tensors by their `Size`."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]

    def drawn(self, device: str = "cpu") -> list[Any]:
        """Return arguments in float64, the same ones each time."""
        generator = torch.Generator().manual_seed(3)
        return [
            _draw(x, generator).to(device) if isinstance(x, Size) else x for x in self.arguments
        ]


def _draw(size: Size, generator: torch.Generator) -> Tensor:
    make = torch.randn if size.kind == "normal" else torch.rand
    x = make(size.shape, generator=generator, dtype=torch.float64)
    if size.kind == "positive":
        x = x + 1
    # Exact in half precision, so that every dtype is given the same numbers.
    return x.bfloat16().double().requires_grad_(size.trains)


def run(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the outputs, then the gradients of all arguments that train."""
    found = function(*arguments)
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    loss: Any = 0
    for number, output in enumerate(outputs):
        weights = torch.sin(torch.arange(output.numel(), dtype=torch.float64) + number)
        loss = loss + (output.double() * weights.view_as(output).to(output.device)).sum()
    trained = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    return *(x.detach() for x in outputs), *gradients


def cast(arguments: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in arguments
    ]


def _norms() -> Iterator[Case]:
    for kind, bias in (("RMSNorm", None), ("LayerNorm", t(H))):
        for zero_centered in (False, True):
            spec = (kind, 1e-5, zero_centered)
            arguments = [t(S, B, H), t(H), bias, spec]
            yield Case(f"{kind} {zero_centered}", norms.normed, arguments)
            name = f"{kind} with residual {zero_centered}"
            yield Case(name, pointwise.norm_with_residual, arguments)
    frozen = [t(S, B, H), t(H, trains=False), None, RMS]
    yield Case("frozen norm with residual", pointwise.norm_with_residual, frozen)


def _residuals() -> Iterator[Case]:
    x, residual = t(S, B, H), t(S, B, H)
    for bias in (None, t(H)):
        name = "bias" if bias else "no bias"
        yield Case(f"add {name}", pointwise.bias_dropout_add, [x, bias, residual, 0.0, True])
        arguments = [x, bias, residual, 0.0, True, t(H), bias, LAYER if bias else RMS]
        yield Case(f"add and norm {name}", pointwise.bias_dropout_add_norm, arguments)
        drawn = t(S, B, H, kind="unit", trains=False)
        masked = [x, bias, residual, drawn, 0.25]
        yield Case(f"masked add {name}", pointwise.masked_bias_dropout_add, masked)


def _activations() -> Iterator[Case]:
    for name in ACTIVATIONS:
        for gated in (False, True):
            wide = [t(S, B, 2 * H), t(2 * H), None, name, gated]
            yield Case(f"{name} gated={gated}", pointwise.activated, wide)
    tokens = [t(S, 2 * H), None, t(S, 1, kind="unit"), "silu", True]
    yield Case("expert", pointwise.activated, tokens)


def _heads() -> Iterator[Case]:
    table = t(S, 1, 1, D // 4, trains=False), t(S, 1, 1, D // 4, trains=False)
    projected = t(S, B, 2 * (N // 2 + 2) * D)
    for interleaved in (False, True):
        plain = [projected, None, 2, D, *table, interleaved, None, None, None, None, None]
        yield Case(f"heads interleaved={interleaved}", pointwise.queries_keys_values, plain)
    bias = t(2 * (N // 2 + 2) * D)
    rms = [projected, bias, 2, D, *table, False, t(D), None, t(D), None, RMS]
    layer = [projected, None, 2, D, None, None, False, t(D), t(D), t(D), t(D), LAYER]
    yield Case("heads with RMSNorm", pointwise.queries_keys_values, rms)
    yield Case("heads with LayerNorm", pointwise.queries_keys_values, layer)


CASES = [*_norms(), *_residuals(), *_activations(), *_heads()]


EXACT = 1e-12
HALF_FACTOR = 1.5
"""The most that half precision may round, as a multiple of the uncompiled function's error."""


QUICK = ("RMSNorm with residual False", "add and norm bias", "heads with RMSNorm")
BY_KERNELS = (*QUICK, "silu gated=True")


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check_exact(case: Case, backend: str) -> None:
    arguments = case.drawn()
    want = run(case.function, arguments)
    with compiled_on_cpu(backend):
        got = run(case.function, arguments)
    for index, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape and error(x, y) < EXACT, index


def check_kernels(case: Case) -> None:
    """Check that kernels are exact, and in half precision no coarser than uncompiled ones."""
    check_exact(case, "inductor")
    arguments = case.drawn()
    truth = run(case.function, arguments)
    half = cast(arguments, torch.bfloat16)
    eager = run(case.function, half)
    with compiled_on_cpu("inductor"):
        compiled = run(case.function, half)
    for index, (x, y, want) in enumerate(zip(compiled, eager, truth, strict=True)):
        assert x.dtype == y.dtype
        assert error(x, want) <= HALF_FACTOR * error(y, want) + 1e-3, index


def over(cases: Sequence[Case], quick: Sequence[str]) -> pytest.MarkDecorator:
    """Run a test over cases, of which those that are not quick are slow."""
    marked = [x if x.name in quick else pytest.param(x, marks=pytest.mark.slow) for x in cases]
    return pytest.mark.parametrize("case", marked, ids=lambda case: case.name)


@over(CASES, QUICK)
def test_graphs_are_exact(case: Case) -> None:
    check_exact(case, "aot_eager")


def test_statistics_of_a_norm_give_its_gradients() -> None:
    """Uncompiled; whether the gain is centred, frozen or has a bias."""
    with mock.patch.object(Compiled, "_compile", lambda self: self.eager):
        for case in _norms():
            check_exact(case, "eager")


def rotate(x: Tensor, angles: Tensor, *, neighbours: bool) -> Tensor:
    """Rotate pairs of channels of ``[s, b, n, d]`` as complex numbers by angles ``[s, pairs]``."""
    width = 2 * angles.size(-1)
    if neighbours:
        first, second = x[..., :width:2], x[..., 1:width:2]
    else:
        first, second = x[..., : width // 2], x[..., width // 2 : width]
    phases = torch.polar(torch.ones_like(angles), angles)[:, None, None]
    turned = torch.complex(first, second) * phases
    parts = turned.real, turned.imag
    both = torch.stack(parts, -1).flatten(-2) if neighbours else torch.cat(parts, -1)
    return torch.cat([both, x[..., width:]], -1)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("kind", [None, "LayerNorm", "RMSNorm"])
def test_heads_are_cut_normalized_and_rotated_as_the_formulas_say(
    kind: str | None, neighbours: bool
) -> None:
    """Each query group is its queries, one key and one value, of which the values stay."""
    groups, per_group = 2, 3
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    projected, bias = drawn(S, B, groups * (per_group + 2) * D), drawn(groups * (per_group + 2) * D)
    angles = drawn(S, D // 4)
    twice = angles.repeat_interleave(2, 1) if neighbours else torch.cat((angles, angles), 1)
    table = pointwise.rotary_table(twice[:, None, None], torch.float64, neighbours)
    weights: list[Any] = [None] * 5
    if kind is not None:
        weights = [drawn(D), drawn(D), drawn(D), drawn(D), (kind, 1e-3, True)]
    if kind == "RMSNorm":
        weights[1] = weights[3] = None
    found = pointwise.queries_keys_values(projected, bias, groups, D, *table, neighbours, *weights)
    heads = (projected + bias).view(S, B, groups, per_group + 2, D)
    want = [heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]]
    for index in range(2 if kind is not None else 0):
        x, gain, shift = want[index], 1 + weights[2 * index], weights[2 * index + 1]
        if kind == "LayerNorm":
            want[index] = F.layer_norm(x, (D,), gain, shift, 1e-3)
        else:
            want[index] = F.rms_norm(x, (D,), gain, 1e-3)
    want[:2] = [rotate(x, angles, neighbours=neighbours) for x in want[:2]]
    for mine, truth in zip(found, want, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
        assert mine.is_contiguous()


def test_an_experts_result_keeps_its_dtype_when_a_router_is_more_precise() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(S, 2 * H, generator=generator).bfloat16()
    scale = torch.rand(S, 1, generator=generator)
    found = pointwise.activated(x, None, scale, "silu", True)
    unscaled = pointwise.activated(x, None, None, "silu", True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (unscaled.float() * scale).bfloat16())


def test_the_magnitude_of_a_table_is_that_of_both_parts() -> None:
    angles = torch.randn(S, 1, 1, 8, dtype=torch.float64)
    for interleaved in (False, True):
        once = angles[..., ::2] if interleaved else angles[..., :4]
        cos, sin = pointwise.rotary_table(angles, torch.float32, interleaved, 1.5)
        torch.testing.assert_close(cos, (1.5 * once.cos()).float())
        torch.testing.assert_close(sin, (1.5 * once.sin()).float())


@over([x for x in CASES if x.name in BY_KERNELS], ())
def test_kernels_are_exact_and_in_half_precision_no_coarser(case: Case) -> None:
    check_kernels(case)


@pytest.mark.parametrize("normed", [False, True])
def test_dropout_drops_its_share_and_gradients_follow_the_mask(normed: bool) -> None:
    x = torch.ones(64, 4, 128, requires_grad=True)
    residual = torch.zeros(64, 4, 128)
    arguments = (x, None, residual, 0.25, True)
    with compiled_on_cpu():
        if normed:
            out, _ = pointwise.bias_dropout_add_norm(*arguments, torch.ones(128), None, RMS)
        else:
            out = pointwise.bias_dropout_add(*arguments)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    kept = out.detach() != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    torch.testing.assert_close(out.detach(), kept / 0.75)
    torch.testing.assert_close(gradient, kept / 0.75)


def config(**changes: Any) -> TransformerConfig:
    sizes = dict(num_layers=1, hidden_size=24, num_attention_heads=2)
    return TransformerConfig(**{**sizes, **changes})


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients_follow_the_formula(normalization: str, zero_centered: bool) -> None:
    torch.manual_seed(1)
    norm = Norm(
        config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered), 24, 1e-3
    ).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.1 * torch.randn(24))
    x = torch.randn(5, 3, 24, dtype=torch.float64, requires_grad=True)
    out = norm(x)
    y = x.detach().clone().requires_grad_()
    gain = norm.weight.detach().clone().requires_grad_()
    centred = y - y.mean(-1, keepdim=True) if normalization == "LayerNorm" else y
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    want = want * (gain + 1 if zero_centered else gain)
    if normalization == "LayerNorm":
        want = want + norm.bias
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    want.backward(cotangent)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.weight.grad, gain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_same_bits_and_names_as_cores_torch_norm(normalization: str, dtype: torch.dtype) -> None:
    ours = Norm(config(normalization=normalization), 24, 1e-5).to(dtype)
    theirs = WrappedTorchNorm(config(normalization=normalization), 24, 1e-5).to(dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(7, 24).to(dtype)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_zero_centered_gain_starts_as_the_identity(normalization: str) -> None:
    plain = Norm(config(normalization=normalization), 24)
    centred = Norm(config(normalization=normalization, layernorm_zero_centered_gamma=True), 24)
    assert not centred.weight.any()
    x = torch.randn(4, 24)
    assert torch.equal(plain(x), centred(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_say_whether_core_must_sum_their_gradients(sequence_parallel: bool) -> None:
    norm = Norm(config(sequence_parallel=sequence_parallel, tensor_model_parallel_size=2), 24)
    marks = [parameter.sequence_parallel for parameter in norm.parameters()]
    assert marks == [sequence_parallel] * 2


def test_an_unknown_norm_is_refused() -> None:
    strange = config()
    strange.normalization = "L2Norm"
    with pytest.raises(ConfigError, match=r"`--normalization` \(L2Norm\) must be LayerNorm or"):
        Norm(strange, 24)


WORDS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --transformer-impl torch"
).split()


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("", ""),
        ("--no-persist-layer-norm", "norm"),
        ("--no-bias-gelu-fusion", "activation"),
        ("--no-bias-swiglu-fusion", ""),
        ("--swiglu --no-bias-swiglu-fusion", "activation"),
        ("--swiglu --no-bias-gelu-fusion", ""),
        ("--no-rope-fusion", "rotary"),
        ("--no-bias-dropout-fusion", "bias_dropout"),
    ],
)
def test_each_flag_leaves_out_its_part(words: str, without: str) -> None:
    fusions = asdict(build_transformer_config(config_of([*WORDS, *words.split()])).fusions)
    assert [name for name, wanted in fusions.items() if not wanted] == without.split()


@pytest.mark.parametrize("word", ["--no-compile", "--disable-jit-fuser"])
def test_one_flag_switches_compilation_off(word: str) -> None:
    assert config_of(WORDS, device="cuda").model.compile
    assert not config_of([*WORDS, word], device="cuda").model.compile


@pytest.mark.parametrize(
    ("words", "fuses"),
    [
        ("", True),
        ("--disable-bias-linear", False),
        ("--no-bias-gelu-fusion", False),
        ("--swiglu", True),
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --disable-bias-linear --num-experts 2", True),
        ("--swiglu --num-experts 2", False),
        ("--num-experts 2", False),
        ("--squared-relu", False),
        ("--quick-geglu", False),
    ],
)
def test_cores_compiled_activation_is_asked_for_where_core_has_it(words: str, fuses: bool) -> None:
    """Transformer Engine's layers have megatron-core's MLP, which raises elsewhere."""
    config = config_of([*WORDS, *words.split()])
    engine = replace(config.model, transformer_impl="transformer_engine")
    fields = transformer_fields(replace(config, model=engine, device="cuda"))
    assert fields["bias_activation_fusion"] is fuses
    assert transformer_fields(config)["bias_activation_fusion"] is False


def test_a_table_made_in_inference_mode_serves_training_too() -> None:
    angles = torch.randn(S, 1, 1, 8)
    with torch.inference_mode():
        table = table_of(angles, torch.float32, interleaved=False)
    assert table_of(angles, torch.float32, interleaved=False) is table
    x = torch.randn(S, B, 2, 8, requires_grad=True)
    pointwise.rotated(x, *table, False).sum().backward()
    assert x.grad is not None
