"""Experts in grouped products against plain arithmetic and against one expert after the other."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers import experts, onednn
from megatron_ext.layers.experts import GroupedExperts, JointExperts, _Call, _has_kernel
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.context import ParallelContext
from tests.host_syncs import host_syncs
from tests.layers import plain
from tests.layers.test_compiled_layers import called, holders
from tests.layers.test_layers import B, H, S, near, torch_block
from tests.layers.test_moe import LAYOUTS, E, check_block, config
from tests.ranks import on_ranks, ranks
from tests.training_runs import TINY, config_of, mock_data

GATED = {
    "gated_linear_unit": True,
    "bias_activation_fusion": False,
    "activation_func": torch.nn.functional.silu,
}
BIASES = {"add_bias_linear": True, "activation_func": torch.nn.functional.gelu}


@pytest.mark.parametrize("product", [experts._GroupedProduct, experts._ProductPerExpert])
def test_frozen_experts_keep_no_tokens(product: Any) -> None:
    """Only the gradients of the weights read the tokens again."""
    x = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.data_ptr())
        return saved

    for trains in (False, True):
        weights = [torch.randn(16, 8, dtype=torch.bfloat16) for _ in range(2)]
        for weight in weights:
            weight.requires_grad_(trains)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            y = product.apply(x, ends, _Call(weights, None, False), *weights)
        assert (x.data_ptr() in kept) is trains
        y.sum().backward()
    assert x.grad is not None


def count_products(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of experts in the grouped products that follow."""
    sizes: list[int] = []
    genuine = torch._grouped_mm

    def counted(x: Tensor, y: Tensor, **options: Any) -> Tensor:
        sizes.append(len(options["offs"]))
        return genuine(x, y, **options)

    patch.setattr(torch, "_grouped_mm", counted)
    return sizes


