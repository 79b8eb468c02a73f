"""Tests of what a chunk of a text model sends on, and how MTP depths add their losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.auxiliary_loss import MTPTargets
from megatron_ext.text.model.language import TextModel


def chunk_of(**attributes: Any) -> Any:
    """Return a stand-in for a chunk in bf16, whose decoder returns float32."""
    config = SimpleNamespace(
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, mtp_standalone=False
    )
    usual = {
        "config": config,
        "post_process": False,
        "mtp_process": False,
        "training": True,
        "embedding": None,
        "_preprocess": lambda **_: (None,) * 6,
        "decoder": lambda **_: torch.ones(3, 2, 4),
        "mtp": lambda *, hidden_states, **_: torch.cat([hidden_states, 2 * hidden_states]),
        "_has_depths": lambda targets: targets is not None,
        "before_head": lambda hidden: hidden + 1,
        "logits_divisor": 1.0,
        "logits": lambda hidden: 10 * hidden,
        "compute_language_model_loss": lambda labels, logits: logits.sum(-1).t() + labels,
        "_with_mtp_losses": lambda hidden, targets: hidden[:3] + 5,
    }
    return SimpleNamespace(**{**usual, **attributes})


def output_of(chunk: Any, **given: Any) -> Tensor:
    zeros = torch.zeros(2, 3, dtype=torch.long)
    return TextModel.forward(chunk, zeros, zeros, None, **given)


def test_a_stage_sends_hidden_states_in_the_format_of_the_pipeline() -> None:
    sent = output_of(chunk_of())
    assert (sent.shape, sent.dtype) == ((3, 2, 4), torch.bfloat16)
    # A separate stage of MTP appends the states of its depths.
    separate = output_of(chunk_of(mtp_process=True), mtp_targets=object())
    assert (separate.shape, separate.dtype) == ((6, 2, 4), torch.bfloat16)


def test_the_last_stage_returns_states_logits_or_losses() -> None:
    last = chunk_of(post_process=True)
    hidden = output_of(last, hidden_states_only=True)
    assert hidden.dtype == torch.bfloat16 and torch.equal(hidden, torch.full_like(hidden, 2))
    logits = output_of(last)
    assert logits.shape == (2, 3, 4) and logits.is_contiguous()
    losses = output_of(last, labels=torch.arange(6).view(2, 3))
    assert losses.tolist() == [[80, 81, 82], [83, 84, 85]]
    # The losses of the depths are attached to the states from which the main loss follows.
    both = output_of(
        chunk_of(post_process=True, mtp_process=True),
        labels=torch.zeros(2, 3),
        mtp_targets=object(),
    )
    assert both.shape == (2, 3) and float(both[0, 0]) == 4 * 10 * (2 + 5)


def test_each_depth_has_labels_and_weights_of_its_own() -> None:
    """The gradient of a depth's states is the weight of its losses; the value is the decoder's."""
    states = torch.arange(18.0).view(9, 2, 1).requires_grad_()
    labels = tuple(torch.full((2, 3), float(x)) for x in (100, 1000))
    masks = tuple(torch.full((2, 3), float(x)) for x in (1, 2))
    weights = tuple(torch.arange(6.0).view(2, 3) + x for x in (10, 20))
    targets = MTPTargets(labels, masks, weights)
    chunk = chunk_of()
    chunk.config = SimpleNamespace(mtp_num_layers=2, grad_scale_func=None)
    chunk.logits = lambda hidden: hidden
    hidden = TextModel._with_mtp_losses(chunk, states, targets)
    assert torch.equal(hidden, states[:3])
    (3 * hidden).sum().backward()
    assert states.grad is not None
    main, *depths = states.grad.view(3, 3, 2).unbind()
    assert torch.equal(main, torch.full((3, 2), 3.0))
    for depth, weight in zip(depths, weights, strict=True):
        assert torch.equal(depth, weight.t())
    sums = [float(states.detach()[x : x + 3].sum()) + 6 * y for x, y in ((3, 100), (6, 1000))]
    assert [report.tolist() for report in targets.reports] == [[sums[0], 6], [2 * sums[1], 12]]
    assert torch.equal(TextModel._with_mtp_losses(chunk, states, None), states[:3])


@pytest.mark.parametrize(("cap", "sequence_parallel"), [(30.0, True), (None, False)])
def test_the_output_head_carries_what_the_logits_need(
    cap: float | None, sequence_parallel: bool
) -> None:
    asked: list[Any] = []

    def output_layer(_hidden: None, *, weight: Any, weight_only: bool) -> str:
        asked.append((weight, weight_only))
        return "weight"

    layer: Any = output_layer
    layer.tp_group = "group"
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    chunk = chunk_of(config=config, output_layer=layer, _softcap=cap, head_weight=lambda: "tied")
    head: Any = TextModel.output_head(chunk)
    assert asked == [("tied", True)]
    assert (head.softcap, head.sequence_parallel) == (cap, sequence_parallel)
    assert (head.weight, head.tp_group, head.config) == ("weight", "group", config)
