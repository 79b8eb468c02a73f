"""Flow matching with video DiTs: layouts against plain torch, and what the runs start from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.video.clips import SHORT, write_clips
from tests.video.wan_run import KINDS, Truth, check_run, record, train, truth_of

TOLERANCE = 1e-5
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2sp cp2 a2a": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--cp-comm-type a2a --recompute-blocks 1",
    ),
}
CASES = [
    *(("video-dit", layout) for layout in LAYOUTS),
    *(("independent", layout) for layout in ("cp2", "pp2", "tp2sp cp2 a2a")),
    ("causal", "cp2"),
    *(
        pytest.param(kind, layout, marks=pytest.mark.slow)
        for kind, layout in (("independent", "tp2"), ("independent", "dp2"), ("causal", "pp2"))
    ),
]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of three latent frames."""
    return write_clips(tmp_path_factory.mktemp("dit") / "clips", {SHORT: 9})


class Truths:
    """One truth for all layouts; their ranks inherit it."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.known: dict[str, Truth] = {}

    def of(self, kind: str) -> Truth:
        if kind not in self.known:
            path = self.folder / f"{kind}.pt"
            train(self.data, self.folder / kind, KINDS[kind], prepare=partial(record, path=path))
            self.known[kind] = truth_of(torch.load(path), kind)
        return self.known[kind]


@pytest.fixture(scope="module")
def truths(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Truths:
    return Truths(short, tmp_path_factory.mktemp("truths"))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layouts_train_as_plain_torch(
    short: Path, truths: Truths, kind: str, layout: str, tmp_path: Path
) -> None:
    """Predictions, the loss, and the gradient of each weight in the first step of a run."""
    ranks, words = LAYOUTS[layout]
    want = truths.of(kind)
    prepare = partial(check_run, truth=want, tolerance=TOLERANCE)
    rows = train(short, tmp_path, f"{KINDS[kind]} {words}", ranks=ranks, prepare=prepare)
    (row,) = (row for row in rows if row["kind"] == "train")
    assert row["loss"] == pytest.approx(want.loss, rel=TOLERANCE)


def test_the_kinds_differ(truths: Truths) -> None:
    losses = {kind: truths.of(kind).loss for kind in KINDS}
    assert len({round(loss, 4) for loss in losses.values()}) == len(KINDS)
