"""Norms against their formulas in double precision, and under sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_ext.errors import ConfigError
from megatron_ext.layers.pointwise import Norm


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
def test_same_bits_and_names_as_megatron_cores_torch_norm(
    normalization: str, dtype: torch.dtype
) -> None:
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
