"""Defects of megatron-core's datasets (docs/numerics.md), and what we do instead."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.extras.audit import reproduce_data as data
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.data import checked, gpt
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.prefixes import read_blend
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.numerics.reproductions import check_ratio
from tests.ranks import ranks
from tests.training_runs import TINY, config_of

SEQUENCE = 8
DOCUMENT = 5


def write(prefix: Path, documents: int, *, vocabulary: int = 90, largest: int = 80) -> str:
    """Write documents of five tokens each; the very last id is the largest."""
    ids = np.arange(documents * DOCUMENT) % largest
    ids[-1] = largest
    with IndexedWriter(prefix, optimal_dtype(vocabulary)) as writer:
        for document in ids.reshape(documents, DOCUMENT):
            writer.add_document(document, [DOCUMENT])
    return str(prefix)


def run_config(*words: str, vocabulary: int = 90) -> RunConfig:
    flags = " ".join(TINY).replace("--seq-length 64", f"--seq-length {SEQUENCE}").split()
    flags += f"--train-iters 1 --tokenizer-type NullTokenizer --vocab-size {vocabulary}".split()
    return config_of([*flags, *words])


def tokenizer_of(run: RunConfig) -> Any:
    return build_tokenizer(run.section(TokenizerConfig))


def our_config(run: RunConfig) -> GPTDatasetConfig:
    return gpt.dataset_config(run, read_blend(run.section(DataConfig)), tokenizer_of(run), "")


def core_config(run: RunConfig, **changes: Any) -> GPTDatasetConfig:
    ours = our_config(run)
    names = {f.name for f in dataclasses.fields(GPTDatasetConfig) if f.init}
    values = {name: getattr(ours, name) for name in names}
    del values["blend_per_split"]
    return GPTDatasetConfig(**{**values, **changes})


def dataset(cls: type[GPTDataset], prefix: str, core: GPTDatasetConfig, samples: int) -> GPTDataset:
    low = cls.build_low_level_dataset(prefix, core)
    indices = np.arange(len(low.sequence_lengths), dtype=np.int32)
    return cls(low, prefix, indices, samples, Split.train, core)


def test_d29_stock_counts_epochs_of_no_tokens_for_ever() -> None:
    found = check_ratio(data.d29, {"0.16": math.nan, "0.19": math.nan})
    assert "still counted" in found.what


def test_d29_an_empty_split_is_refused_when_samples_are_asked_of_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "docs", 20)
    cache = str(tmp_path / "cache")
    run = run_config("--data-path", prefix, "--data-cache-path", cache, "--split", "99,1,0")
    with pytest.raises(DataError, match=r"The valid split of .*docs is empty under `--split`"):
        checked.build_checked_datasets(run, tokenizer_of(run), [4, 4, 0], lambda: True)


@pytest.mark.parametrize("mmap", [[], ["--no-mmap-bin-files"]])
@ranks(timeout=10)
def test_d29_a_dataset_without_tokens_is_refused(
    context: ParallelContext, mmap: list[str], tmp_path: Path
) -> None:
    """A file for each split is not cut, and a split can be empty all the same."""
    train, empty = write(tmp_path / "train", 20), tmp_path / "empty"
    with IndexedWriter(empty, optimal_dtype(90)) as writer:
        writer.add_document(np.asarray([], np.int64), [])
    files = ["--train-data-path", train, "--valid-data-path", str(empty)]
    run = run_config(*files, "--data-cache-path", str(tmp_path / "cache"), *mmap)
    with pytest.raises(DataError, match="empty"):
        checked.build_checked_datasets(run, tokenizer_of(run), [4, 4, 0], lambda: True)


def test_d30_the_key_of_a_cache_covers_what_decides_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "docs", 40)
    run = run_config("--data-path", prefix, "--data-cache-path", str(tmp_path / "cache"))

    def keys(cls: type[GPTDataset], **changes: Any) -> str:
        data = run.section(DataConfig)
        blend = read_blend(data)
        tokenizer = tokenizer_of(run)
        files = checked.check_inputs(data, run.model, blend, tokenizer, [1, 0, 0])
        ours = gpt.dataset_config(run, blend, tokenizer, files)
        core = core_config(run) if cls is GPTDataset else ours
        for name, value in changes.items():
            setattr(core, name, value)
        return str(dataset(cls, prefix, core, 6).unique_description_hash)

    stock, mine = keys(GPTDataset), keys(checked.KeyedGPTDataset)
    for name in ("add_extra_token_to_sequence", "drop_last_partial_validation_sequence"):
        assert keys(GPTDataset, **{name: False}) == stock
        assert keys(checked.KeyedGPTDataset, **{name: False}) != mine
    assert keys(checked.KeyedGPTDataset) == mine
    write(tmp_path / "docs", 20)
    assert keys(checked.KeyedGPTDataset) != mine


def test_d30_stock_goes_on_with_the_indices_of_other_files() -> None:
    """The 20 documents that are new among the 40 are never seen."""
    check_ratio(data.d30, {"0.16": 19 / 39, "0.19": 19 / 39})


@pytest.mark.parametrize("vocabulary", [65499, 65500, 65536, 65537])
def test_d31_given_lengths_do_not_change_the_dtype(vocabulary: int, tmp_path: Path) -> None:
    """--per-dataset-sequences-path spares core the header, and with it the dtype."""
    largest = vocabulary - 1
    prefix = write(tmp_path / "docs", 20, vocabulary=vocabulary, largest=largest)
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({prefix: [20, 21]}))
    words = ["--data-path", prefix, "--per-dataset-sequences-path", str(lengths)]
    run = run_config(*words, "--vocab-size", str(vocabulary - 1))
    assert tokenizer_of(run).vocab_size == vocabulary
    low = checked.KeyedGPTDataset.build_low_level_dataset(prefix, our_config(run))
    truth = IndexedDataset(prefix)
    assert [low[i].tolist() for i in range(20)] == [truth[i].tolist() for i in range(20)]


def test_d31_stock_reads_int32_ids_as_pairs_of_uint16() -> None:
    found = check_ratio(data.d31, {"0.16": 0.3, "0.19": 0.3})
    assert "as 0 0 1 0 2" in found.what


def test_d32_stock_neither_writes_default_modes_nor_reads_all() -> None:
    found = check_ratio(data.d32, {"0.16": math.nan, "0.19": math.nan})
    assert "TypeError: can't multiply" in found.what and "ValueError: The truth" in found.what


def test_d32_a_mode_is_written_where_none_is_given(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "ours", np.dtype(np.int32), multimodal=True) as writer:
        writer.add_document(np.arange(5), [2, 3], [0, 1])
        writer.add_document(np.arange(4), [2, 2])
    low = IndexedDataset(str(tmp_path / "ours"), multimodal=True)
    assert low.index.sequence_modes.tolist() == [0, 1, 0, 0]


def test_d33_stock_counts_partial_sequences_in_single_precision() -> None:
    """One sequence of 2,097,153 is lost."""
    check_ratio(data.d33, {"0.16": 2**21 / (2**21 + 1), "0.19": 2**21 / (2**21 + 1)}, rel=1e-9)
    tokens = 2**24 + 2
    assert data.counted_samples(tokens, drop_last=True) == (tokens - 1) // SEQUENCE


def test_d33_no_run_keeps_partial_sequences(tmp_path: Path) -> None:
    prefix = write(tmp_path / "docs", 20)
    run = run_config("--data-path", prefix, "--eval-iters", "1", "--full-validation")
    assert our_config(run).drop_last_partial_validation_sequence
    with pytest.raises(ConfigError, match="`--no-drop-last-partial-validation-sequence`"):
        run_config("--data-path", prefix, "--no-drop-last-partial-validation-sequence")
