"""Packed documents over files: labels, masks, positions, and that no token is lost or repeated."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron_ext.data import packed_order
from megatron_ext.data.indexed import read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.packed_order import Cuts
from megatron_ext.data.samplers import SequentialSampler
from megatron_ext.errors import DataError
from megatron_ext.text.data.direct import DirectDataset
from megatron_ext.text.data.plan import RunPlan, packing_table, plan_run
from megatron_ext.text.data.splits import build_direct, marks_of
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.training_runs import TINY, check_refused, config_of, prepared, without

EOD, VOCABULARY = 90, 20_000
WORDS = [
    *without(TINY, "--seq-length", "--global-batch-size", "--split", "--max-position-embeddings"),
    *"--data-order direct --document-packing best_fit --seq-length 16 --split 100,0,0".split(),
    *"--global-batch-size 24 --max-position-embeddings 16384".split(),
    *"--tokenizer-type NullTokenizer".split(),
]


def _config(*more: str, vocabulary: int = 90) -> Any:
    given = {"--train-iters": "500", "--vocab-size": str(vocabulary)}
    words = [word for name, value in given.items() if name not in more for word in (name, value)]
    return config_of([*WORDS, *words, *more])


def _plan(config: Any, history: Any = None, consumed: int = 0) -> tuple[RunPlan, DirectDataset]:
    plan = plan_run(config, history, consumed)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    return plan, DirectDataset(plan.order, plan.spans, marks_of(config, tokenizer), plan.total)


def _documents(prefix: Path, count: int = 300) -> str:
    """Write documents of 1 to 30 tokens that end with the end-of-document id."""
    rng = np.random.default_rng(0)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(count):
            ids = [*rng.integers(0, 90, int(rng.integers(0, 30))), EOD]
            writer.add_document(np.array(ids), [len(ids)])
    return str(prefix)


def _numbered(prefix: Path, first: int, windows: int, sizes: np.random.Generator) -> str:
    """Write documents of 1 to 40 tokens that are all different: each is its own number."""
    tokens, at = np.arange(first, first + 16 * windows, dtype=np.int32), 0
    with IndexedWriter(str(prefix), np.dtype(np.int32)) as writer:
        while at < len(tokens):
            ids = tokens[at : at + int(sizes.integers(1, 40))]
            writer.add_document(ids, [len(ids)])
            at += len(ids)
    return str(prefix)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_order, "SAMPLES", 30)


def test_labels_are_the_next_tokens_and_none_is_made_up(tmp_path: Path) -> None:
    """At the end of a sample the label is the next token of its document, if it has one."""
    prefix = _documents(tmp_path / "docs")
    plan, dataset = _plan(_config("--data-path", prefix))
    (span,) = plan.spans.values()
    text = span.gather(np.array([0]), span.tokens)[0].tolist()
    count = span.tokens // 16
    batch = dataset.batch(0, count)
    ranges = dataset.token_ranges(0, count)
    cut = 0
    for row in range(count):
        tokens, labels = batch["tokens"][row].tolist(), batch["labels"][row].tolist()
        pieces = [(first, size) for sample, _, first, size in ranges if sample == row]
        assert tokens == [token for first, size in pieces for token in text[first : first + size]]
        assert labels[:-1] == tokens[1:]
        assert (batch["loss_mask"][row, :-1] == 1).all()
        first, size = pieces[-1]
        if tokens[-1] == EOD:
            assert batch["loss_mask"][row, -1] == 0
        else:
            cut += 1
            assert labels[-1] == text[first + size] and batch["loss_mask"][row, -1] == 1
    assert 0 < cut < count


def test_masks_positions_and_documents_follow_the_pieces(tmp_path: Path) -> None:
    """The end of a piece ends a document even where no end-of-document token says so."""
    prefix = _documents(tmp_path / "docs")
    flags = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
    _, dataset = _plan(_config("--data-path", prefix, *flags.split()))
    batch = dataset.batch(3, 90)
    assert ((batch["tokens"] == EOD) <= (batch["loss_mask"] == 0)).all()
    sizes: dict[int, list[int]] = {}
    for sample, _, _, size in dataset.token_ranges(3, 90):
        sizes.setdefault(sample - 3, []).append(size)
    for row, own in sizes.items():
        wanted = [position for size in own for position in range(size)]
        assert batch["position_ids"][row].tolist() == wanted
        numbers = [number for number, size in enumerate(own) for _ in range(size)]
        assert batch["sample_ids"][row].tolist() == numbers


def test_changes_of_layout_workers_and_mixture_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Each token tells what it is, so the batches of all replicas show what was read how often."""
    rng = np.random.default_rng(5)
    counts = [90, 40, 7, 150]
    firsts = np.concatenate([[0], np.cumsum(counts)]) * 16
    prefixes = [
        _numbered(tmp_path / f"docs{i}", int(firsts[i]), count, rng)
        for i, count in enumerate(counts)
    ]
    visits = np.zeros(int(firsts[-1]), dtype=int)
    history, consumed = None, 0
    for change in range(20):
        words = ["--data-path"]
        for prefix in rng.permutation(prefixes)[: rng.integers(1, 5)].tolist():
            words += [str(round(float(rng.uniform(0.1, 1)), 2)), prefix]
        words += [] if rng.integers(2) else ["--no-mmap-bin-files"]
        config = _config(*words, vocabulary=VOCABULARY)
        plan, dataset = _plan(config, history, consumed)
        history = plan.to_dict()
        replicas, rows = int(rng.choice([1, 2, 3, 4])), int(rng.choice([1, 2]))
        steps = int(rng.integers(1, 5))
        loaders = [
            iter(
                DataLoader(
                    dataset,
                    batch_sampler=SequentialSampler(len(dataset), consumed, rows, rank, replicas),
                    num_workers=2 if change % 17 == 3 else 0,
                    collate_fn=dataset.collate,
                )
            )
            for rank in range(replicas)
        ]
        for _ in range(steps * 24 // (rows * replicas)):
            for loader in loaders:
                np.add.at(visits, next(loader)["tokens"].numpy(), 1)
        consumed += 24 * steps
        for first, end in zip(firsts, firsts[1:], strict=False):
            own = visits[first:end]
            assert own.max() - own.min() <= 1, change
    assert visits.min() >= 1 and visits.max() > 3


def test_held_out_splits_stay_windows_of_the_text(tmp_path: Path) -> None:
    """Validation losses compare with those of a run that concatenates documents."""
    prefix = _documents(tmp_path / "docs")
    more = ["--data-path", prefix, "--split", "80,20,0", "--eval-iters", "2"]
    packed = _config(*more)
    plain = config_of([*without(WORDS, "--document-packing"), "--vocab-size", "90",
                       "--train-iters", "500", *more])  # fmt: skip
    batches = []
    for config in (packed, plain):
        built = build_direct(config, build_tokenizer(config.section(TokenizerConfig)))
        assert isinstance(built.valid, DirectDataset)
        batches.append(built.valid.batch(0, 8))
    assert batches[0].keys() == batches[1].keys()
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])


