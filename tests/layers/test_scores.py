"""Sinks and a soft cap of attention's scores in FlexAttention, against attention step by step.

The latter is compared with transformers in tests/text/model/test_families.py.
"""

from typing import Any

import pytest
import torch

from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.test_attention import build, config
from tests.layers.test_masks import ENDS, B, D, G, N, S, qkv
from tests.ranks import ranks


def build_with_scores(
    context: ParallelContext, softcap: float | None = 0.7, kind: str | None = "learnable"
) -> DotProductAttention:
    scores: dict[str, Any] = {"softmax_type": kind or "vanilla", "window_size": (50, 0)}
    torch.manual_seed(5)
    made = build(DotProductAttention, config(num_query_groups=G, kv_channels=D, **scores), context)
    made.softcap = softcap
    if kind is not None:
        torch.nn.init.normal_(made.softmax_offset)
    return made  # type: ignore[no-any-return]


def test_gradients_beside_sinks_are_those_of_one_more_key_without_a_value() -> None:
    torch.manual_seed(1)
    scores, value, sinks = torch.randn(B, N, 5, 7), torch.randn(B, N, 7, D), torch.randn(N)
    found = []
    for alone in (True, False):
        own = [x.double().requires_grad_() for x in (scores, value, sinks)]
        if alone:
            out = flex.beside_sinks(own[0].softmax(-1) @ own[1], own[0].logsumexp(-1), own[2])
        else:
            column = own[2].view(1, -1, 1, 1).expand(B, -1, 5, 1)
            out = torch.cat([own[0], column], -1).softmax(-1)[..., :-1] @ own[1]
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


SCORES = [(None, None), (0.7, None), (None, "learnable"), (0.7, "learnable")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@ranks()
def test_compiled_sinks_and_caps_have_the_gradients_of_the_eager_path(
    context: ParallelContext, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FlexAttention's rule that a CPU has no backward pass is that of its kernel alone.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    for softcap, kind in SCORES:
        found = []
        for fits in (True, False):
            monkeypatch.setattr(flex, "flex_fits", lambda query, dropout, fits=fits: fits)
            module = build_with_scores(context, softcap, kind)
            own = [x.requires_grad_() for x in qkv()]
            if kind is not None:
                own.append(module.softmax_offset)
            with compiled_on_cpu(backend):
                out = module(*own[:3], plain.document_indices(S, ENDS))
            out.square().sum().backward()
            found.append([out.detach(), *(x.grad for x in own)])
        for got, want in zip(*found, strict=True):
            assert want is not None and got is not None
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (softcap, kind)
