"""Weights of the multi-token-prediction losses against plain arithmetic."""

from __future__ import annotations

import torch

from megatron_ext.layers.mtp import MTPTargets, mean_of_means_weights, per_token_weights


def test_per_token_weights_give_each_depth_its_own_mean() -> None:
    masks = [torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])]
    losses = torch.tensor([[3.0, 5.0, 9.0]])
    main = torch.tensor(3.0)
    weights = per_token_weights(masks, 0.1, main, torch.tensor([2.0, 1.0]))
    objective = sum(float((w * losses).sum()) for w in weights) / float(main)
    assert abs(objective - 0.05 * (8.0 / 2 + 3.0 / 1)) < 1e-7


def test_a_depth_without_targets_contributes_nothing() -> None:
    masks = [torch.zeros(1, 4)]
    counts = torch.tensor([0.0])
    for weights in (
        per_token_weights(masks, 0.1, torch.tensor(4.0), counts),
        mean_of_means_weights(masks, 0.1),
    ):
        assert torch.equal(weights[0], torch.zeros(1, 4))


def test_reports_hold_sum_and_count() -> None:
    targets = MTPTargets([torch.zeros(1, 2)], [torch.tensor([[1.0, 0.0]])], [torch.ones(1, 2)])
    targets.record(0, torch.tensor([[2.5, 100.0]]))
    assert targets.reports[0].tolist() == [2.5, 1.0]
