"""GPT datasets: megatron-core's GPTDataset and blending behind a typed layer.

What is added to megatron-core: inputs are checked before anything is built, a split without
documents is refused instead of looping for ever, and cached indices are keyed by everything that
determines them, the identity of the data files included.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.indexed import CODE_OF_DTYPE, check_indexed_dataset, read_index
from megatron_ext.device.host import this_host
from megatron_ext.errors import DataError
from megatron_ext.text.config import DataConfig
from megatron_ext.text.data.blend import SPLITS, BlendSpec, training_blend
from megatron_ext.text.data.inspect import check_ids, id_range
from megatron_ext.train.task import Datasets

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer

VOCABULARY_SAMPLE = 1 << 24
"""Tokens of each dataset that are compared with the vocabulary before training."""
INDEX_BYTES = 16
"""Bytes for each sample, and each document in it, while megatron-core builds its indices."""


@dataclass
class KeyedGPTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """A GPTDatasetConfig whose cache key also covers what megatron-core's leaves out."""

    data_files: str = field(default="", kw_only=True)
    """Digest of the path, size and modification time of every data file."""
    vocab_size: int = field(kw_only=True)
    """Entries of the vocabulary that ids index."""


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

        Where lengths are given (--per-dataset-sequences-path), megatron-core guesses the dtype
        from the size of the vocabulary, and near 65,536 ids guesses wrong.
        """
        if config.sequences_per_dataset:
            config = copy.copy(config)
            config.token_dtype_code = CODE_OF_DTYPE[read_index(dataset_path).dtype.name]
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def _query_document_sample_shuffle_indices(
        self, idx: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the ids and documents of a sample.

        Before training only the first ids of a dataset were compared with the vocabulary, and an
        embedding that is shared over ranks takes any id.

        Raises:
            DataError: an id outside of the vocabulary.
        """
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        if text.min() < 0 or text.max() >= self.config.vocab_size:
            # A sample that is filled up ends with the padding, whose id need not be an entry.
            content = np.flatnonzero(text != self._pad_token_id)
            last = int(content[-1]) if len(content) else -1
            check_ids(self.dataset_path, text[: last + 1], self.config.vocab_size)
        return text, documents


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the first and past-the-last sequence of each split, as megatron-core cuts them."""
    ratios = parse_and_normalize_split(split)
    edges = [0.0]
    for ratio in ratios:
        edges.append(edges[-1] + ratio)
    marks = [round(edge * float(num_sequences)) for edge in edges]
    return list(zip(marks[:-1], marks[1:], strict=True))


def _check_not_empty(prefix: str, bounds: tuple[int, int], split: str, flag: str) -> None:
    if bounds[1] <= bounds[0]:
        raise DataError(
            f"The {split} split of {prefix} is empty under `--split` {flag}, but samples are asked "
            f"of it; give it a larger share, more documents, or set `--eval-iters` to 0."
        )


def check_inputs(
    config: RunConfig, spec: BlendSpec, tokenizer: Tokenizer, sizes: Sequence[int | None]
) -> str:
    """Check every data file, the splits and the vocabulary before anything is built.

    Args:
        sizes: samples asked of train, valid and test (None means one epoch).

    Returns:
        A digest of the identity (path, size, modification time) of all files.

    Raises:
        DataError: a missing, truncated or corrupt file, an empty split that samples are asked of,
            or token ids beyond the vocabulary.
    """
    digest, shares = hashlib.sha256(), config.section(DataConfig).split
    for prefix in spec.prefixes():
        info = check_indexed_dataset(prefix)
        for suffix in (".bin", ".idx"):
            stat = Path(prefix + suffix).stat()
            digest.update(f"{prefix}{suffix}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        check_ids(prefix, id_range(prefix, VOCABULARY_SAMPLE), _entries(config, tokenizer))
        if spec.per_split is None and shares is not None:
            ratios = parse_and_normalize_split(shares)
            cut = split_bounds(shares, info.num_sequences)
            for name, bounds, size, ratio in zip(SPLITS, cut, sizes, ratios, strict=True):
                if size != 0 and (ratio > 0 or name == "train"):
                    _check_not_empty(prefix, bounds, name, shares)
    _check_splits_of_their_own(spec, sizes)
    _check_single_passes(config.section(DataConfig), config.model.seq_length or 1, spec, sizes)
    return digest.hexdigest()


def check_index_memory(config: RunConfig, spec: BlendSpec, sizes: Sequence[int | None]) -> None:
    """Check that one process can hold the indices by which samples are found.

    megatron-core builds them whole, one entry for each sample of the run and each time that a
    document is read.

    Args:
        spec: the datasets, whose files have been checked.
        sizes: samples asked of train, valid and test; None means one epoch, which is not counted.

    Raises:
        DataError: they need more memory than this machine has.
    """
    lengths = [read_index(prefix).lengths for prefix in spec.prefixes()]
    tokens = sum(int(each.sum(dtype=np.int64)) for each in lengths)
    sequences = sum(map(len, lengths))
    length = tokens / sequences if tokens else MockGPTLowLevelDataset.max_sequence_length / 2
    documents = (config.model.seq_length or 0) / length
    needed = INDEX_BYTES * (1 + documents) * sum(size or 0 for size in sizes)
    memory = this_host().memory
    if needed > memory:
        drawn = ", ".join(f"{name} {size or 0}" for name, size in zip(SPLITS, sizes, strict=True))
        raise DataError(
            f"The samples of the run ({drawn}) need indices of at least {needed / 1e9:,.1f} GB, "
            f"but this machine has {memory / 1e9:,.1f} GB; lower `--train-iters`, "
            "`--train-samples`, `--eval-iters` or `--global-batch-size`."
        )


def mock_validation_samples(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return the samples in an epoch of made-up validation data, a third whatever ``--split``."""
    lengths = MockGPTLowLevelDataset(tokenizer).sequence_lengths
    first, last = split_bounds("1,1,1", len(lengths))[1]
    assert config.model.seq_length is not None
    return (int(lengths[first:last].sum(dtype=np.int64)) - 1) // config.model.seq_length


