"""Checks the indexed datasets of a run, and builds megatron-core's GPT datasets from them.

megatron-core caches the indices that map samples to tokens. Here their cache key also covers the
path, size and modification time of each data file, so that changed files get new indices.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed import (
    CODE_OF_DTYPE,
    check_cached_indices,
    check_indexed_dataset,
    read_index,
)
from megatron_ext.errors import DataError
from megatron_ext.text.data.blend import SPLITS, BlendSpec, given_lengths
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import (
    build_blend,
    check_index_memory,
    dataset_config,
    split_bounds,
)
from megatron_ext.text.data.inspect import check_ids, id_range
from megatron_ext.text.data.prefixes import training_blend
from megatron_ext.text.data.separators import ending_warnings, first_endings, padding_id
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.batch_size import split_sizes
from megatron_ext.train.task import Datasets

MOST_DATASETS = 32_766
"""The largest number of datasets in a blend: megatron-core's index of it has 16 bits for each."""
VOCABULARY_SAMPLE = 1 << 24
"""The number of tokens of each dataset whose ids are checked before training."""


class KeyedGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset that rebuilds its cached indices when a data file or an option changes."""

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
        """Return the tokens of sample ``idx`` and the other values that megatron-core returns.

        Raise a DataError for an id outside the vocabulary.
        """
        # Only a dataset's first ids are checked before training, and a vocabulary-parallel
        # embedding accepts wrong ids silently.
        text, *others = super()._query_document_sample_shuffle_indices(idx)
        if text.min() < 0 or text.max() >= self.config.vocab_size:
            # A short sample ends with padding, whose id need not be in the vocabulary.
            content = np.flatnonzero(text != self._pad_token_id)
            last = int(content[-1]) if len(content) else -1
            check_ids(self.dataset_path, text[: last + 1], self.config.vocab_size)
        return text, *others


def check_inputs(
    data: DataConfig,
    model: ModelConfig,
    spec: BlendSpec,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
) -> str:
    """Check every data file, the splits and the vocabulary before anything is built.

    ``sizes`` holds the number of samples that train, valid and test need; None means one epoch.
    Return a digest over the path, size and modification time of each data file.

    Raises:
        DataError: there are too many datasets; a file is missing, truncated or corrupt; a needed
            split is empty; or a token id is outside the vocabulary.
    """
    _check_numbers(spec)
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


def separator_warnings(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Return warnings about end-of-document tokens that megatron-core's GPTDataset would misread.

    `ending_warnings` describes the two warnings. Return [] for mock data.
    """
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


def check_files(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check a run's indexed datasets before training starts; every rank gets the same result.

    Rank 0 also prints warnings about end-of-document tokens that the run would misread.

    Raises:
        DataError: files, splits, token ids, cached indices or the counts of
            ``--per-dataset-sequences-path`` are bad, or the indices of samples do not fit into
            memory.
    """
    data = config.section(DataConfig)
    spec = training_blend(data)
    length = config.model.seq_length
    sizes = split_sizes(config.training, length, config.parallel.data_parallel_size)
    check_inputs(data, config.model, spec, tokenizer, sizes)
    lengths = [read_index(prefix).lengths for prefix in spec.prefixes()]
    tokens = sum(int(each.sum(dtype=np.int64)) for each in lengths)
    check_index_memory(
        max(1.0, tokens / max(1, sum(map(len, lengths)))),
        length or 0,
        sizes,
        ", or give `--data-order direct`, which needs no indices",
        elsewhere=config.planning.dry_run_gpu is not None,
    )
    check_cached_indices(spec.prefixes(), data.data_cache_path, KeyedGPTDataset.__name__)
    if int(os.environ.get("RANK", "0")) == 0:
        for sentence in separator_warnings(config, tokenizer):
            print(f"> {sentence}", flush=True)
    given_lengths(data, spec)


def build_checked_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Check a run's indexed datasets, and build its train, valid and test split.

    ``sizes`` has the number of samples of each split; None means one epoch.
    """
    data = config.section(DataConfig)
    spec = training_blend(data)
    data_files = check_inputs(data, config.model, spec, tokenizer, sizes)
    core_config = dataset_config(config, spec, tokenizer, data_files)
    return build_blend(KeyedGPTDataset, core_config, sizes, is_built_on_rank)


def _check_numbers(spec: BlendSpec) -> None:
    """Raise a DataError if a blend has more than `MOST_DATASETS` datasets."""
    most = max(len(blend[0]) for blend in spec.per_split or [spec.blend] if blend is not None)
    if most > MOST_DATASETS:
        raise DataError(
            f"A blend has {most} datasets, but Megatron-LM's index of a blend has room for "
            f"{MOST_DATASETS}; join some with tools/merge_datasets.py, or give `--data-order "
            "direct`."
        )


def _check_splits(
    data: DataConfig, length: int, spec: BlendSpec, sizes: Sequence[int | None]
) -> None:
    """Raise a DataError if the datasets of a split hold too little data.

    If each split has datasets of its own, none of these may be empty. Several datasets without
    weights are read once each by megatron-core: each must be empty or have more than ``length``
    tokens, and together they must hold all samples of their split.

    Args:
        length: ``--seq-length``.
        sizes: number of samples of train, valid and test; None means one epoch.
    """
    for index, (name, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        prefixes, weights = (spec.per_split or [spec.blend] * len(sizes))[index] or ([], None)
        for prefix in prefixes if size != 0 and spec.per_split else ():
            if not read_index(prefix).lengths.any():
                raise DataError(
                    f"The dataset {prefix} of the {name} split is empty, but samples are asked of "
                    "it; leave it out, or preprocess documents that hold tokens."
                )
        if size != 0 and weights is not None and 0 in weights:
            raise DataError(
                f"The dataset {prefixes[weights.index(0)]} of the {name} split has the weight 0, "
                "but weights must be positive where indices are built; leave it out, or give "
                "`--data-order direct`."
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
