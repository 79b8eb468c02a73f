"""Losses written for a block against the same formula on whole logits in float64."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.losses.blockwise_loss import TokenLosses, blockwise_loss
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks

S, B, H, V, K = 12, 2, 8, 20, 3
TOLERANCE = 1e-5
ALONE: dict[str, Any] = {"tp_group": None, "sequence_parallel": False}


def focal(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
    log_p = head.log_prob(head.logits(hidden), inputs["labels"])
    return -((1 - log_p.exp()) ** inputs["gamma"]) * log_p


def dense_focal(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    log_p = logits.log_softmax(-1).gather(2, inputs["labels"].clamp(0).unsqueeze(2)).squeeze(2)
    return -((1 - log_p.exp()) ** inputs["gamma"]) * log_p


def teacher(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
    student = head.at(head.log_softmax(head.logits(hidden)), inputs["ids"])
    return -(inputs["share"] * student).sum(dim=1)


def teacher_by_ids(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
    return -(inputs["share"] * head.log_prob(head.logits(hidden), inputs["ids"])).sum(dim=1)


def entropy(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
    log_p = head.log_softmax(head.logits(hidden))
    return -head.sum(log_p.exp() * log_p)


def dense_entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def dense_teacher(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return -(inputs["share"] * logits.log_softmax(-1).gather(2, inputs["ids"])).sum(dim=2)


FORMULAS: dict[str, Any] = {
    "focal": (focal, dense_focal),
    "teacher": (teacher, dense_teacher),
    "teacher by ids": (teacher_by_ids, dense_teacher),
    "entropy": (entropy, lambda logits, _inputs: dense_entropy(logits)),
}


def values() -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(S, B, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    weights = torch.rand(B, S, generator=generator)
    weights[0, 2:5] = 0
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, 2:5] = -100
    inputs = {
        "labels": labels,
        "gamma": torch.tensor(2.0),
        "ids": torch.randint(0, V, (B, S, K), generator=generator),
        "share": torch.rand(B, S, K, generator=generator),
    }
    return hidden, weight, weights, inputs


def truth(name: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, weights, inputs = values()
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    losses = FORMULAS[name][1]((h @ w.t()).transpose(0, 1), inputs)
    total = (losses * weights)[weights > 0].sum()
    of_hidden, of_weight = torch.autograd.grad(total, (h, w))
    return total.detach(), of_hidden, of_weight


def close(found: Tensor, want: Tensor) -> bool:
    return float((found.detach().double() - want).norm() / want.norm()) <= TOLERANCE


def check(
    loss: TokenLosses, name: str, block_size: int | None, group: ProcessGroup | None, *, sp: bool
) -> None:
    hidden, weight, weights, inputs = values()
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    assert VocabularyHead(weight.chunk(size)[rank], group).vocab_size == V
    if sp:
        hidden = hidden.chunk(size)[rank]
    h = hidden.clone().requires_grad_()
    w = weight.chunk(size)[rank].clone().requires_grad_()
    losses, total, _ = blockwise_loss(
        loss, h, w, weights, inputs, tp_group=group, sequence_parallel=sp, block_size=block_size
    )
    want, of_hidden, of_weight = truth(name)
    assert close(total, want) and close((losses * weights).sum(), want)
    found = torch.autograd.grad(3 * total, (h, w))
    assert close(found[0], 3 * (of_hidden.chunk(size)[rank] if sp else of_hidden))
    assert close(found[1], 3 * of_weight.chunk(size)[rank])


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("block_size", [1, 7, None, 1000])
def test_equals_dense(name: str, block_size: int | None) -> None:
    check(FORMULAS[name][0], name, block_size, None, sp=False)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("sp", [False, True])
@ranks(tp=2)
def test_equals_dense_on_two_ranks(context: ParallelContext, name: str, sp: bool) -> None:
    check(FORMULAS[name][0], name, 7, context.pgs.tp, sp=sp)


def check_bias_and_extra_values(group: ProcessGroup | None) -> None:
    """Compare a bias and further values with plain torch over whole logits in float64."""
    hidden, weight, weights, inputs = values()
    bias = torch.randn(V, generator=torch.Generator().manual_seed(5))
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    own = (hidden, weight.chunk(size)[rank], bias.chunk(size)[rank])
    h, w, b = leaves = [x.clone().requires_grad_() for x in own]

    def with_extra(
        hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = focal(hidden, head, inputs)
        return losses, {"entropy": entropy(hidden, head, inputs), "twice": 2 * losses}

    named = {"tp_group": group, "sequence_parallel": False, "extra_names": ("twice", "entropy")}
    losses, total, extra = blockwise_loss(
        with_extra, h, w, weights, inputs, block_size=5, bias=b, **named
    )
    found = torch.autograd.grad(total, leaves)
    h, w, b = (x.double().requires_grad_() for x in (hidden, weight, bias))
    logits = torch.einsum("sbh,vh->bsv", h, w) + b
    want = torch.where(weights != 0, dense_focal(logits, inputs), 0.0)
    of_hidden, of_weight, of_bias = torch.autograd.grad((want * weights).sum(), (h, w, b))
    want = want.detach()
    assert close(losses, want) and close(found[0], of_hidden)
    assert close(found[1], of_weight.chunk(size)[rank])
    assert close(found[2], of_bias.chunk(size)[rank])
    of_entropy = torch.where(weights != 0, dense_entropy(logits), 0.0).detach()
    assert list(extra) == ["twice", "entropy"] and close(extra["twice"], 2 * want)
    assert close(extra["entropy"], of_entropy) and not extra["entropy"].requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tokens_without_weight_may_have_any_loss(value: float) -> None:
    """Losses from the data, such as a distance to a target that is not there, may be no number."""
    hidden, weight, weights, inputs = values()
    inputs["offset"] = torch.zeros_like(weights).masked_fill(weights == 0, value)
    h, w = hidden.requires_grad_(), weight.requires_grad_()

    def loss(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
        return focal(hidden, head, inputs) + inputs["offset"]

    losses, total, _ = blockwise_loss(loss, h, w, weights, inputs, **ALONE, block_size=7)
    want, of_hidden, of_weight = truth("focal")
    assert close(total, want) and not losses[weights == 0].any()
    found = torch.autograd.grad(total, (h, w))
    assert close(found[0], of_hidden) and close(found[1], of_weight)


@ranks(tp=2)
def test_a_bias_and_further_values_equal_dense(context: ParallelContext) -> None:
    check_bias_and_extra_values(None)
    check_bias_and_extra_values(context.pgs.tp)


def test_further_values_must_be_those_that_were_named() -> None:
    hidden, weight, weights, inputs = values()
    for returned, names, message in (
        ({"a": "each"}, (), "the extra values a, but its `extra_names` are none"),
        ({}, ("a",), "the extra values none, but its `extra_names` are a; return each"),
        ({"a": "mean"}, ("a",), r"value `a` of shape \(\) for a block of 3 tokens, but it must"),
    ):

        def loss(*given: Any, returned: dict[str, str] = returned) -> tuple[Tensor, dict[str, Any]]:
            losses = focal(*given)
            kinds = {"each": losses, "mean": losses.mean()}
            return losses, {name: kinds[kind] for name, kind in returned.items()}

        with pytest.raises(ConfigError, match=message):
            blockwise_loss(loss, hidden, weight, weights, inputs, **ALONE, extra_names=names)


def test_frozen_parts_take_no_gradient() -> None:
    hidden, weight, weights, inputs = values()
    h = hidden.requires_grad_()
    _, total, _ = blockwise_loss(focal, h, weight, weights, inputs, **ALONE)
    assert close(torch.autograd.grad(total, h)[0], truth("focal")[1])
    with torch.no_grad():
        _, total, _ = blockwise_loss(focal, h, weight, weights, inputs, **ALONE)
    assert not total.requires_grad and close(total, truth("focal")[0])
    w = weight.requires_grad_()
    _, total, _ = blockwise_loss(focal, h.detach(), w, weights, inputs, **ALONE)
    assert close(torch.autograd.grad(total, w)[0], truth("focal")[2])


def test_weights_may_be_negative() -> None:
    """A loss may push a token's probability down."""
    hidden, weight, weights, inputs = values()
    signs = torch.where(torch.arange(S) % 3 == 0, -1.0, 1.0)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    losses = dense_focal((h @ w.t()).transpose(0, 1), inputs)
    want = (losses * weights * signs)[weights > 0].sum()
    truths = torch.autograd.grad(want, (h, w))
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    _, total, _ = blockwise_loss(focal, h, w, weights * signs, inputs, **ALONE, block_size=7)
    assert close(total, want.detach())
    assert all(map(close, torch.autograd.grad(total, (h, w)), truths))