def test_a_run_keeps_its_packing_and_its_length(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    config = _config("--data-path", prefix)
    history = _plan(config)[0].to_dict()
    plain = {name: value for name, value in history.items() if name != "packing"}
    with pytest.raises(DataError, match=r"`--document-packing` \(best_fit\) must stay concatenate"):
        _plan(config, plain, 24)
    other = config_of([*without(WORDS, "--document-packing"), *"--vocab-size 90".split(),
                       "--train-iters", "500", "--data-path", prefix])  # fmt: skip
    with pytest.raises(DataError, match=r"`--document-packing` \(concatenate\) must stay best_fit"):
        _plan(other, history, 24)
    longer = dataclasses.replace(config, model=dataclasses.replace(config.model, seq_length=32))
    with pytest.raises(DataError, match=r"Samples of 32 tokens do not go with `--document-packing"):
        _plan(longer, history, 24)


def test_the_share_of_cut_documents_is_printed_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks hold all documents; those that begin before a block's end count as they are."""
    monkeypatch.undo()
    prefix = _documents(tmp_path / "docs", 2000)
    words = [*WORDS, *f"--vocab-size 90 --train-iters 2 --data-path {prefix}".split()]
    prepared(words)
    shown = capfd.readouterr().out
    assert "No sample has padding." in shown
    packed, concatenated, longer = (float(each) for each in re.findall(r"([\d.]+)%", shown))
    lengths = read_index(prefix).lengths
    assert abs(longer - 100 * float((lengths > 16).mean())) < 0.5
    assert longer < packed < 0.95 * concatenated


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--document-packing best_fit", "needs an order that packs documents when they are read"),
        ("--sft --document-packing best_fit", "conversations are packed by --sft-batching"),
    ],
)
def test_packing_needs_the_direct_order(more: str, sentence: str) -> None:
    words = [*TINY, *"--train-iters 2 --tokenizer-type NullTokenizer --vocab-size 90".split()]
    check_refused([*words, *more.split()], sentence)


def test_the_table_of_packing_has_the_shares_of_each_source() -> None:
    sources = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    plan: Any = SimpleNamespace(order=SimpleNamespace(sources=sources))
    table = packing_table(plan, {1: Cuts(200, 1, 20, 50), 0: Cuts(0, 0, 0, 0)})
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells == {
        "source": ["b", "a"],
        "documents counted": ["200", "0"],
        "longer than a sample": ["0.50%", "0.00%"],
        "cut by best-fit packing": ["10.00%", "0.00%"],
        "cut by concatenation": ["25.00%", "0.00%"],
    }
