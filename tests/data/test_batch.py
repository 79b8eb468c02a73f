"""Batches against megatron-core's own per-sample masks and against shifts written by hand."""

from __future__ import annotations

import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_ext.data.batch import (
    Batch,
    document_attention_mask,
    documents_of_tokens,
    shift_left,
    with_mtp_targets,
)

EOD = 7


def test_document_mask_equals_megatron_cores() -> None:
    tokens = torch.randint(0, 9, (5, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, :3] = EOD  # empty documents, and one that starts the sequence
    tokens[1, -1] = EOD
    tokens[2] = 1  # one document only
    theirs = [
        _get_ltor_masks_and_position_ids(row, EOD, False, True, False, True)[0] for row in tokens
    ]
    assert torch.equal(
        document_attention_mask(documents_of_tokens(tokens, EOD)), torch.stack(theirs)
    )


def test_mtp_targets_are_further_shifts_of_labels_and_mask() -> None:
    labels = torch.tensor([[11, 12, 13, 14]])
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    batch = with_mtp_targets(Batch(labels - 1, labels, mask, labels), 2)
    assert [t.tolist() for t in batch.mtp_labels] == [[[12, 13, 14, 0]], [[13, 14, 0, 0]]]
    assert [t.tolist() for t in batch.mtp_loss_weights] == [[[1, 0, 1, 0]], [[0, 1, 0, 0]]]


def test_shift_left_leaves_its_input_alone() -> None:
    row = torch.tensor([[1, 2, 3]])
    assert shift_left(row).tolist() == [[2, 3, 0]]
    assert row.tolist() == [[1, 2, 3]]
