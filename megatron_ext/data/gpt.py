"""GPT datasets: megatron-core's GPTDataset and blending behind a typed layer.

What is added to megatron-core: inputs are checked before anything is built, a split without
documents is refused instead of looping for ever, and cached indices are keyed by everything that
determines them, the identity of the data files included.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from torch.utils.data import Dataset

from megatron_ext.data.indexed import check_indexed_dataset, id_range
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer

VOCABULARY_SAMPLE = 1 << 24
"""Tokens of each dataset that are compared with the vocabulary before training."""

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class Datasets:
    """The three splits; None where no samples were asked for or this rank reads no data."""

    train: Dataset[Any] | None
    valid: Dataset[Any] | list[Dataset[Any]] | None
    test: Dataset[Any] | None


@dataclass
class KeyedGPTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """GPTDatasetConfig whose cache key also covers what megatron-core's leaves out."""

    data_files: str = field(default="", kw_only=True)
    """Digest of the path, size and modification time of every data file."""


class KeyedGPTDataset(GPTDataset):  # type: ignore[misc]
    """GPTDataset whose cached indices are rebuilt when a data file or an option changes."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *GPTDataset._key_config_attributes(),
            "add_extra_token_to_sequence",
            "drop_last_partial_validation_sequence",
            "data_files",
        ]


@dataclass(frozen=True)
class BlendSpec:
    """Where the samples of each split come from: one blend cut by --split, or one per split."""

    blend: Blend | None
    per_split: list[Blend | None] | None

    def prefixes(self) -> list[str]:
        """Every dataset prefix, in order, without repeats."""
        blends = self.per_split if self.per_split is not None else [self.blend]
        return list(dict.fromkeys(p for blend in blends if blend is not None for p in blend[0]))


def _read_words(flag: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise DataError(
            f"`{flag}` ({path}) cannot be read ({error.strerror}); give a file of dataset prefixes."
        ) from error


def _blend(flag: str, words: Sequence[str] | None) -> Blend | None:
    """Parse prefixes, or weights and prefixes, as Megatron-LM does."""
    if not words:
        return None
    try:
        blend = get_blend_from_list(list(words))
    except (ValueError, AssertionError):
        blend = None
    if blend is None or (blend[1] is None and any(map(_is_number, words))):
        raise DataError(
            f"`{flag}` ({' '.join(words)}) mixes weights and prefixes; give only prefixes, or a "
            "weight before each prefix."
        )
    prefixes, weights = blend
    if weights is not None and (min(weights) < 0 or sum(weights) <= 0):
        raise DataError(
            f"`{flag}` has the weights {weights}; they must be at least 0 and not all 0."
        )
    return prefixes, weights


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_blend(config: RunConfig) -> BlendSpec:
    """Collect the dataset prefixes of a run from its flags.

    Raises:
        DataError: a list file that cannot be read, or a malformed blend.
    """
    data = config.data
    if data.data_args_path is not None:
        words = _read_words("--data-args-path", data.data_args_path)
        return BlendSpec(_blend("--data-args-path", words), None)
    if data.data_path:
        return BlendSpec(_blend("--data-path", data.data_path), None)
    if data.per_split_data_args_path is not None:
        return BlendSpec(None, _read_per_split(data.per_split_data_args_path))
    given = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(given):
        flags = (f"--{split}-data-path" for split in SPLITS)
        return BlendSpec(None, [_blend(f, words) for f, words in zip(flags, given, strict=True)])
    return BlendSpec(None, None)


def training_blend(config: RunConfig) -> BlendSpec:
    """`read_blend` of a run that must have data.

    Raises:
        DataError: no dataset is given at all; also see `read_blend`.
    """
    spec = read_blend(config)
    if not spec.prefixes():
        raise DataError(
            "No training data is given; use `--data-path` PREFIX, `--train-data-path` PREFIX "
            "or `--mock-data`."
        )
    return spec


def _read_per_split(path: str) -> list[Blend | None]:
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        lists = [content[split] for split in SPLITS]
    except OSError as error:
        raise DataError(f"`{flag}` ({path}) cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`{flag}` ({path}) must be a JSON object with the keys train, valid and test, each "
            f"a list of prefixes or of weights and prefixes; reading it failed with: {error!r}."
        ) from error
    return [_blend(flag, x.split() if isinstance(x, str) else x) for x in lists]


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """First and past-the-last sequence of each split, as megatron-core cuts them."""
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
        config: the run.
        spec: where the data comes from.
        tokenizer: what the data should have been made with.
        sizes: samples asked of train, valid and test (None means one epoch).

    Returns:
        A digest of the identity (path, size, modification time) of all files.

    Raises:
        DataError: a missing, truncated or corrupt file, an empty split that samples are asked of,
            or token ids beyond the vocabulary.
    """
    digest = hashlib.sha256()
    for prefix in spec.prefixes():
        info = check_indexed_dataset(prefix)
        for suffix in (".bin", ".idx"):
            stat = Path(prefix + suffix).stat()
            digest.update(f"{prefix}{suffix}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        _check_vocabulary(prefix, config.model.padded_vocab_size or tokenizer.vocab_size)
        if spec.per_split is None and config.data.split is not None:
            ratios = parse_and_normalize_split(config.data.split)
            cut = split_bounds(config.data.split, info.num_sequences)
            for name, bounds, size, ratio in zip(SPLITS, cut, sizes, ratios, strict=True):
                if size != 0 and (ratio > 0 or name == "train"):
                    _check_not_empty(prefix, bounds, name, config.data.split)
    return digest.hexdigest()


def _check_vocabulary(prefix: str, vocab_size: int) -> None:
    """Compare the first ids of a dataset with the size of the vocabulary."""
    ids = id_range(prefix, VOCABULARY_SAMPLE)
    if ids is not None and ids[1] >= vocab_size:
        raise DataError(
            f"{prefix}.bin holds the token id {ids[1]}, but the vocabulary has {vocab_size} "
            "entries; use the tokenizer that the data was preprocessed with."
        )


def dataset_config(
    config: RunConfig, spec: BlendSpec, tokenizer: Tokenizer, data_files: str
) -> KeyedGPTDatasetConfig:
    """megatron-core's dataset configuration of a run."""
    data = config.data
    per_dataset = None
    if data.per_dataset_sequences_path is not None:
        per_dataset = json.loads(Path(data.per_dataset_sequences_path).read_text())
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
        sequences_per_dataset=per_dataset,
        data_files=data_files,
    )


