"""What the loader of a step makes of labels that do not count."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.data.step_loader import StepLoader
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks


@pytest.mark.parametrize("reduction", ["token", "sample"])
@ranks()
def test_ignored_labels_weigh_nothing_at_any_depth(
    context: ParallelContext, reduction: str
) -> None:
    labels = torch.tensor([[5, 7, 7, 2, 9, 7]])
    sample = {
        "tokens": torch.arange(6)[None],
        "labels": labels,
        "position_ids": torch.arange(6)[None],
        "loss_mask": torch.tensor([[1.0, 1, 1, 1, 1, 0]]),
    }

    def first(ignore_index: int) -> tuple[list[float], list[float]]:
        loader = StepLoader(
            iter([sample]),
            context,
            (1, 6),
            torch.device("cpu"),
            mtp_depths=1,
            reduction=reduction,
            ignore_index=ignore_index,
        )
        (batch,) = loader.next_step(1)
        return batch.loss_weights[0].tolist(), batch.mtp_loss_weights[0][0].tolist()

    each = 1 if reduction == "token" else 1 / 3
    of_depth = 1 if reduction == "token" else 1 / 2
    assert first(7) == (
        pytest.approx([each, 0, 0, each, each, 0]),
        pytest.approx([0, 0, of_depth, of_depth, 0, 0]),
    )
    whole = 1 if reduction == "token" else 1 / 5
    assert first(-100)[0] == pytest.approx([whole] * 5 + [0])
