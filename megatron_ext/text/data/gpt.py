"""Builds megatron-core's GPT datasets and blends, with additional checks.

Inputs are checked before anything is built. A split without documents is an error, not an endless
loop. The key of cached indices covers everything that determines them, including path, size and
modification time of the data files.
"""

import copy
import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext import limits
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed import (
    CODE_OF_DTYPE,
    check_cached_indices,
    check_indexed_dataset,
    read_index,
)
from megatron_ext.device.host import this_host
from megatron_ext.errors import DataError
from megatron_ext.text.data.blend import SPLITS, BlendSpec, given_lengths, training_blend
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.inspect import check_ids, id_range
from megatron_ext.text.data.separators import ending_warnings, first_endings, padding_id
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.batch_size import split_sizes
from megatron_ext.train.task import Datasets

VOCABULARY_SAMPLE = 1 << 24
"""The number of tokens of each dataset whose ids are checked before training."""
INDEX_BYTES = 16
"""Bytes that megatron-core's indices take per sample, and per document of a sample."""


@dataclass
class KeyedGPTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """A GPTDatasetConfig that also holds a digest of the data files, and the vocabulary size."""

    data_files: str = field(default="", kw_only=True)
    """Digest of the path, size and modification time of every data file."""
    vocab_size: int = field(kw_only=True)


class KeyedGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset whose cached indices are rebuilt when a data file or an option changes."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *GPTDataset._key_config_attributes(),
            "add_extra_token_to_sequence",
            "drop_last_partial_validation_sequence",
            "data_files",
        ]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open a dataset with the dtype of its file.

        With ``--per-dataset-sequences-path``, megatron-core guesses the dtype from the size of
        the vocabulary. For a size near 65,536 this guess can be wrong.
        """
        if config.sequences_per_dataset:
            config = copy.copy(config)
            config.token_dtype_code = CODE_OF_DTYPE[read_index(dataset_path).dtype.name]
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return what megatron-core returns; raise a DataError for an id outside the vocabulary."""
        # Only a dataset's first ids are checked before training, and a vocabulary-parallel
        # embedding accepts wrong ids silently.
        text, *others = super()._query_document_sample_shuffle_indices(idx)
        if text.min() < 0 or text.max() >= self.config.vocab_size:
            # A short sample ends with padding, whose id need not be in the vocabulary.
            content = np.flatnonzero(text != self._pad_token_id)
            last = int(content[-1]) if len(content) else -1
            check_ids(self.dataset_path, text[: last + 1], self.config.vocab_size)
        return text, *others


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the sequences [first, end) of each split, rounded as in megatron-core."""
    edges = accumulate(parse_and_normalize_split(split), initial=0.0)
    return list(pairwise(round(edge * float(num_sequences)) for edge in edges))


def check_inputs(
    data: DataConfig,
    model: ModelConfig,
    spec: BlendSpec,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
) -> str:
    """Check every data file, the splits and the vocabulary before anything is built.

    ``sizes`` holds the number of samples that train, valid and test need; None means one epoch.
    Return a digest of path, size and modification time of all files.

    Raises:
        DataError: a file is missing, truncated or corrupt; a needed split is empty; or a token id
            is outside the vocabulary.
    """
    digest = hashlib.sha256()
    for prefix in spec.prefixes():
        info = check_indexed_dataset(prefix)
        for suffix in (".bin", ".idx"):
            stat = Path(prefix + suffix).stat()
            digest.update(f"{prefix}{suffix}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        entries = model.padded_vocab_size or tokenizer.vocab_size
        check_ids(prefix, id_range(prefix, VOCABULARY_SAMPLE), entries)
        if spec.per_split is None and data.split is not None:
            ratios = parse_and_normalize_split(data.split)
            cut = split_bounds(data.split, info.num_sequences)
            for name, (first, end), size, ratio in zip(SPLITS, cut, sizes, ratios, strict=True):
                if size != 0 and (ratio > 0 or name == "train") and end <= first:
                    raise DataError(
                        f"The {name} split of {prefix} is empty under `--split` {data.split}, but "
                        "samples are asked of it; give it a larger share, more documents, or set "
                        "`--eval-iters` to 0."
                    )
    _check_splits(data, model.seq_length or 1, spec, sizes)
    return digest.hexdigest()


def _check_index_memory(
    seq_length: int, spec: BlendSpec, sizes: Sequence[int | None], *, mock: bool = False
) -> None:
    """Raise a DataError if the indices of samples do not fit into the memory of the machine.

    megatron-core builds them in the memory of one process, with an entry for each sample of the run
    and for each document of a sample. Splits of size None (one epoch) are not counted.
    """
    lengths = [read_index(prefix).lengths for prefix in spec.prefixes()]
    tokens = sum(int(each.sum(dtype=np.int64)) for each in lengths)
    sequences = sum(map(len, lengths))
    length = tokens / sequences if tokens else MockGPTLowLevelDataset.max_sequence_length / 2
    documents = seq_length / length
    needed = INDEX_BYTES * (1 + documents) * sum(size or 0 for size in sizes)
    memory = this_host().memory
    if needed > memory:
        drawn = ", ".join(f"{name} {size or 0}" for name, size in zip(SPLITS, sizes, strict=True))
        raise DataError(
            f"The samples of the run ({drawn}) need indices of at least {needed / 1e9:,.1f} GB, "
            f"but this machine has {memory / 1e9:,.1f} GB; lower `--train-iters`, "
            "`--train-samples`, `--eval-iters` or `--global-batch-size`"
            f"{'' if mock else ', or give `--data-order direct`, which needs no indices'}."
        )


def separator_warnings(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Return warnings about ends of documents that GPTDataset would misread."""
    data = config.section(DataConfig)
    if data.mock_data:
        return []
    padding = padding_id(tokenizer, allow_ambiguous=data.allow_ambiguous_pad_tokens)
    return [
        sentence
        for prefix in training_blend(data).prefixes()
        for sentence in ending_warnings(
            prefix,
            first_endings(prefix, read_index(prefix)),
            tokenizer,
            padding,
            data.document_flags,
        )
    ]


