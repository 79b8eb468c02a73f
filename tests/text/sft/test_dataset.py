"""Rows of conversations as tensors, against the conversations tokenized one by one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import documents_of_positions
from megatron_ext.text.config import TokenizerConfig
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.dataset import SftDataset, build_splits, cost_model
from megatron_ext.text.sft.masks import tokenize_conversation
from megatron_ext.text.task import TEXT
from megatron_ext.text.tokenizers import build_tokenizer
from megatron_ext.train.task import Datasets
from tests.text.sft import tiny

ROWS = tiny.chats(40)
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 300 --swiglu "
    "--max-position-embeddings 300 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 "
    "--train-iters 2 --sft --tokenizer-type HuggingFaceTokenizer --ffn-hidden-size 20"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer and two files of conversations."""
    path = tmp_path_factory.mktemp("data")
    tiny.save(path / "tokenizer")
    tiny.write_jsonl(path / "a.jsonl", ROWS[:25])
    tiny.write_jsonl(path / "b.jsonl", ROWS[25:])
    return path


def config_of(folder: Path, *words: str) -> RunConfig:
    tokenizer = ["--tokenizer-model", str(folder / "tokenizer")]
    return parse_args([*BASE, *tokenizer, *words], TEXT, world_size=0, device="cpu").config


def splits(folder: Path, *words: str) -> Datasets:
    config = config_of(folder, *words)
    return build_splits(config, build_tokenizer(config.section(TokenizerConfig)))


@pytest.fixture(scope="module")
def train(folder: Path) -> SftDataset:
    files = ["--train-data-path", str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    found = splits(folder, *files).train
    assert isinstance(found, SftDataset)
    return found


def tokenized(number: int) -> tuple[list[int], list[int]]:
    conversation = read_conversation(ROWS[number], Place("f", number))
    ids, mask = tokenize_conversation(tiny.tokenizer("chatml"), conversation)
    return ids, mask


@pytest.mark.parametrize("row", [(), (3,), (30, 2), (7, 39, 0)])
def test_a_row_lays_conversations_side_by_side(row: tuple[int, ...], train: SftDataset) -> None:
    made = train[row]
    want: dict[str, list[Any]] = {name: [] for name in made}
    for sample in row:
        ids, mask = tokenized(sample)
        assert train.lengths[sample] == len(ids) - 1
        want["tokens"] += ids[:-1]
        want["labels"] += ids[1:]
        want["loss_mask"] += mask[1:]
        want["position_ids"] += range(len(ids) - 1)
        want["sample_ids"] += [sample] * (len(ids) - 1)
    used = len(want["tokens"])
    pad = tiny.tokenizer("chatml").pad_token_id
    filled = {"tokens": pad, "labels": pad, "loss_mask": 0, "position_ids": 0, "sample_ids": -1}
    for name, values in want.items():
        assert made[name].tolist() == values + [filled[name]] * (300 - used), name
        assert made[name].dtype == (torch.float32 if name == "loss_mask" else torch.int64)


def test_each_position_of_padding_is_a_document_of_its_own(train: SftDataset) -> None:
    documents = documents_of_positions(train[(1, 2)]["position_ids"][None])[0]
    one, two = train.lengths[1], train.lengths[2]
    assert documents[:one].unique().tolist() == [0]
    assert documents[one : one + two].unique().tolist() == [1]
    assert documents[one + two :].diff().unique().tolist() == [1]


def test_a_sample_knows_its_file(train: SftDataset) -> None:
    assert [Path(train.source_of(i)).name for i in (0, 24, 25, 39)] == ["a.jsonl"] * 2 + [
        "b.jsonl"
    ] * 2


def test_a_loader_process_gets_a_small_dataset(train: SftDataset) -> None:
    _ = train[(0,)]
    copy = pickle.loads(pickle.dumps(train))
    assert copy.plan is None
    assert train.plan is not None
    assert all(torch.equal(copy[(5, 1)][name], value) for name, value in train[(5, 1)].items())


def test_splits_share_the_conversations_out(folder: Path) -> None:
    def firsts(dataset: Any) -> set[tuple[int, ...]]:
        return {tuple(dataset[(i,)]["tokens"].tolist()) for i in range(len(dataset))}

    paths = ["--data-path", str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    one = splits(folder, *paths, "--split", "80,15,5")
    again = splits(folder, *paths, "--split", "80,15,5")
    other = splits(folder, *paths, "--split", "80,15,5", "--seed", "5")
    parts = [firsts(split) for split in (one.train, one.valid, one.test)]
    assert [len(part) for part in parts] == [32, 6, 2]
    assert len(set.union(*parts)) == 40
    assert firsts(again.train) == parts[0]
    assert firsts(other.train) != parts[0]
    assert splits(folder, *paths, "--split", "1,0,0").valid is None


def test_a_preprocessed_prefix_and_its_file_are_the_same(folder: Path, train: SftDataset) -> None:
    prefixes = [store.prefix for store in train._stores]
    words = ["--train-data-path", f"{prefixes[0]}_sft_document", str(folder / "b.jsonl")]
    other = splits(folder, *words).train
    assert isinstance(other, SftDataset)
    for sample in range(len(train)):
        assert torch.equal(train[(sample,)]["tokens"], other[(sample,)]["tokens"])


def test_the_cost_is_that_of_the_model(folder: Path) -> None:
    """h 8, n 2, d 4, f 20 gated, 2 layers, v 258: 2 (4 * 64 + 3 * 160) + 8 v, and 2 * 2 * 4."""
    config = config_of(folder, "--data-path", "f", "--make-vocab-size-divisible-by", "1")
    from megatron_ext.text.preflight import with_padded_vocabulary

    model = cost_model(with_padded_vocabulary(config, 258).model, config.moe)
    linear, quadratic = 2 * (4 * 64 + 3 * 160) + 8 * 258, 2 * 2 * 4
    assert model.linear * quadratic == model.quadratic * linear
