"""Parallel linear layers and the embedding where gradients go to the buffer or wait in a queue."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.linear import (
    ColumnParallelLinear,
    OutputLayer,
    RowParallelLinear,
    WholeLinear,
    WordEmbedding,
)
from megatron_ext.layers.linear_function import linear
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients, LinearCall
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks

S, B, IN, OUT, V = 4, 3, 6, 8, 10


def config(context: ParallelContext, **changes: Any) -> StepTransformerConfig:
    sizes: dict[str, Any] = dict(num_layers=1, hidden_size=IN, num_attention_heads=2)
    tp = context.pgs.tp.size()
    return StepTransformerConfig(**{**sizes, "tensor_model_parallel_size": tp, **changes})


def built(kind: type, context: ParallelContext, *sizes: int, **changes: Any) -> Any:
    return kind(
        *sizes,
        config=config(context, **changes),
        init_method=torch.nn.init.normal_,
        tp_group=context.pgs.tp,
    )


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@ranks()
def test_an_input_without_a_gradient_queues_nothing(context: ParallelContext) -> None:
    """No backward pass would run through it later; the first layer of a model has such an input."""
    queue = DeferredWeightGradients()
    layer = built(ColumnParallelLinear, context, IN, OUT, weight_gradients=queue)
    x = drawn(S, B, IN)
    for needed in (False, True):
        layer.weight.grad = None
        with queue.collect((0, 0)):
            layer(x.clone().requires_grad_(needed))[0].sum().backward()
        assert (layer.weight.grad is None) is needed
        queue.compute((0, 0))
        want = x.flatten(0, 1).sum(0).expand(OUT, -1)
        torch.testing.assert_close(layer.weight.grad, want)


@pytest.mark.parametrize("sums", [False, True])
@ranks(tp=2)
def test_the_inputs_gradient_is_summed_only_where_asked_for(
    context: ParallelContext, sums: bool
) -> None:
    """Experts sum it with their tokens, when these go back to their ranks."""
    tp = context.pgs.tp
    full, x, gradient = drawn(OUT, IN), drawn(S, B, IN, seed=2), drawn(S, B, OUT, seed=3)
    weight = full.chunk(2)[tp.rank()].clone().requires_grad_()
    own = x.clone().requires_grad_()
    call = LinearCall(weight, tp_group=tp, allreduce_dgrad=sums)
    part = gradient.chunk(2, dim=-1)[tp.rank()]
    linear(own, weight, None, call).backward(part)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(own.grad, gradient @ full if sums else part @ weight.detach())
    torch.testing.assert_close(weight.grad, part.flatten(0, 1).t() @ x.flatten(0, 1))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_the_embedding_adds_its_rows_to_the_buffer(
    context: ParallelContext, sequence_parallel: bool
) -> None:
    """Ids at both ends of each rank's rows are among them; the factor is part of the gradient."""
    tp = context.pgs.tp
    full = drawn(V, IN)
    ids = torch.tensor([[0, 4, 5, 9], [5, 5, 2, 4], [9, 7, 0, 4]])
    exact = full.clone().requires_grad_()
    whole = 3 * F.embedding(ids, exact)
    gradient = drawn(*whole.shape, seed=2)
    whole.backward(gradient)
    for adds in (False, True):
        changes = {"sequence_parallel": sequence_parallel, "embedding_multiplier": 3.0}
        made = WordEmbedding(
            V,
            IN,
            init_method=torch.nn.init.zeros_,
            reduce_scatter_embeddings=sequence_parallel,
            config=config(context, **changes),
            tp_group=tp,
        )
        made.config = config(context, adds_in_place=adds, **changes)
        with torch.no_grad():
            made.weight.copy_(full.chunk(2)[tp.rank()])
        made.weight.main_grad = torch.ones_like(made.weight)
        found = made(ids)
        want, outer = whole.detach(), gradient
        if sequence_parallel:
            want, outer = (x.transpose(0, 1).chunk(2)[tp.rank()] for x in (want, gradient))
        torch.testing.assert_close(found, want)
        found.backward(outer)
        added = made.weight.main_grad - 1 if adds else made.weight.grad
        torch.testing.assert_close(added, exact.grad.chunk(2)[tp.rank()])
        with torch.no_grad():
            torch.testing.assert_close(made(ids), want)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_whole_weights_say_whether_ranks_see_all_tokens(
    context: ParallelContext, sequence_parallel: bool
) -> None:
    layer = built(WholeLinear, context, IN, OUT, sequence_parallel=sequence_parallel)
    assert layer.weight.sequence_parallel is sequence_parallel
    x = drawn(S, B, IN)
    output, bias = layer(x)
    torch.testing.assert_close(output, x @ layer.weight.t())
    assert bias is None


@ranks()
def test_only_a_layer_that_owns_its_weight_adds_to_the_buffer(context: ParallelContext) -> None:
    """The output head's first gradient overwrites the old one, too, but the loss adds it."""
    for adds in (False, True):
        own = built(ColumnParallelLinear, context, IN, OUT, adds_in_place=adds)
        head = built(OutputLayer, context, IN, OUT, adds_in_place=adds)
        assert (own.adds_in_place, own.overwrites) == (adds, adds)
        assert (head.adds_in_place, head.overwrites) == (False, adds)
    given = drawn(OUT, IN)
    assert head(None, weight_only=True) is head.weight
    assert head(None, weight_only=True, weight=given) is given


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, WholeLinear])
@ranks(tp=2)
def test_onednn_multiplies_as_torch(
    context: ParallelContext, kind: type, sequence_parallel: bool
) -> None:
    """Also rows without any token, as experts may have, and weights that do not learn."""
    found: list[list[Tensor]] = []
    more: dict[str, Any] = {"bias": True, "skip_bias_add": False}
    if kind is not WholeLinear:
        more["input_is_parallel" if kind is RowParallelLinear else "gather_output"] = (
            kind is RowParallelLinear
        )
    for by_onednn in (False, True):
        changes = {"sequence_parallel": sequence_parallel, "multiplies_by_onednn": by_onednn}
        layer = kind(
            256,
            512,
            config=config(context, **changes),
            init_method=torch.nn.init.normal_,
            tp_group=context.pgs.tp,
            **more,
        )
        assert layer.by_onednn is by_onednn
        layer.weight.data = drawn(*layer.weight.shape)
        x = drawn(S, B, layer.weight.size(1)).requires_grad_()
        output, _ = layer(x)
        output.square().sum().backward()
        results = [output, x.grad, *(p.grad for p in layer.parameters())]
        layer.weight.requires_grad_(False)
        results += torch.autograd.grad(layer(x)[0].square().sum(), x)
        layer.weight.requires_grad_(True)
        if not sequence_parallel:
            layer(x[:0])[0].sum().backward()
        found.append(results)
    for plain, fast in zip(*found, strict=True):
        assert (fast - plain).norm() < 1e-6 * plain.norm()
