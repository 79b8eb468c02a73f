"""Training on packed documents: equal on every layout, and on from a checkpoint in another one."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.extras.ledger.counts import check_of
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.inspect.preview.collect import collect
from megatron_ext.inspect.preview.rows import documents_of
from tests.training_runs import NULL, SAME_WEIGHTS, documents, prepared, train_steps, without

WORDS = [
    *without(SAME_WEIGHTS, "--num-layers"),
    *NULL,
    *"--num-layers 2 --padded-vocab-size 128 --data-order direct --train-iters 4".split(),
    *"--document-packing best_fit --reset-attention-mask --reset-position-ids".split(),
]
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size 2 --sequence-parallel", "--mtp-num-layers 1"),
    "cp2": ("--context-parallel-size 2", "--eod-mask-loss --loss-reduction sample"),
}
"""Flags of two ranks, and flags of the run itself."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    return ["0.7", documents(folder / "a", 300), "0.3", documents(folder / "b", 200)]


@pytest.mark.parametrize(
    "layout", [x if x == "cp2" else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_losses_are_equal_on_every_layout(layout: str, data: list[str], tmp_path: Path) -> None:
    """Two ranks go on from a checkpoint of one; rounding alone differs."""
    flags, own = LAYOUTS[layout]
    words = [*WORDS, "--data-path", *data, *own.split()]
    wanted = train_steps(words, tmp_path / "one")
    save = tmp_path / "save"
    train_steps([*words, "--exit-interval", "2"], save)
    rows = train_steps([*words, *flags.split(), "--load", str(save)], save, 2)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    for row, want in zip(rows, wanted, strict=True):
        assert math.isclose(row["lm loss"], want["lm loss"], rel_tol=1e-6), (row, want)
    _check_ledger(save, words)


def _check_ledger(save: Path, words: Sequence[str]) -> None:
    """Compare the documents that the ledger names with the batches of all four steps."""
    ledger = Ledger(save)
    task, config, tokenizer = prepared(words)
    train = task.datasets(config, tokenizer, (64, 0, 0), lambda: True).train
    assert check_of(ledger) == (0, 0) and ledger.history.iteration == 4
    for step in range(1, 5):
        steps, first, end = ledger.step(step)
        order, found = ledger.order_of(steps), []
        rows = ledger.rows(order, first, end)
        for source, document, begin, length in zip(
            rows.sources, rows.documents, rows.begins, rows.lengths, strict=True
        ):
            own = ledger.documents(order.sources[source].name, order.sources[source].tokens)
            found.append(own.read(int(own.starts[document] + begin), int(length)))
        tokens = train.batch(first, end)["tokens"].flatten().tolist()
        assert np.concatenate(found).tolist() == tokens


def test_the_preview_shows_the_documents_of_packed_samples(data: list[str]) -> None:
    task, config, tokenizer = prepared([*WORDS, "--data-path", *data])
    (step,) = collect(config, task, tokenizer, first=2, count=1)
    for row in step.rows:
        assert row.provenance is not None and row.provenance.source in data
        found = documents_of(row, tokenizer.eod)
        assert [document.start for document in found[1:]] == [d.end for d in found[:-1]]
        assert found[-1].end == row.size and not row.is_padding.any()
        starts = (row.positions == 0).nonzero()[0].tolist()
        assert [document.start for document in found] == starts
