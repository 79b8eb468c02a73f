"""The loss contract refuses what megatron-core's schedules would silently get wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import checked, pair, weighted_token_loss


def test_two_values_are_refused() -> None:
    def pair_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.sum(), {}

    with pytest.raises(ConfigError, match=r"`pair_loss` returned 2 value\(s\), but .* three"):
        checked(pair_loss)(torch.ones(3))  # type: ignore[arg-type]


def test_fractional_counts_are_refused() -> None:
    def float_count(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return output.sum(), torch.tensor(2.5), {}

    with pytest.raises(ConfigError, match=r"`float_count` returned a count of type torch.float32"):
        checked(float_count)(torch.ones(3))


def test_a_bare_mean_in_the_report_is_refused() -> None:
    def mean_report(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return output.sum(), torch.tensor(3), {"lm loss": output.mean()}

    with pytest.raises(ConfigError, match=r"reports `lm loss` with 1 value\(s\)"):
        checked(mean_report)(torch.ones(3))


def test_reports_survive_in_place_division_of_the_loss() -> None:
    def aliased(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.sum()
        return total, torch.tensor(3), {"lm loss": pair(total, torch.tensor(3))}

    total, _, report = checked(aliased)(torch.ones(3))
    total /= 100
    assert report["lm loss"].tolist() == [3.0, 3.0]


def test_weighted_token_loss_sums_the_targets_only() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    total, count, report = weighted_token_loss(losses, weights=mask)
    assert (float(total), int(count), report["lm loss"].tolist()) == (5.0, 2, [5.0, 2.0])
