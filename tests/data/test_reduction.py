"""Weights of tokens against the definitions, written out sample by sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ext.data.batch import (
    Batch,
    documents_of_positions,
    reduced_weights,
    with_reduced_weights,
)

WEIGHTS = torch.tensor([[1.0, 1, 0, 1, 1, 1, 0, 0], [0.0, 0, 0, 0, 1, 0, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 3, 4]])
COUNTS = [3, 2, 1]
"""Targets of the samples that have any: two of the first row, one of the second."""

DENOMINATORS = {"token": 6.0, "sample": 3.0, "square": sum(math.sqrt(n) for n in COUNTS)}


def documents() -> Tensor:
    return documents_of_positions(POSITIONS)


@pytest.mark.parametrize("reduction", DENOMINATORS)
def test_criterion_3_denominators(reduction: str) -> None:
    total = reduced_weights(WEIGHTS, documents(), reduction).sum()
    assert float(total) == pytest.approx(DENOMINATORS[reduction], rel=1e-6)


@pytest.mark.parametrize(("reduction", "exponent"), [("sample", 1.0), ("square", 0.5)])
def test_every_token_weighs_what_its_sample_says(reduction: str, exponent: float) -> None:
    found = reduced_weights(WEIGHTS, documents(), reduction)
    for row, starts in ((0, [(0, 4), (4, 7)]), (1, [(0, 3), (3, 8)])):
        for first, end in starts:
            part = WEIGHTS[row, first:end]
            share = part / max(1.0, float(part.sum())) ** exponent
            assert torch.allclose(found[row, first:end], share, rtol=1e-6)


def test_a_row_is_a_sample_where_documents_do_not_end() -> None:
    found = reduced_weights(WEIGHTS, None, "sample")
    assert torch.allclose(found.sum(dim=1), torch.ones(2))


def test_fractional_weights_of_the_data_count_as_parts_of_targets() -> None:
    found = reduced_weights(0.5 * WEIGHTS, documents(), "sample")
    assert torch.allclose(found, reduced_weights(WEIGHTS, documents(), "sample"))


def test_padding_belongs_to_no_sample() -> None:
    padded = documents().masked_fill(WEIGHTS == 0, -1)
    found = reduced_weights(WEIGHTS, padded, "square")
    assert float(found.sum()) == pytest.approx(DENOMINATORS["square"], rel=1e-6)


def test_rows_without_targets_weigh_nothing() -> None:
    for reduction in DENOMINATORS:
        found = reduced_weights(torch.zeros_like(WEIGHTS), documents(), reduction)
        assert not found.any()


def test_prediction_depths_are_calibrated_by_themselves() -> None:
    ids = torch.zeros_like(POSITIONS)
    fewer = torch.tensor([[1.0, 0, 0, 1, 1, 0, 0, 0], [0.0] * 8])
    found = with_reduced_weights(
        Batch(ids, ids, WEIGHTS, POSITIONS, mtp_labels=(ids,), mtp_loss_weights=(fewer,)),
        documents(),
        "sample",
    )
    assert float(found.loss_weights.sum()) == pytest.approx(3)
    assert float(found.mtp_loss_weights[0].sum()) == pytest.approx(2)