def check_layout(context: ParallelContext, dispatcher: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_products(patch)
        check_block(context, moe_token_dispatcher_type=dispatcher, groups_experts=True)
    # For each of two matrices: forward, gradient of the tokens, gradient of the weights.
    assert sizes == [E // context.pgs.ep.size()] * 6


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_experts_compute_what_plain_torch_computes(layout: str, dispatcher: str) -> None:
    on_ranks(check_layout, LAYOUTS[layout], dispatcher=dispatcher)


def results(
    context: ParallelContext,
    changes: dict[str, Any],
    *,
    grouped: bool,
    buffers: bool = False,
    joint: bool = False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return output and gradients of a layer, and the places where its forward pass waited."""
    queue = DeferredWeightGradients() if changes.get("weight_gradients") else None
    given = {**changes, "weight_gradients": queue}
    choice = {"groups_experts": grouped, "multiplies_by_onednn": joint}
    block = torch_block(config(context, **choice, **given), context)
    assert (type(block.layers[0].mlp.experts) is JointExperts) is joint
    plain.fill(block, context, E)
    parameters: dict[str, Any] = dict(block.named_parameters())
    for parameter in parameters.values() if buffers else ():
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with host_syncs() as places:
        out = block(x, None)
    if queue is None:
        out.square().sum().backward()
    else:
        with queue.collect((0, 0)):
            out.square().sum().backward()
        queue.compute((0, 0))
    found = {"output": out.detach(), "input": x.grad}
    for name, parameter in parameters.items():
        added = buffers and getattr(parameter, "grad_added_to_main_grad", False)
        deferred = buffers and queue is not None and parameter.grad is None
        found[name] = parameter.main_grad if added or deferred else parameter.grad
    return found, places


@pytest.mark.parametrize(
    ("changes", "buffers"),
    [
        (GATED, False),
        (BIASES, False),
        (GATED, True),
        ({**GATED, "weight_gradients": True}, False),
        ({**GATED, "weight_gradients": True, "adds_in_place": True}, True),
        ({**GATED, "adds_in_place": True}, True),
        ({**GATED, "activation_func_clamp_value": 0.1, "glu_linear_offset": 0.5}, False),
        (
            {
                **GATED,
                "moe_apply_probs_on_input": True,
                "moe_router_topk": 1,
                "moe_router_pre_softmax": True,
            },
            False,
        ),
    ],
)
@ranks()
def test_joint_and_grouped_experts_equal_single_ones(
    context: ParallelContext, changes: dict[str, Any], buffers: bool
) -> None:
    given = {"moe_token_dispatcher_type": "alltoall", **changes}
    single, waits = results(context, given, grouped=False, buffers=buffers)
    grouped, fewer = results(context, given, grouped=True, buffers=buffers)
    found = [grouped, results(context, given, grouped=False, buffers=buffers, joint=True)[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "takes", lambda *_: True)
        patch.setattr(experts, "ROWS", 2)
        found += [results(context, given, grouped=False, buffers=buffers, joint=True)[0]]
    for others in found:
        assert single.keys() == others.keys()
        for name, value in single.items():
            assert (value is None) == (others[name] is None), name
            if value is not None:
                near(others[name], value, name, tolerance=1e-5)
    of_experts = [place for place in waits if "experts.py" in place]
    assert of_experts and not [place for place in fewer if "experts.py" in place]
    assert len(waits) - len(fewer) == len(of_experts)
    # Tokens that never left this rank are sorted by expert.
    assert not [place for place in waits if "sort_chunks" in place]


@ranks()
def test_weights_learn_from_tokens_that_need_no_gradient(context: ParallelContext) -> None:
    """A queue gets no gradients from such tokens, since no backward pass reaches their product."""
    tokens = torch.randn(6, H, generator=torch.Generator().manual_seed(5))
    found = []
    for grouped in (False, True):
        changes = {**GATED, "weight_gradients": DeferredWeightGradients()}
        block = torch_block(config(context, groups_experts=grouped, **changes), context)
        plain.fill(block, context, E)
        layer = block.layers[0].mlp.experts
        assert isinstance(layer, GroupedExperts) is grouped
        output, _ = layer(tokens, torch.tensor([1, 2, 0, 3]), torch.ones(6))
        output.square().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    single, together = found
    for name, gradient in together.items():
        want = single[name]
        assert gradient is not None
        assert gradient.any() or want is None or not want.any()
        if want is not None and want.any():
            near(gradient, want, name, tolerance=1e-5)


@ranks()
def test_what_a_grouped_product_cannot_do_runs_expert_by_expert(context: ParallelContext) -> None:
    block = torch_block(config(context, groups_experts=True), context)
    (layer,) = (module for module in block.modules() if isinstance(module, GroupedExperts))
    tokens = torch.randn(4, H)
    assert layer._groups(tokens)
    assert not layer._groups(tokens[:0])
    assert not layer._groups(tokens.double())
    for name in ("fp8", "lora"):
        linear = layer.local_experts[0].linear_fc1
        setattr(linear, name, SimpleNamespace(groups=False))
        assert not layer._groups(tokens)
        setattr(linear, name, None)
    assert layer._groups(tokens)
    layer.local_experts = layer.local_experts[:1]
    assert not layer._groups(tokens)


@ranks()
def test_rows_that_the_grouped_kernel_refuses_are_not_grouped(context: ParallelContext) -> None:
    """It takes rows of 16, 32, … bytes."""
    for width, groups in ((24, True), (26, False)):
        transformer_config = config(context, groups_experts=True, moe_ffn_hidden_size=width)
        (layer,) = (
            module
            for module in torch_block(transformer_config, context).modules()
            if isinstance(module, GroupedExperts)
        )
        assert layer._groups(torch.randn(4, H)) is groups


@pytest.mark.parametrize("stale", [[], [1], [0, 2], [0, 1, 2]])
def test_gradients_overwrite_the_old_ones_alone(stale: list[int]) -> None:
    weights: list[Any] = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(3)]
    gradients = torch.arange(24.0).view(3, 4, 2)
    for index, weight in enumerate(weights):
        weight.main_grad = torch.full((4, 2), math.nan if index in stale else 100.0)
        weight.overwrite_main_grad = index in stale
    placeholders = _Call(weights, None, True).add(gradients.unbind())
    for index, (weight, placeholder) in enumerate(zip(weights, placeholders, strict=True)):
        before = 0.0 if index in stale else 100.0
        assert torch.equal(weight.main_grad, before + gradients[index])
        assert weight.grad_added_to_main_grad and placeholder.shape == weight.shape


@pytest.mark.parametrize(
    ("capability", "public", "has"),
    [
        ((9, 0), True, True),
        # torch 2.8 stops or hangs at an expert without tokens.
        ((9, 0), False, False),
        # On Blackwell the weight gradient of such an expert is not zero.
        ((10, 0), True, False),
        ((10, 3), True, False),
        # Here torch waits for the numbers of tokens and runs product after product.
        ((12, 0), True, False),
        ((8, 0), True, False),
    ],
)
def test_the_grouped_kernel_is_used_only_where_it_is_right_for_idle_experts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    public: bool,
    has: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    if public:
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", torch._grouped_mm, raising=False)
    else:
        monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    assert _has_kernel.__wrapped__(torch.device("cuda")) is has
    assert ("one after the other" in caplog.text) is not has


@ranks()
def test_data_parallelism_is_told_of_the_weights_of_grouped_experts(
    context: ParallelContext,
) -> None:
    block = torch_block(config(context, groups_experts=True), context)
    names = called(block)
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_products(patch)
        block(torch.randn(S, B, H), None)
    assert sizes == [E] * 2
    assert names >= holders(block)


def test_the_flag_groups_experts_on_a_gpu() -> None:
    words = "--num-experts 4 --moe-grouped-gemm --transformer-impl torch".split()

    def groups(device: str, words: list[str]) -> bool:
        config = config_of([*TINY, *mock_data(), "--train-iters", "1", *words], device=device)
        return build_transformer_config(config).groups_experts

    assert groups("cuda", words)
    assert not groups("cpu", words)
    assert not groups("cuda", [word for word in words if word != "--moe-grouped-gemm"])