def check_gpt_data(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check indexed datasets before training starts; every rank gets the same result.

    Raise a DataError if files, splits, token ids, cached indices or the counts of
    ``--per-dataset-sequences-path`` are bad, or if the indices of samples do not fit into memory.
    """
    data = config.section(DataConfig)
    training = config.training
    length = config.model.seq_length
    sizes = split_sizes(training, length, config.parallel.data_parallel_size)
    length = length or 0
    if not data.mock_data:
        spec = training_blend(data)
        check_inputs(data, config.model, spec, tokenizer, sizes)
        _check_index_memory(length, spec, sizes)
        check_cached_indices(spec.prefixes(), data.data_cache_path, KeyedGPTDataset.__name__)
        if int(os.environ.get("RANK", "0")) == 0:
            for sentence in separator_warnings(config, tokenizer):
                print(f"> {sentence}", flush=True)
        given_lengths(data, spec)
        return
    _check_index_memory(length, BlendSpec(None, None), sizes, mock=True)
    if training.full_validation and int(os.environ.get("RANK", "0")) == 0:
        # The validation split of mock data is a third of it, whatever ``--split`` is, and a full
        # pass over it takes minutes: warn.
        lengths = MockGPTLowLevelDataset(tokenizer).sequence_lengths
        first, last = split_bounds("1,1,1", len(lengths))[1]
        samples = (int(lengths[first:last].sum(dtype=np.int64)) - 1) // length
        print(
            f"> `--full-validation` goes through all {samples} samples of the made-up validation "
            f"data, {samples // training.batch_sizes[1]} steps, each time; `--eval-iters` without "
            "it takes as many steps as you say.",
            flush=True,
        )


def _check_splits(
    data: DataConfig, length: int, spec: BlendSpec, sizes: Sequence[int | None]
) -> None:
    """Raise a DataError for an empty dataset, or for too few samples in datasets without weights.

    megatron-core reads datasets without weights only once, so they must hold all samples of their
    split.
    """
    for index, (name, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        prefixes, weights = (spec.per_split or [spec.blend] * len(sizes))[index] or ([], None)
        for prefix in prefixes if size != 0 and spec.per_split else ():
            if not read_index(prefix).lengths.any():
                raise DataError(
                    f"The dataset {prefix} of the {name} split is empty, but samples are asked of "
                    "it; leave it out, or preprocess documents that hold tokens."
                )
        if weights is not None or len(prefixes) < 2 or size == 0:
            continue
        available = 0
        for prefix in prefixes:
            lengths = read_index(prefix).lengths
            if spec.per_split is None and data.split is not None:
                lengths = lengths[slice(*split_bounds(data.split, len(lengths))[index])]
            tokens = int(lengths.sum())
            if 0 < tokens <= length:
                raise DataError(
                    f"The {name} split of {prefix} holds {tokens} tokens, but `--seq-length` + 1 "
                    f"({length + 1}) are needed of each dataset without a weight; give weights, or "
                    "a larger share."
                )
            available += max(0, tokens - 1) // length
        several = name == "valid" and data.multiple_validation_sets
        if size is not None and available < size and not several:
            raise DataError(
                f"The {name} split holds {available} samples, and datasets without weights are "
                f"read once, but {size} are asked for; give weights, or fewer iterations."
            )


def dataset_config(
    config: RunConfig, spec: BlendSpec, tokenizer: Tokenizer, data_files: str
) -> KeyedGPTDatasetConfig:
    data = config.section(DataConfig)
    return KeyedGPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend=spec.blend,
        blend_per_split=spec.per_split,
        split=data.split if spec.per_split is None else None,
        multiple_validation_sets=data.multiple_validation_sets,
        full_validation=config.training.full_validation,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=data.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=data.allow_ambiguous_pad_tokens,
        reset_position_ids=data.reset_position_ids,
        # The mask of a batch is made on its device from the ids: see data/batch.py.
        reset_attention_mask=False,
        create_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        sequences_per_dataset=given_lengths(data, spec),
        data_files=data_files,
        vocab_size=config.model.padded_vocab_size or tokenizer.vocab_size,
    )


@contextmanager
def _cache_errors_as_data_errors(folder: str | None) -> Iterator[None]:
    """Turn an OSError about the index cache into a DataError.

    Also silence megatron-core's warning that mock data is not cached.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "Unable to save MockGPTDataset" not in record.getMessage()

    core_logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    core_logger.addFilter(is_other)
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The indices of samples cannot be written or read ({limits.cause(error, folder)}); "
            "make room for them, or give another folder with `--data-cache-path`."
        ) from error
    finally:
        core_logger.removeFilter(is_other)


def build_gpt_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build train, valid and test with ``sizes`` samples; a size of None means one epoch.

    All ranks call this together.
    """
    data = config.section(DataConfig)
    if data.mock_data:
        spec = BlendSpec(None, None)
        data_files = "mock"
        cls = MockGPTDataset
    else:
        spec = training_blend(data)
        cls = KeyedGPTDataset
        data_files = check_inputs(data, config.model, spec, tokenizer, sizes)
    core_config = dataset_config(config, spec, tokenizer, data_files)
    # A split of which no samples are needed may have no documents, so do not build it.
    for name in ("split_matrix", "blend_per_split"):
        parts = getattr(core_config, name)
        if parts is not None:
            kept = [None if size == 0 else x for size, x in zip(sizes, parts, strict=True)]
            setattr(core_config, name, kept)
    with _cache_errors_as_data_errors(data.data_cache_path), warnings.catch_warnings():
        # megatron-core warns once for each split of each prefix; the tools warn once per dataset.
        warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
        builder = BlendedMegatronDatasetBuilder(cls, list(sizes), is_built_on_rank, core_config)
        return Datasets(*builder.build())
