"""Layouts train alike through the whole program; gradients are compared in tests/models/mmdit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.video.clips import steps

LAYOUTS = {
    "tp2sp pp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "cp2 dp2": (4, "--context-parallel-size 2 --use-distributed-optimizer"),
    "tp2 cp2 pp2": (
        8,
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
}


@pytest.fixture(scope="module")
def one_rank(clips, tmp_path_factory):
    return steps(clips, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a(name, clips, one_rank, tmp_path):
    ranks, words = LAYOUTS[name]
    rows = steps(clips, tmp_path, words, ranks=ranks)
    for r, o in zip(rows, one_rank, strict=True):
        print(r["loss"], o["loss"], r["grad_norm"], o["grad_norm"], r["global_batch_size"], r)
    assert 0
