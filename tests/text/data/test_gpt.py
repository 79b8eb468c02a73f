"""Datasets: every token once, caches that notice a changed file, blends by their weights."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import MockGPTDataset

from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.text.data import checked, gpt
from megatron_ext.text.data.blend import BlendSpec, read_blend
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.training_runs import TINY, config_of, train_steps

SEQUENCE = 8


def _write(prefix: str, documents: int, start: int = 0) -> None:
    with IndexedWriter(prefix, optimal_dtype(90)) as writer:
        for number in range(documents):
            writer.add_document(np.arange(start + number, start + number + 5) % 80, [5])


def _config(*more: str) -> Any:
    words = " ".join(TINY).replace("--seq-length 64", f"--seq-length {SEQUENCE}").split()
    null = "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 90".split()
    return config_of([*words, *null, *more])


def _dataset(prefix: str, cache: Path, samples: int | None = None) -> checked.KeyedGPTDataset:
    from megatron.core.datasets.utils import Split

    config = _config("--data-path", prefix, "--data-cache-path", str(cache))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    spec = read_blend(config.section(DataConfig))
    data = config.section(DataConfig)
    files = checked.check_inputs(data, config.model, spec, tokenizer, [1, 0, 0])
    core = gpt.dataset_config(config, spec, tokenizer, files)
    low = checked.KeyedGPTDataset.build_low_level_dataset(prefix, core)
    indices = np.arange(len(low.sequence_lengths), dtype=np.int32)
    return checked.KeyedGPTDataset(low, prefix, indices, samples, Split.train, core)


def test_an_epoch_covers_every_token_and_neighbours_share_one(tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    _write(prefix, 33)
    dataset = _dataset(prefix, tmp_path / "cache")
    order = np.argsort(dataset.shuffle_index)
    rows = [dataset[int(i)] for i in order]
    flat = np.concatenate([row["tokens"].numpy() for row in rows] + [rows[-1]["labels"][-1:]])
    documents = dataset.dataset
    want = np.concatenate([documents[int(i)] for i in dataset.document_index])
    assert flat.tolist() == want[: len(flat)].tolist()
    assert len(rows) == (33 * 5 - 1) // SEQUENCE
    for before, after in zip(rows, rows[1:], strict=False):
        assert before["labels"][-1] == after["tokens"][0]


def test_a_replaced_file_rebuilds_the_cache(tmp_path: Path) -> None:
    prefix, cache = str(tmp_path / "docs"), tmp_path / "cache"
    _write(prefix, 33)
    first = _dataset(prefix, cache, samples=6)
    assert len(list(cache.glob("*.npy"))) == 3
    again = _dataset(prefix, cache, samples=6)
    assert again.unique_description_hash == first.unique_description_hash
    _write(prefix, 20, start=3)
    changed = _dataset(prefix, cache, samples=6)
    assert changed.unique_description_hash != first.unique_description_hash
    assert max(changed.document_index) < 20


def test_bounds_of_a_split_are_megatron_cores() -> None:
    assert gpt.split_bounds("90,5,5", 2400) == [(0, 2160), (2160, 2280), (2280, 2400)]
    assert gpt.split_bounds("99,1,0", 20) == [(0, 20), (20, 20), (20, 20)]


def test_an_empty_split_is_refused_only_when_it_is_asked_for(tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    _write(prefix, 20)
    config = _config("--data-path", prefix)
    config = config.with_section(dataclasses.replace(config.section(DataConfig), split="99,1,0"))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    data = config.section(DataConfig)
    checked.check_inputs(data, config.model, read_blend(data), tokenizer, [4, 0, 0])
    with pytest.raises(DataError, match=r"The valid split of .*docs is empty under `--split` 99,1"):
        checked.check_inputs(data, config.model, read_blend(data), tokenizer, [4, 4, 0])


def test_splits_that_nothing_is_asked_of_are_left_out(tmp_path: Path) -> None:
    """They may be empty, whose epochs would be counted for ever."""
    prefix = str(tmp_path / "docs")
    _write(prefix, 20)
    config = _config("--data-path", prefix, "--data-cache-path", str(tmp_path / "cache"))
    config = config.with_section(dataclasses.replace(config.section(DataConfig), split="90,9,1"))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    built = checked.build_checked_datasets(config, tokenizer, [4, 0, 0], lambda: True)
    assert built.train is not None and built.valid is None and built.test is None


@pytest.mark.parametrize("weights", [("", ""), ("1", "2")])
def test_blends_train_with_other_splits_too_short(weights: tuple[str, str], tmp_path: Path) -> None:
    words = []
    for name, weight in zip(("docs", "more"), weights, strict=True):
        _write(str(tmp_path / name), 400)
        words += [x for x in (weight, str(tmp_path / name)) if x]
    null = "--tokenizer-type NullTokenizer --vocab-size 90 --train-iters 2".split()
    flags = [*TINY, *null, "--data-path", *words, "--data-cache-path", str(tmp_path / "cache")]
    assert len(train_steps(flags, tmp_path / "save", 2)) == 2


def test_datasets_without_weights_hold_what_is_asked_of_them(tmp_path: Path) -> None:
    for name, documents in (("docs", 20), ("short", 1)):
        _write(str(tmp_path / name), documents)
    short, docs = str(tmp_path / "short"), str(tmp_path / "docs")
    checked.check_inputs(*_inputs("1", docs, "1", short), [400, 0, 0])
    checked.check_inputs(*_inputs(docs, docs), [24, 0, 0])
    with pytest.raises(DataError, match=r"train split holds 24 samples, and .* but 25 are asked"):
        checked.check_inputs(*_inputs(docs, docs), [25, 0, 0])
    with pytest.raises(DataError, match=r"train split of .*short holds 5 tokens, but `--seq-len"):
        checked.check_inputs(*_inputs(docs, short), [4, 0, 0])


def _inputs(*words: str) -> tuple[DataConfig, Any, BlendSpec, Any]:
    config = _config("--data-path", *words)
    data = dataclasses.replace(config.section(DataConfig), split="1,0,0")
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    return data, config.model, read_blend(data), tokenizer


BLENDS = {"a": (["a"], None), "a b c": (["a", "b", "c"], None), "3 a 7 b": (["a", "b"], [3.0, 7.0])}


def test_blends_from_flags_and_files_are_those_of_megatron_lm(tmp_path: Path) -> None:
    for words, blend in BLENDS.items():
        data = _config("--data-path", *words.split()).section(DataConfig)
        assert read_blend(data) == BlendSpec(blend, None)
    words = tmp_path / "words.txt"
    words.write_text("0.5 a\n0.5 b\n")
    config = _config("--data-args-path", str(words))
    assert read_blend(config.section(DataConfig)).blend == (["a", "b"], [0.5, 0.5])
    splits = tmp_path / "splits.json"
    splits.write_text('{"train": "a", "valid": ["b"], "test": ["c"]}')
    config = _config("--per-split-data-args-path", str(splits))
    assert read_blend(config.section(DataConfig)).per_split == [([x], None) for x in "abc"]
    splits.write_text("[1]")
    with pytest.raises(DataError, match="must be a JSON object with the keys train, valid"):
        read_blend(config.section(DataConfig))


def test_the_length_of_made_up_validation_data_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    config = _config("--mock-data", "--full-validation")
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    gpt.check_mock_data(config, tokenizer)
    datasets = gpt.build_mock_datasets(config, tokenizer, [0, None, 0], lambda: True)
    assert isinstance(datasets.valid, MockGPTDataset)
    samples = len(datasets.valid)
    told = f"goes through all {samples} samples of the made-up validation data, {samples // 16} st"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(20))
def test_megatrons_order_is_megatron_cores_own(seed: int, tmp_path: Path) -> None:
    """Random lengths, seeds, splits and blends give the samples of a plain GPTDataset."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    rng = np.random.default_rng(seed)
    words = []
    for name in "abc"[: rng.integers(1, 4)]:
        _write(str(tmp_path / name), int(rng.integers(60, 200)), int(rng.integers(80)))
        words += [str(round(float(rng.uniform(0.1, 1)), 2)), str(tmp_path / name)]
    split = ("80,15,5", "70,30,0", "90,5,5")[rng.integers(3)]
    length, run_seed = int(rng.integers(4, 20)), int(rng.integers(1, 10**6))
    more = ["--eod-mask-loss"] if rng.integers(2) else []
    flags = f"--seq-length {length} --seed {run_seed} --split {split}".split()
    config = _config("--data-path", *words, *flags, *more)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sizes = [int(rng.integers(1, 300)), 0, 0]
        ours = checked.build_checked_datasets(config, tokenizer, sizes, lambda: True).train
        plain = GPTDatasetConfig(
            random_seed=run_seed,
            sequence_length=length,
            blend=(words[1::2], [float(word) for word in words[::2]]),
            split=split,
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=bool(more),
            create_attention_mask=False,
        )
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, plain)
        theirs = builder.build()[0]
    finally:
        torch.distributed.destroy_process_group()
    for index in range(sizes[0]):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert ours[index][name].tolist() == theirs[index][name].tolist()