@contextmanager
def _without_cache_warnings() -> Iterator[None]:
    """megatron-core warns of made-up data that its indices are not cached; nobody wants them."""

    def wanted(record: logging.LogRecord) -> bool:
        return "Unable to save MockGPTDataset" not in record.getMessage()

    core_logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    core_logger.addFilter(wanted)
    try:
        yield
    finally:
        core_logger.removeFilter(wanted)


def build_gpt_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the train, valid and test datasets; all ranks call this together.

    Args:
        config: the run.
        tokenizer: for the end-of-document and padding ids.
        sizes: samples to draw from train, valid and test; None means one epoch.
        is_built_on_rank: whether this rank reads data.

    Raises:
        DataError: see `check_inputs`; also when neither data nor ``--mock-data`` is given.
    """
    if config.data.mock_data:
        spec, data_files, cls = BlendSpec(None, None), "mock", MockGPTDataset
    else:
        spec, cls = training_blend(config), KeyedGPTDataset
        data_files = check_inputs(config, spec, tokenizer, sizes)
    core_config = dataset_config(config, spec, tokenizer, data_files)
    with warnings.catch_warnings(), _without_cache_warnings():
        # megatron-core warns once for each split of each prefix; the tools warn once per dataset.
        warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
        built = BlendedMegatronDatasetBuilder(
            cls, list(sizes), is_built_on_rank, core_config
        ).build()
    return Datasets(*built)
