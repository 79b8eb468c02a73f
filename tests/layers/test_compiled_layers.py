"""Layers with compiled parts compute what plain layers do, and are compiled no more than needed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megatron_ext.layers import pointwise
from megatron_ext.layers.compiled import Compiled, compiled_on_cpu
from megatron_ext.layers.dropout import microbatch_masks
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.transformer_layer import get_bias_dropout_add
from megatron_ext.parallel.context import ParallelContext, seed_everything
from tests.layers.test_compiled import odd
from tests.layers.test_layers import HEADS, SMALL, B, H, S, check_block, torch_block
from tests.ranks import ranks

GATED = {"gated_linear_unit": True, "bias_activation_fusion": False}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "qk norm": {"qk_layernorm": True, "activation_func": F.silu, **GATED},
    "biases": {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True},
    "qk LayerNorm": {"normalization": "LayerNorm", "qk_layernorm": True},
    "zero-centred": {"layernorm_zero_centered_gamma": True},
    "squared ReLU": {"activation_func": squared_relu, "add_bias_linear": True},
    "quick GEGLU": {"activation_func": quick_gelu, **GATED},
    "interleaved": {"rotary_interleaved": True},
    "gates of heads": {"attention_output_gate": True, "qk_layernorm": True},
    "recomputed mlp": {**SELECTIVE, "recompute_modules": ["mlp"]},
    "recomputed attention": {**SELECTIVE, "recompute_modules": ["core_attn"]},
    "recomputed": FULL,
    "same masks": {"deterministic_dropout": True, "hidden_dropout": 0.2},
    "experts": {
        "num_moe_experts": 2,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "activation_func": F.silu,
        **GATED,
    },
}


def gradients(context: ParallelContext, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return output, gradient of the input and of every parameter, in double precision."""
    base = {**SMALL, "bias_dropout_fusion": True, **changes}
    transformer_config = StepTransformerConfig(
        **base, tensor_model_parallel_size=context.pgs.tp.size()
    )
    seed_everything(context, 5)
    block = torch_block(transformer_config, context)
    block.double().train()
    torch.manual_seed(7)
    for name, parameter in block.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
    kinds = 2 if changes.get("has_local_rotary") else 1
    angles = torch.randn(S, 1, kinds, 1, dtype=torch.float64).expand(S, 1, kinds, H // HEADS)
    with microbatch_masks(3, 40):
        out = block(x, None, rotary_pos_emb=angles.contiguous())
        weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
        (out * weights).sum().backward()
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": x.grad, **found}


def check(context: ParallelContext, changes: dict[str, Any]) -> None:
    want = gradients(context, changes)
    calls: list[str] = []
    own = pointwise.bias_dropout_add_norm

    def counted(*args: Any) -> Any:
        calls.append("fused")
        return own(*args)

    pointwise.bias_dropout_add_norm = counted  # type: ignore[assignment]
    try:
        with compiled_on_cpu():
            got = gradients(context, changes)
    finally:
        pointwise.bias_dropout_add_norm = own
    adds_apart = changes.get("deterministic_dropout") or changes.get("sandwich_norm")
    assert calls or adds_apart, "no layer was fused"
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "name",
    [name if name == "biases" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
@ranks()
def test_compiled_layers_give_the_same_gradients(context: ParallelContext, name: str) -> None:
    check(context, VARIANTS[name])


@contextmanager
def uncompiled() -> Iterator[None]:
    """Call the functions that a GPU compiles, ours and megatron-core's, as they are written."""
    as_written = mock.patch.object(Compiled, "_compile", lambda self: self.eager)
    with as_written, mock.patch.object(torch.compiler, "set_stance", return_value=nullcontext()):
        yield


UNCOMPILED: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "experts with biases": {
        **VARIANTS["experts"],
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": None,
    },
    "sandwich norms and biases": {"sandwich_norm": True, "add_bias_linear": True},
    "a larger magnitude": {"rotary_magnitude": 1.3},
    "recomputed mlp with biases": {**VARIANTS["recomputed mlp"], "add_bias_linear": True},
    "windows with angles of their own": {
        "has_local_rotary": True,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
    },
}


@ranks()
def test_fused_layers_give_the_same_gradients_uncompiled(context: ParallelContext) -> None:
    """The parts that are compiled on a GPU are called as they are written."""
    for name, changes in UNCOMPILED.items():
        with uncompiled():
            try:
                check(context, changes)
            except AssertionError as error:
                raise AssertionError(name) from error


@ranks(tp=2)
def test_one_group_of_keys_on_two_ranks_is_not_fused(context: ParallelContext) -> None:
    with uncompiled():
        check(context, {"num_query_groups": 1})
        check(context, {"num_query_groups": 2})


@ranks()
def test_a_layer_that_was_fused_runs_by_kernels_too(context: ParallelContext) -> None:
    """The projection's bias is then added by the layer itself."""
    changes = {"add_bias_linear": True, "add_qkv_bias": True, "bias_dropout_fusion": True}
    block = torch_block(StepTransformerConfig(**{**SMALL, **changes}), context).eval()
    for name, parameter in block.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    x = torch.randn(S, B, H)
    want = block(x, None)
    with uncompiled(), compiled_on_cpu("eager"):
        torch.testing.assert_close(block(x, None), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(block(x, None), want)


@pytest.mark.parametrize("bias", [None, torch.full((H,), 2.0**-9)])
def test_a_float32_residual_stream_is_not_rounded(bias: Tensor | None) -> None:
    x = torch.ones(S, B, H, dtype=torch.bfloat16)
    residual = torch.full((S, B, H), 2.0**-12)
    for fused in (False, True):
        add = get_bias_dropout_add(training=False, fused=fused)
        found = add((x, bias), residual, 0.5)
        assert torch.equal(found, residual + (x if bias is None else x + bias))
        assert found.dtype == torch.float32


@pytest.mark.slow
@ranks(tp=2)
def test_two_ranks_give_the_same(context: ParallelContext) -> None:
    check(context, VARIANTS["qk norm"])


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@ranks()
def test_one_rank_is_plain_arithmetic(context: ParallelContext, normalization: str) -> None:
    with compiled_on_cpu():
        check_block(context, normalization=normalization)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@ranks(tp=2)
def test_two_ranks_are_plain_arithmetic(context: ParallelContext, sequence_parallel: bool) -> None:
    with compiled_on_cpu():
        check_block(context, sequence_parallel=sequence_parallel)


def called(chunk: torch.nn.Module) -> set[str]:
    """Return a set that fills with the names of modules whose hooks are called."""
    names: set[str] = set()
    for name, module in chunk.named_modules():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: names.add(name), with_kwargs=True
        )
    return names


def holders(chunk: torch.nn.Module) -> set[str]:
    return {n for n, m in chunk.named_modules() if any(True for _ in m.parameters(recurse=False))}


@ranks()
def test_data_parallelism_is_told_of_every_weight_that_is_used(context: ParallelContext) -> None:
    """Data parallelism waits for a gathered weight when the module that holds it is called."""
    transformer_config = StepTransformerConfig(**SMALL, qk_layernorm=True)
    block = torch_block(transformer_config, context)
    names = called(block)
    with compiled_on_cpu("eager"):
        block(torch.randn(S, B, H), None)
    assert names >= holders(block)


@ranks()
def test_layers_compile_as_often_after_a_transposed_embedding(context: ParallelContext) -> None:
    block = torch_block(StepTransformerConfig(**{**SMALL, "bias_dropout_fusion": True}), context)
    counts = []
    for transposed in (False, True):
        torch._dynamo.reset()
        backend = CompileCounter()
        with compiled_on_cpu(backend):
            for length in (S, 2 * S):
                x = odd(length, H) if transposed else torch.randn(length, 1, H)
                block(x.requires_grad_(), None).sum().backward()
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] > 4


class Cubed(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


@pytest.mark.parametrize("place", ["pre_mlp_layernorm", "self_attention.q_layernorm"])
@ranks()
def test_a_norm_of_ones_own_stays_where_others_are_fused(
    context: ParallelContext, place: str
) -> None:
    plain = torch_block

    def with_own(*arguments: Any) -> Any:
        block = plain(*arguments)
        for layer in block.layers:
            layer.set_submodule(place, Cubed())
        return block

    changes = {"qk_layernorm": True}
    with mock.patch.dict(globals(), torch_block=with_own):
        want = gradients(context, changes)
        with compiled_on_cpu():
            got = gradients(context, changes)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12)
