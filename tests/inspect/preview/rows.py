"""Rows written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.inspect.preview.rows import Provenance, Row, Step


def packed(
    conversations: Sequence[tuple[Sequence[int], Sequence[float]]],
    size: int,
    *,
    depth_1: Sequence[tuple[int, float]] | None = None,
    cut: int = 0,
) -> Row:
    """Pack conversations, each of n + 1 ids and the weights of its n labels; then pad with id 9."""
    tokens, labels, weights, positions, samples = [], [], [], [], []
    for number, (ids, weighs) in enumerate(conversations):
        assert len(ids) == len(weighs) + 1
        tokens += list(ids[:-1])
        labels += list(ids[1:])
        weights += list(weighs)
        positions += range(len(weighs))
        samples += [number] * len(weighs)
    missing = size - len(tokens)
    starts = np.array([*positions, *[0] * missing]) == 0
    mtp = [] if depth_1 is None else [depth_1]
    return Row(
        dp_rank=0,
        microbatch=0,
        number=0,
        tokens=np.array([*tokens, *[9] * missing]),
        labels=np.array([*labels, *[9] * missing]),
        positions=np.array([*positions, *[0] * missing]),
        weights=np.array([*weights, *[0] * missing], dtype=np.float32),
        samples=np.array([*samples, *[-1] * missing]),
        reaches=~starts,
        mtp_labels=np.array([[label for label, _ in d] for d in mtp]).reshape(len(mtp), size),
        mtp_weights=np.array([[w for _, w in d] for d in mtp], np.float32).reshape(len(mtp), size),
        provenance=None,
        sample_provenance={
            i: Provenance(i, "a.jsonl", i + 1, cut) for i in range(len(conversations))
        },
    )


def stream(ids: Sequence[int], weights: Sequence[float]) -> Row:
    """Cut a row of n positions from n + 1 ids."""
    size = len(weights)
    assert len(ids) == size + 1
    return Row(
        dp_rank=0,
        microbatch=0,
        number=0,
        tokens=np.array(ids[:-1]),
        labels=np.array(ids[1:]),
        positions=np.arange(size),
        weights=np.array(weights, dtype=np.float32),
        samples=None,
        reaches=np.arange(size) > 0,
        mtp_labels=np.zeros((0, size), dtype=np.int64),
        mtp_weights=np.zeros((0, size), dtype=np.float32),
        provenance=Provenance(4, "corpus"),
        sample_provenance={},
    )


def step_of(*rows: Row) -> Step:
    """Return the first step of a run."""
    targets = sum(int(np.count_nonzero(row.weights)) for row in rows)
    weight = sum(float(row.weights.sum()) for row in rows)
    return Step(1, 0, len(rows), list(rows), targets, weight, [], [np.arange(rows[0].size)])