def test_a_loss_gets_logits_with_the_soft_cap() -> None:
    hidden, weight, weights, inputs = values()
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    capped = 1.5 * torch.tanh((h @ w.t()).transpose(0, 1) / 1.5)
    want = (dense_focal(capped, inputs) * weights)[weights > 0].sum()
    truths = torch.autograd.grad(want, (h, w))
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    _, total, _ = blockwise_loss(focal, h, w, weights, inputs, **ALONE, block_size=7, softcap=1.5)
    assert close(total, want.detach())
    assert all(map(close, torch.autograd.grad(total, (h, w)), truths))


def test_a_loss_and_inputs_of_a_wrong_shape_are_refused() -> None:
    hidden, weight, weights, inputs = values()
    with pytest.raises(ConfigError, match=r"returned shape \(\) for a block of 3 tokens"):
        blockwise_loss(lambda *x: focal(*x).mean(), hidden, weight, weights, inputs, **ALONE)
    inputs["ids"] = inputs["ids"].transpose(0, 1)
    with pytest.raises(DataError, match=r"loss input `ids` has shape \(12, 2, 3\)"):
        blockwise_loss(focal, hidden, weight, weights, inputs, **ALONE)


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, weights, inputs = values()
    _, total, _ = blockwise_loss(focal, hidden.requires_grad_(), weight, weights, inputs, **ALONE)
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()  # type: ignore[no-untyped-call]
