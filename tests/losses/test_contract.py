"""The loss contract refuses what megatron-core's schedules would silently get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import checked, pair, weighted_token_loss

TOTAL, COUNT = torch.tensor(3.0), torch.tensor(3)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ((TOTAL, {}), r"`my_loss` returned 2 value\(s\), but .* three"),
        ((TOTAL, torch.tensor(2.5), {}), r"`my_loss` returned a count of type torch.float32"),
        ((TOTAL, COUNT, {"lm loss": TOTAL}), r"reports `lm loss` with 1 value\(s\)"),
    ],
    ids=["two values", "fractional count", "bare mean in the report"],
)
def test_a_break_of_the_contract_is_refused_by_name(returned: Any, sentence: str) -> None:
    def my_loss(_output: Any) -> Any:
        return returned

    with pytest.raises(ConfigError, match=sentence):
        checked(my_loss)(torch.ones(3))


def test_reports_survive_in_place_division_of_the_loss() -> None:
    def aliased(output: torch.Tensor) -> Any:
        total = output.sum()
        return total, COUNT, {"lm loss": pair(total, COUNT)}

    total, _, report = checked(aliased)(torch.ones(3))
    total /= 100
    assert report["lm loss"].tolist() == [3.0, 3.0]


def test_weighted_token_loss_sums_the_targets_only() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    total, count, report = weighted_token_loss(losses, weights=mask)
    assert (float(total), int(count), report["lm loss"].tolist()) == (5.0, 2, [5.0, 2.0])
