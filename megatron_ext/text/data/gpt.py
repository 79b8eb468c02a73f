"""Builds megatron-core's GPT datasets and blends, from files or as mock data.

Inputs are checked before anything is built: a split without documents gives an error, while
megatron-core would loop forever. Code for data files is in checked.py, which runs with mock data do
not import.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)

from megatron_ext import limits
from megatron_ext.config.run import RunConfig
from megatron_ext.device.host import this_host
from megatron_ext.errors import DataError
from megatron_ext.text.data.blend import SPLITS, BlendSpec, given_lengths
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.batch_size import split_sizes
from megatron_ext.train.task import Datasets

INDEX_BYTES = 16
"""Bytes of megatron-core's indices for each sample, and again for each document in a sample."""


@dataclass
class KeyedGPTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """A GPTDatasetConfig that also holds a digest of the data files, and the vocabulary size."""

    data_files: str = field(default="", kw_only=True)
    """Digest of path, size and modification time of all data files, for the indices' cache key."""
    vocab_size: int = field(kw_only=True)


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of a dataset's sequences for train, valid and test.

    ``split`` is the value of ``--split``, like ``"98,1,1"``; round as megatron-core does.
    """
    edges = accumulate(parse_and_normalize_split(split), initial=0.0)
    return list(pairwise(round(edge * float(num_sequences)) for edge in edges))


def check_index_memory(
    tokens_per_document: float,
    seq_length: int,
    sizes: Sequence[int | None],
    advice: str = "",
    *,
    elsewhere: bool = False,
) -> None:
    """Raise a DataError if the indices of samples do not fit into the memory of the machine.

    megatron-core builds the indices in the memory of one process. They have an entry for each
    sample of the run, and one for each document in a sample.

    Args:
        tokens_per_document: mean length, from which the documents in a sample are estimated.
        sizes: number of samples of each split; splits of size None (one epoch) are not counted.
        advice: words that end the error's sentence, such as ", or give ...".
        elsewhere: whether the run is planned for another machine. The error is then a note, which
            rank 0 prints.
    """
    documents = seq_length / tokens_per_document
    needed = INDEX_BYTES * (1 + documents) * sum(size or 0 for size in sizes)
    memory = this_host().memory
    if needed > memory:
        drawn = ", ".join(f"{name} {size or 0}" for name, size in zip(SPLITS, sizes, strict=True))
        sentence = (
            f"The samples of the run ({drawn}) need indices of at least {needed / 1e9:,.1f} GB, "
            f"but this machine has {memory / 1e9:,.1f} GB; lower `--train-iters`, "
            f"`--train-samples`, `--eval-iters` or `--global-batch-size`{advice}."
        )
        if not elsewhere:
            raise DataError(sentence)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"> {sentence}", flush=True)


def check_mock_data(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that the indices of mock data fit into memory, and warn if validation will take long.

    Raises:
        DataError: the indices do not fit.
    """
    training = config.training
    length = config.model.seq_length or 0
    sizes = split_sizes(training, length, config.parallel.data_parallel_size)
    check_index_memory(
        MockGPTLowLevelDataset.max_sequence_length / 2,
        length,
        sizes,
        elsewhere=config.planning.dry_run_gpu is not None,
    )
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
    """Turn an OSError about the index cache, within a ``with`` block, into a DataError.

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


def build_mock_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the train, valid and test split of mock data.

    ``sizes`` has the number of samples of each split; None means one epoch.
    """
    core_config = dataset_config(config, BlendSpec(None, None), tokenizer, "mock")
    return build_blend(MockGPTDataset, core_config, sizes, is_built_on_rank)


def build_blend(
    kind: type[GPTDataset],
    core_config: KeyedGPTDatasetConfig,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the train, valid and test split as datasets of class ``kind``; all ranks call this.

    ``sizes`` has the number of samples of each split; None means one epoch. ``is_built_on_rank``
    tells whether this rank reads data.
    """
    # A split of which no samples are needed may have no documents, so do not build it.
    for name in ("split_matrix", "blend_per_split"):
        parts = getattr(core_config, name)
        if parts is not None:
            kept = [None if size == 0 else x for size, x in zip(sizes, parts, strict=True)]
            setattr(core_config, name, kept)
    with _cache_errors_as_data_errors(core_config.path_to_cache), warnings.catch_warnings():
        # megatron-core warns once for each split of each prefix; the tools warn once per dataset.
        warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
        builder = BlendedMegatronDatasetBuilder(kind, list(sizes), is_built_on_rank, core_config)
        return Datasets(*builder.build())
