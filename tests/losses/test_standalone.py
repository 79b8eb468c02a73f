"""The loss of a step outside the trainer: extra values, labels, and a loss of one's own."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.losses.standalone import StepLoss
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks

V, H = 11, 6


def parts(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return two micro-batches of unequal size, hidden states ``[s, b, h]`` and labels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for b, s in ((1, 5), (3, 4)):
        hidden = torch.randn(s, b, H, generator=generator).requires_grad_()
        labels = torch.randint(0, V, (b, s), generator=generator)
        labels[0, 0] = -100
        found.append((hidden, labels))
    return found


def own_loss(
    hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = head.logits(hidden)
    hit = (logits.argmax(1) == inputs["labels"]).float()
    return -head.log_prob(logits, inputs["labels"]) * inputs["scale"], {"accuracy": hit}


def test_a_loss_returns_values_beside_its_own() -> None:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    batches = parts()
    loss = StepLoss(weight, token_losses=own_loss, extra_names=["accuracy"])
    total = torch.zeros(())
    for (hidden, labels), part in zip(batches, loss.of_step([y for _, y in batches]), strict=True):
        value = part(hidden, {"scale": torch.full(labels.shape, 0.5)})
        logits = (hidden @ weight.T).transpose(0, 1)
        hits = (logits.argmax(2) == labels).float()
        torch.testing.assert_close(value.extra["accuracy"], hits * (labels != -100))
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        torch.testing.assert_close(value.losses, 0.5 * each.detach())
        total = total + value.loss.detach()
        value.loss.backward()
    mine, weight.grad = weight.grad, None
    counted = sum(int((labels != -100).sum()) for _, labels in batches)
    want = sum(
        F.cross_entropy((x.detach() @ weight.T).flatten(0, 1), y.T.flatten(), reduction="sum")
        for x, y in batches
    )
    (0.5 * want / counted).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(total, (0.5 * want / counted).detach())  # type: ignore[union-attr]
    torch.testing.assert_close(mine, weight.grad)


def test_weights_of_tokens_and_steps_without_targets() -> None:
    weight, ((hidden, labels), _) = torch.randn(V, H), parts()
    want = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.T.flatten())
    for each in (3.0, 0.01):
        (part,) = StepLoss(weight).of_step([labels], [torch.full(labels.shape, each)])
        torch.testing.assert_close(part(hidden).loss, want)
    smooth = F.cross_entropy(
        (hidden @ weight.T).flatten(0, 1), labels.T.flatten(), label_smoothing=0.2
    )
    (part,) = StepLoss(weight, options={"label_smoothing": 0.2}).of_step([labels])
    torch.testing.assert_close(part(hidden).loss, smooth)
    (empty,) = StepLoss(weight).of_step([torch.full(labels.shape, -100)])
    assert float(empty(hidden).loss.detach()) == 0.0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("label", [V, -1, -101, 10**9])
def test_labels_outside_the_head_are_refused(label: int, own: bool) -> None:
    weight, ((hidden, labels), _) = torch.randn(V, H), parts()
    labels[0, 2] = label
    loss = StepLoss(weight, token_losses=own_loss if own else None, extra_names=["accuracy"])
    (part,) = loss.of_step([labels])
    with pytest.raises(DataError, match=f"A label is {label}, but the head has {V} rows, so that"):
        part(hidden, {"scale": torch.ones(labels.shape)})
    # A token without weight does not count.
    weights = (labels != label).float()
    (part,) = StepLoss(weight).of_step([labels], [weights])
    assert bool(part(hidden).loss.isfinite())
    alone = {"tp_group": None, "sequence_parallel": False}
    for sign in (1, -1):
        each = sign * torch.ones(labels.shape)
        with pytest.raises(DataError, match="give such labels, or tokens without a target"):
            weighted_linear_cross_entropy(hidden, weight, labels, each, **alone)


def only_log_prob(hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]) -> Tensor:
    return -head.log_prob(head.logits(hidden), inputs["labels"])


@ranks(tp=2)
def test_a_loss_of_ones_own_takes_the_labels_of_all_parts_of_a_head(
    context: ParallelContext,
) -> None:
    """Compare with cross-entropy over the whole head, whose rows two ranks share."""
    head = torch.randn(2 * H, H, generator=torch.Generator().manual_seed(1))
    batches = [(hidden, labels.where(labels < 0, labels + 1)) for hidden, labels in parts()]
    assert max(int(labels.max()) for _, labels in batches) >= H
    loss = StepLoss(head.chunk(2)[context.tp_rank], token_losses=only_log_prob,
                    group=context.pgs.dp, tp_group=context.pgs.tp)  # fmt: skip
    steps = loss.of_step([labels for _, labels in batches])
    total = sum(float(part(x).loss.detach()) for (x, _), part in zip(batches, steps, strict=True))
    logits = torch.cat([(x.detach() @ head.T).flatten(0, 1) for x, _ in batches])
    want = F.cross_entropy(logits, torch.cat([labels.T.flatten() for _, labels in batches]))
    assert total == pytest.approx(float(want), rel=1e-5)
    hidden, labels = batches[0]
    labels[0, 2] = 2 * H
    (part,) = loss.of_step([labels])
    with pytest.raises(DataError, match=f"A label is {2 * H}, but the head has {2 * H} rows"):
        part(hidden)


@ranks(dp=2)
def test_ranks_of_a_step_divide_by_the_tokens_of_all(context: ParallelContext) -> None:
    """The ranks have unequal numbers of tokens, and their parts sum to the mean over all."""
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    batches = parts()
    hidden, labels = batches[context.dp_rank]
    logits = torch.cat([(x.detach() @ weight.T).flatten(0, 1) for x, _ in batches])
    want = F.cross_entropy(logits, torch.cat([y.T.flatten() for _, y in batches]))
    for group in (None, context.pgs.dp):
        (part,) = StepLoss(weight, group=group).of_step([labels])
        total = part(hidden).loss.detach()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total, want)
    (alone,) = StepLoss(weight, group=context.pgs.tp).of_step([labels])
    mine = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.T.flatten())
    torch.testing.assert_close(alone(hidden).loss, mine)


@ranks(tp=2)
def test_hidden_states_may_be_cut_along_the_sequence(context: ParallelContext) -> None:
    head = torch.randn(2 * H, H, generator=torch.Generator().manual_seed(1))
    _, (hidden, labels) = parts()
    loss = StepLoss(head.chunk(2)[context.tp_rank], group=context.pgs.dp, tp_group=context.pgs.tp,
                    sequence_parallel=True)  # fmt: skip
    (part,) = loss.of_step([labels])
    want = F.cross_entropy((hidden.detach() @ head.T).flatten(0, 1), labels.T.flatten())
    torch.testing.assert_close(part(hidden.detach().chunk(2)[context.tp_rank]).loss, want)