def _check_splits_of_their_own(spec: BlendSpec, sizes: Sequence[int | None]) -> None:
    """Check that a split with files of its own is not empty."""
    for name, blend, size in zip(SPLITS, spec.per_split or (), sizes, strict=False):
        if blend is None or size == 0:
            continue
        for prefix in blend[0]:
            if not read_index(prefix).lengths.any():
                raise DataError(
                    f"The dataset {prefix} of the {name} split is empty, but samples are asked of "
                    "it; leave it out, or preprocess documents that hold tokens."
                )


def _check_single_passes(
    data: DataConfig, length: int, spec: BlendSpec, sizes: Sequence[int | None]
) -> None:
    """Check that datasets without weights, which are read once, hold what is asked of them."""
    for index, (name, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        prefixes, weights = (spec.per_split or [spec.blend] * len(sizes))[index] or ([], None)
        if weights is not None or len(prefixes) < 2 or size == 0:
            continue
        held = 0
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
            held += max(0, tokens - 1) // length
        several = name == "valid" and data.multiple_validation_sets
        if size is not None and held < size and not several:
            raise DataError(
                f"The {name} split holds {held} samples, and datasets without weights are read "
                f"once, but {size} are asked for; give weights, or fewer iterations."
            )


def _entries(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return how many entries the vocabulary of the model has."""
    return config.model.padded_vocab_size or tokenizer.vocab_size


def given_lengths(config: RunConfig, spec: BlendSpec) -> dict[str, list[int]] | None:
    """Return counts of sequences and documents by prefix (--per-dataset-sequences-path), if given.

    Raises:
        DataError: a file that cannot be read, or lacks a prefix.
    """
    path = config.section(DataConfig).per_dataset_sequences_path
    if path is None:
        return None
    flag = f"`--per-dataset-sequences-path` ({path})"
    try:
        lengths: dict[str, list[int]] = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = [prefix for prefix in spec.prefixes() if len(lengths[prefix]) != 2]
    except OSError as error:
        raise DataError(f"{flag} cannot be read ({error.strerror}); give a JSON file.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{flag} must be a JSON object from each prefix to [sequences, document boundaries]; "
            f"reading it failed with: {error!r}."
        ) from error
    if missing:
        raise DataError(
            f"{flag} must give two counts, [sequences, document boundaries], for {missing[0]}."
        )
    return lengths


def dataset_config(
    config: RunConfig, spec: BlendSpec, tokenizer: Tokenizer, data_files: str
) -> KeyedGPTDatasetConfig:
    """Return megatron-core's dataset configuration of a run."""
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
        sequences_per_dataset=given_lengths(config, spec),
        data_files=data_files,
        vocab_size=_entries(config, tokenizer),
    )


@contextmanager
def _without_cache_warnings() -> Iterator[None]:
    """Silence megatron-core's warning that indices of made-up data are not cached."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Unable to save MockGPTDataset" not in record.getMessage()

    core_logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    core_logger.addFilter(is_other)
    try:
        yield
    finally:
        core_logger.removeFilter(is_other)


@contextmanager
def _told_in_a_sentence() -> Iterator[None]:
    """Turn a failure to write indices, which preflight could not foresee, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The indices of samples cannot be written or read ({error}); free some space, or give "
            "another folder with `--data-cache-path`."
        ) from error


def _leave_out_unused_splits(
    core_config: KeyedGPTDatasetConfig, sizes: Sequence[int | None]
) -> None:
    """Leave out splits of which nothing is asked, and which may hold nothing."""
    for name in ("split_matrix", "blend_per_split"):
        parts = getattr(core_config, name)
        if parts is not None:
            kept = [None if size == 0 else x for size, x in zip(sizes, parts, strict=True)]
            setattr(core_config, name, kept)


def build_gpt_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the train, valid and test datasets; all ranks call this together.

    Args:
        sizes: samples to draw from train, valid and test; None means one epoch.
        is_built_on_rank: a function that tells whether this rank reads data.

    Raises:
        DataError: see `check_inputs`; also when neither data nor ``--mock-data`` is given.
    """
    if config.section(DataConfig).mock_data:
        spec, data_files, cls = BlendSpec(None, None), "mock", MockGPTDataset
    else:
        spec, cls = training_blend(config), KeyedGPTDataset
        data_files = check_inputs(config, spec, tokenizer, sizes)
    core_config = dataset_config(config, spec, tokenizer, data_files)
    _leave_out_unused_splits(core_config, sizes)
    with _told_in_a_sentence(), warnings.catch_warnings(), _without_cache_warnings():
        # megatron-core warns once for each split of each prefix; the tools warn once per dataset.
        warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
        built = BlendedMegatronDatasetBuilder(
            cls, list(sizes), is_built_on_rank, core_config
        ).build()
    return Datasets(*built)
